"""Quantized checkpoints: read from their own layouts, meaning kept, every axis by bytes, everything else refused."""

import functools
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Linear

import detcompile
from detcompile import CompiledModel, EngineConfig, Numerics, SamplingParams, UncertifiedOp, UnsupportedModel
from detcompile.commands.axes import Configuration, score
from detcompile.orders.numerics import matmul_order
from detcompile.passes.backend import Backend
from detcompile.passes.modules.quantized_layouts import unpack_words
from detcompile.passes.modules.quantized_linear import QuantizedLinear, pin_quantized
from detcompile.passes.proof.context import Role
from detcompile.passes.tracing import cause
from detcompile.templates.cpu.library import isa_of
from tests.bits import assert_bitwise_equal
from tests.invariance.axis import configuration_for
from tests.model_cases import VOCAB_SIZE, certified, random_model
from tests.quantized_checkpoints import (
    CHECKPOINTS,
    ODD_CHECKPOINTS,
    WIDTHS,
    config_without_name,
    pack_words,
    write_checkpoint,
)
from tests.templates.quantized.cases import quantized_weight

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize("name", [*CHECKPOINTS, *ODD_CHECKPOINTS])
def test_checkpoint_is_read_correctly(name: str, tmp_path: Path) -> None:
    exact = write_checkpoint(tmp_path, name)
    model = detcompile.load_model(tmp_path, device="cpu")
    linears = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert set(linears) == set(exact) and len(exact) == 14
    assert str(tmp_path) not in config_without_name(model)
    for path, linear in linears.items():
        assert linear.bias is None or linear.bias.dtype is torch.float16
        assert torch.equal(linear.dequantized(torch.float64), exact[path]), path
        assert_bitwise_equal(linear.dequantized(torch.float16), exact[path].float().half(), path)
        x = torch.randn(3, linear.in_features, dtype=torch.float16)
        bias = None if linear.bias is None else linear.bias.double()
        plain = torch.nn.functional.linear(x.double(), exact[path], bias)
        assert (linear(x).double() - plain).norm() < 2e-3 * plain.norm()


@functools.cache
def compiled(name: str, device: str) -> tuple[CompiledModel, dict[str, Tensor]]:
    """And its exact weights; on CPUs Inductor compiles the one of float16 only, for time."""
    dtype = torch.float16 if "gptq" in name or name == "awq" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        exact = write_checkpoint(Path(folder), name, dtype)
        model = detcompile.load_model(folder, device=device)
    compile_model = certified if device == "cpu" and dtype is torch.bfloat16 else detcompile.compile
    return compile_model(model, numerics=Numerics(tp_sizes=(1, 2)), max_context=256), exact


@pytest.mark.parametrize("name", ["gptq_v2, act order", "fp8"])
def test_quantized_model_equals_dequantized_model(name: str) -> None:
    model, exact = compiled(name, "cpu")
    plain = random_model("qwen3", model.model.dtype, **WIDTHS, attention_bias=True)
    with torch.no_grad():
        for path, module in plain.named_modules():
            if path in exact:
                module.weight.copy_(exact[path])
                if module.bias is not None:
                    module.bias.copy_(model.model.get_submodule(path).bias)
        ids = torch.randint(0, VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(5))
        expected = plain(ids, use_cache=False).logits.float()
    assert (model(ids).logits.float() - expected).norm() < 1e-2 * expected.norm()
    products = [entry for entry in model.certificate.entries if entry.op == "detcompile.dequant_matmul.default"]
    assert sum(entry.count for entry in products) == 14
    isa = isa_of(torch.device("cpu"))
    orders = {str(matmul_order(k, model.model.dtype, radices, isa)) for k, radices in ((64, ()), (160, (2,)))}
    assert orders <= {entry.order for entry in products}


@pytest.mark.parametrize("axis", ["batch", "composition", "padding", "chunking", "decode"])
@pytest.mark.parametrize("name", ["gptq_v2, act order", "fp8"])
def test_every_axis_holds(name: str, axis: str, device: str) -> None:
    model, _ = compiled(name, device)
    configuration = configuration_for(axis, 67, 3)
    alone = score(model, Configuration((configuration.rows[configuration.target],)))
    assert_bitwise_equal(score(model, configuration), alone, configuration.describe())


def test_the_engine_serves_it() -> None:
    model, _ = compiled("fp8", "cpu")
    prompts = [torch.randint(0, VOCAB_SIZE, (length,)).tolist() for length in (3, 40, 17)]
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3)
    engine = model.engine(EngineConfig(num_blocks=16, block_size=16, max_num_batched_tokens=20))
    together = engine.generate(prompts, params, progress=False)
    alone = [engine.generate(prompt, params, progress=False)[0] for prompt in prompts]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert {len(o.outputs[0].token_ids) for o in together} == {6}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes', which is not certified"),
        ({"quant_method": "mxfp4"}, "holds no quantized linear (none has blocks)"),
        ({"quant_method": "hqq"}, "'hqq', which is not certified"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits=3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version='gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt='e5m2'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "with format='marlin-24'"),
        (PACKED | {"config_groups": {"group_0": {"weights": None}}}, "group_0 holds no weights"),
        (PACKED, "config_groups holds no weights"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme quantizes keys and values"),
        (CHECKPOINTS["awq"][0], "names a quantization and holds no quantized linear"),
    ],
)
def test_other_quantizations_are_refused_by_name(config: dict, message: str, tmp_path: Path) -> None:
    random_model("qwen3", torch.float16, **WIDTHS).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        detcompile.load_model(tmp_path, device="cpu")


