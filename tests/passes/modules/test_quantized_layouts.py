"""Values of quantized linears against each format's written definition, one number at a time; other layouts refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import detcompile
from detcompile import UnsupportedModel
from detcompile.passes.modules.quantized_layouts import LAYOUTS
from detcompile.passes.modules.quantized_linear import QuantizedLinear
from tests.quantized_checkpoints import write_checkpoint

Matrix = list[list[tuple[float, float]]]  # (q - z, scale) of each [n][k]
Tensors = dict[str, Tensor]
AUTOAWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map: the column in a word's i-th nibble
widths = {"n": st.integers(1, 20), "k": st.integers(1, 80), "group": st.sampled_from([-1, 1, 8, 24, 32, 48])}
seeds = st.integers(0, 999)


def field(word: int, place: int, bits: int) -> int:
    """Number ``place`` of a 32-bit word, lowest bits first."""
    return (int(word) % (1 << 32)) >> bits * place & (1 << bits) - 1


def random_words(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)


def require_values(method: str, tensors: Tensors, config: dict, expected: Matrix) -> None:
    """Compare the float64 values, and their float32 products rounded to float16 by NumPy."""
    weight, order = LAYOUTS[method].read("linear", tensors, config)
    linear = QuantizedLinear(weight, None, order)
    number, scale = np.moveaxis(np.array(expected), -1, 0)
    np.testing.assert_array_equal(linear.dequantized(torch.float64).numpy(), number * scale)
    with np.errstate(over="ignore"):
        rounded = (number.astype(np.float32) * scale.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(linear.dequantized(torch.float16).numpy(), rounded)


@given(bits=st.sampled_from([4, 8]), v2=st.booleans(), act_order=st.booleans(), seed=seeds, **widths)
def test_gptq_values_follow_the_definition(n, k, group, bits, v2, act_order, seed) -> None:
    """GPTQModel: w = (q - z) * s, z and s of group g_idx[k]; "gptq" stores z - 1."""
    generator = torch.Generator().manual_seed(seed)
    per = 32 // bits
    k = -(-k // per) * per
    size = k if group == -1 else group
    place = torch.randperm(k, generator=generator) if act_order else torch.arange(k)
    tensors = {
        "qweight": random_words(generator, k // per, n),
        "qzeros": random_words(generator, -(-k // size), -(-n // per)),
        "scales": torch.randn(-(-k // size), n, generator=generator).half(),
        "g_idx": (place // size).int(),
    }
    config = {"bits": bits, "group_size": group, "desc_act": act_order, "checkpoint_format": "gptq_v2" if v2 else None}

    def weight(row: int, column: int) -> tuple[float, float]:
        g = tensors["g_idx"][column]
        q = field(tensors["qweight"][column // per, row], column % per, bits)
        z = field(tensors["qzeros"][g, row // per], row % per, bits) + (0 if v2 else 1)
        return q - z, float(tensors["scales"][g, row])

    require_values("gptq", tensors, config, [[weight(row, column) for column in range(k)] for row in range(n)])


@given(seed=seeds, **widths)
def test_awq_values_follow_the_definition(n, k, group, seed) -> None:
    """AutoAWQ, version gemm: w = (q - z) * s, columns interleaved in words along N."""
    generator = torch.Generator().manual_seed(seed)
    n, size = 8 * -(-n // 8), k if group == -1 else group
    tensors = {
        "qweight": random_words(generator, k, n // 8),
        "qzeros": random_words(generator, -(-k // size), n // 8),
        "scales": torch.randn(-(-k // size), n, generator=generator).half(),
    }

    def weight(row: int, column: int) -> tuple[float, float]:
        g, place = column // size, AUTOAWQ_ORDER.index(row % 8)
        q, z = (
            field(words[line, row // 8], place, 4)
            for words, line in ((tensors["qweight"], column), (tensors["qzeros"], g))
        )
        return q - z, float(tensors["scales"][g, row])

    expected = [[weight(row, column) for column in range(k)] for row in range(n)]
    require_values("awq", tensors, {"bits": 4, "group_size": group}, expected)


@given(bits=st.sampled_from([4, 8]), zeros=st.sampled_from(["none", "packed", "signed"]), seed=seeds, **widths)
def test_packed_integers_follow_the_definition(n, k, group, bits, zeros, seed) -> None:
    """compressed-tensors: signed q and z, 2^(bits - 1) added, packed along K (q) and along N (z); w = (q - z) * s."""
    generator = torch.Generator().manual_seed(seed)
    per, size, middle = 32 // bits, k if group == -1 else group, 1 << bits - 1
    groups = -(-k // size)
    tensors = {
        "weight_packed": random_words(generator, n, -(-k // per)),
        "weight_scale": torch.randn(n, groups, generator=generator).bfloat16(),
        "weight_shape": torch.tensor([n, k]),
    }
    if zeros == "packed":
        tensors["weight_zero_point"] = random_words(generator, -(-n // per), groups)
    elif zeros == "signed":
        tensors["weight_zero_point"] = torch.randint(-middle, middle, (n, groups), generator=generator).to(torch.int8)

    def weight(row: int, column: int) -> tuple[float, float]:
        g, z = column // size, 0
        if zeros == "packed":
            z = field(tensors["weight_zero_point"][row // per, g], row % per, bits) - middle
        elif zeros == "signed":
            z = int(tensors["weight_zero_point"][row, g])
        q = field(tensors["weight_packed"][row, column // per], column % per, bits) - middle
        return q - z, float(tensors["weight_scale"][row, g])

    config = compressed(
        "pack-quantized", {"type": "int", "num_bits": bits, "group_size": None if group == -1 else group}
    )
    expected = [[weight(row, column) for column in range(k)] for row in range(n)]
    require_values("compressed-tensors", tensors, config, expected)


@given(strategy=st.sampled_from(["tensor", "channel", "group"]), zeros=st.booleans(), seed=seeds, **widths)
def test_bytes_follow_the_definition(n, k, group, strategy, zeros, seed) -> None:
    """compressed-tensors, int-quantized: w = (q - z) * s in int8; scales of the matrix, of features or of groups."""
    generator = torch.Generator().manual_seed(seed)
    size = group if strategy == "group" and group > 0 else k
    shape = (1,) if strategy == "tensor" else (n, -(-k // size))
    tensors = {
        "weight": torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8),
        "weight_scale": torch.randn(shape, generator=generator),
    }
    if zeros:
        tensors["weight_zero_point"] = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)

    def weight(row: int, column: int) -> tuple[float, float]:
        place = (0,) if strategy == "tensor" else (row, column // size)
        z = int(tensors["weight_zero_point"][place]) if zeros else 0
        return int(tensors["weight"][row, column]) - z, float(tensors["weight_scale"][place])

    scheme = {"type": "int", "num_bits": 8, "strategy": strategy, "group_size": size if size < k else None}
    expected = [[weight(row, column) for column in range(k)] for row in range(n)]
    require_values("compressed-tensors", tensors, compressed("int-quantized", scheme), expected)


@given(block=st.sampled_from([None, (1, 24), (16, 32), (48, 1)]), compress=st.booleans(), seed=seeds, **widths)
def test_float8_values_follow_the_definition(n, k, group, block, compress, seed) -> None:
    """Float8 e4m3 of the OCP (bias 7, no infinity) times the scale of its block."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k), generator=generator)
    codes = torch.where(codes & 127 == 127, 0, codes)  # the NaN of either sign
    rows, columns = block or (n, k)
    scales = torch.randn(-(-n // rows), -(-k // columns), generator=generator)
    tensors = {"weight": codes.to(torch.uint8).view(torch.float8_e4m3fn)}

    def weight(row: int, column: int) -> tuple[float, float]:
        code = int(codes[row, column])
        exponent, mantissa = code >> 3 & 15, code & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        return (-value if code & 128 else value), float(scales[row // rows, column // columns])

    expected = [[weight(row, column) for column in range(k)] for row in range(n)]
    if compress:
        scheme = {"type": "float", "num_bits": 8, "block_structure": None if block is None else list(block)}
        tensors["weight_scale"] = scales
        require_values("compressed-tensors", tensors, compressed("float-quantized", scheme), expected)
    else:
        tensors["weight_scale_inv"] = scales
        require_values("fp8", tensors, {"weight_block_size": block}, expected)


def compressed(form: str, scheme: dict) -> dict:
    return {"format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}}


def zero_points(values: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda t: t | {k.replace("scale", "zero_point"): values(v) for k, v in t.items() if k.endswith("_scale")}


def changed(leaf: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: change(t) if key.endswith(leaf) else t for key, t in tensors.items()}


def renamed(leaf: str, other: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key.replace(leaf, other): t for key, t in tensors.items()}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("awq", {"version": None, "format": "gemv"}, "awq with format='gemv'"),
        ("awq", {"version": None, "checkpoint_format": "gemv_fast"}, "awq with checkpoint_format='gemv_fast'"),
        ("awq", {"version": None, "backend": "llm-awq"}, "awq with backend='llm-awq'"),
        ("gptq", {"format": "marlin"}, "gptq with format='marlin'"),
        ("compressed int4", {"transform_config": {"config_groups": {"R4": {}}}}, "transform_config multiplies"),
        ("compressed int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
        ("compressed int8", {"config_groups": {"W8A8": ["Linear"]}}, "W8A8 of config_groups is a preset"),
    ],
)
def test_settings_that_change_values_are_refused(name: str, settings: dict, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name)
    write_settings(tmp_path, settings)
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        detcompile.load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("settings", [{"format": "gptq_v2"}, {"checkpoint_format": "GPTQ_V2"}])
def test_gptq_v2_is_known_by_either_key(settings: dict, tmp_path: Path) -> None:
    exact = write_checkpoint(tmp_path, "gptq_v2, act order")
    write_settings(tmp_path, {"checkpoint_format": None, **settings})
    model = detcompile.load_model(tmp_path, device="cpu")
    assert all(torch.equal(model.get_submodule(path).dequantized(torch.float64), exact[path]) for path in exact)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", changed("qweight", Tensor.long), "q_proj.qweight is torch.int64, but must be a matrix of int32"),
        ("awq", changed("qzeros", lambda t: t.view(torch.int16)), "q_proj.qzeros is torch.int16"),
        ("gptq", changed("q_proj.qweight", lambda t: t[:, :-8]), r"weight of (56, 64), and the model's linear needs"),
        ("gptq", changed("q_proj.scales", lambda t: t[:, :-8]), r"scales of (2, 56), and the model's linear needs"),
        ("gptq", changed("q_proj.qzeros", lambda t: t[:, :-1]), r"zeros of (2, 56), and the model's linear needs"),
        ("gptq", changed("q_proj.bias", lambda t: t[:1]), r"bias of (1,), and the model's linear needs (64,)"),
        ("fp8", lambda t: {k: v for k, v in t.items() if not k.endswith("0.self_attn.q_proj.bias")}, "and no bias"),
        ("compressed int4", changed("weight_shape", lambda t: t - 5), r"weight of (64, 59), and the model's linear"),
        ("compressed int8", changed("_proj.weight", Tensor.half), "weight is torch.float16, not compressed to int8"),
        ("compressed int8", changed("weight_scale", lambda t: t[:4]), "(4, 1) do not have one row for each"),
        ("compressed float8, partial blocks", zero_points(torch.ones_like), "float8 with zero points"),
        ("fp8", renamed("weight_scale_inv", "weight_scale"), "none has weight_scale_inv"),
        (
            "fp8",
            renamed("0.mlp.up_proj.weight_scale_inv", "0.mlp.up_proj.weight_scale"),
            "up_proj.weight_scale, a quantization scale",
        ),
        (
            "awq",
            lambda t: t | {"model.layers.0.mlp.act_fn.scales": torch.ones(160)},
            "act_fn.scales, a quantization scale",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, name)
    tensors = change(load_file(tmp_path / "model.safetensors"))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        detcompile.load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["fp8", "compressed int8", "compressed float8, partial blocks"])
def test_scales_without_a_quantization_are_refused(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    del settings["quantization_config"]
    file.write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=r"weight_scale\w*, a quantization scale"):
        detcompile.load_model(tmp_path, device="cpu")


def write_settings(folder: Path, settings: dict) -> None:
    """Change the folder's quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