def test_quantized_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {key.replace("layers.1.mlp.up_proj", "layers.1.mlp.experts.0.up_proj"): t for key, t in tensors.items()}
    save_file(moved, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"layers.1.mlp.experts.0.up_proj: quantized, and Qwen3ForC"):
        detcompile.load_model(tmp_path, device="cpu")


def test_a_dtype_that_no_layout_has_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.qweight"
    save_file(tensors | {name: tensors[name].view(torch.uint32)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"{re.escape(name)} in .* is U32, which is not read"):
        detcompile.load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("method", "missing"), [("awq", "qzeros"), ("gptq", "scales"), ("compressed int4", "weight_shape")]
)
def test_a_linear_that_lacks_a_tensor_is_named(method: str, missing: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, method)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{missing}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"layers.0.mlp.up_proj: the checkpoint has .* and no {missing}, which"):
        detcompile.load_model(tmp_path, device="cpu")


def test_what_transformers_quantized_itself_is_replaced_or_refused() -> None:
    model = random_model("qwen3", torch.bfloat16, **WIDTHS)
    model.config.quantization_config = SimpleNamespace(quant_method="quanto")
    with pytest.raises(UnsupportedModel, match="the quantization method 'quanto'"):
        pin_quantized(model)
    linear = FP8Linear(64, 160, block_size=(16, 32))
    with torch.no_grad():
        linear.weight.copy_(torch.randn(160, 64).to(torch.float8_e4m3fn))
        linear.weight_scale_inv.copy_(torch.rand(10, 2))
    model.model.layers[0].mlp.up_proj = linear
    assert pin_quantized(model) == 1
    replaced = model.model.layers[0].mlp.up_proj
    expected = linear.weight.float() * linear.weight_scale_inv.repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert_bitwise_equal(replaced.dequantized(torch.bfloat16), expected.bfloat16())


@given(bits=st.sampled_from([2, 4, 8]), dim=st.integers(0, 1), seed=st.integers(0, 99))
def test_words_come_out_as_they_went_in(bits: int, dim: int, seed: int) -> None:
    numbers = torch.randint(0, 1 << bits, (32, 48), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack_words(pack_words(numbers, bits, dim), bits, dim).long(), numbers)


@pytest.mark.parametrize(
    ("place", "message"), [(1, "the weights"), (2, "their scales"), (3, "their zeros"), (4, "their minima")]
)
def test_weights_that_hold_rows_are_refused(place: int, message: str) -> None:
    weight = quantized_weight("int8, groups of 128", 8, 256)

    def crossed(x: Tensor) -> Tensor:
        parts: list = [x, *weight[:4]]
        parts[place] = x if place > 1 else x.to(torch.int8)
        return torch.ops.detcompile.dequant_matmul(*parts, None, None, weight.group, weight.rows, [])

    def role_of(name: str, value: object) -> Role:
        return Role("rows", {0: "batch"}) if name == "L_x_" else Role("weight")

    x = torch.randn(6, 256)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(Exception) as refused:
        torch.compile(crossed, backend=Backend(Numerics(), role_of), fullgraph=True)(x)
    actual = cause(refused.value)
    assert isinstance(actual, UncertifiedOp) and f"{message} holds rows" in str(actual)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", {"weight_block_size": [64, 64]}, r"q_proj: scales \(4, 2\) do not fit a weight of 64 x 64"),
        ("fp8", {"weight_block_size": [64]}, r"a block of weights must be \[rows, columns\], got \[64\]"),
        ("gptq", {"group_size": 64}, r"q_proj: 2 groups of scales do not fit K=64 in groups of 64"),
        ("gptq", {"dynamic": {"-:.*q_proj": {}}}, "q_proj is quantized, and `dynamic` of its config excludes it"),
        ("gptq", {"dynamic": {"+:.*q_proj": {"bits": 3}}}, r"`dynamic` .* with bits=3 is not read \(known: 4, 8\)"),
        ("awq", {"group_size": 16}, r"q_proj: 2 groups of scales do not fit K=64 in groups of 16"),
        ("compressed int4", {"group_size": 16}, r"q_proj: 2 groups of scales do not fit K=64 in groups of 16"),
        ("compressed int4", {"targets": ["re:.*gate_proj"]}, "q_proj is quantized, and no group of the config"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_refused(
    name: str, change: dict, message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, name)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    quantization = settings["quantization_config"]
    for key, value in change.items():
        group = quantization.get("config_groups", {}).get("group_0")
        (quantization if group is None else group if key == "targets" else group["weights"])[key] = value
    file.write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=message):
        detcompile.load_model(tmp_path, device="cpu")
