"""Quantized linears over ranks: shares keep every value, and the sums have the bits of one rank."""

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import detcompile
from detcompile import CompiledModel, Numerics
from detcompile.models.gguf.header import TENSOR_TYPES
from detcompile.models.gguf.packing import PACKINGS, packed_linear
from detcompile.models.remote import compile_in_workers
from detcompile.parallel import TensorParallel
from detcompile.passes import program_source
from detcompile.passes.modules.experts import pin_experts
from detcompile.passes.modules.quantized_layouts import LAYOUTS
from detcompile.passes.modules.quantized_linear import QuantizedLinear, QuantizedStack
from detcompile.passes.programs.aot import run_plainly
from detcompile.passes.sharding.modules import QuantizedRowShard, keep_features
from detcompile.passes.sharding.shares import shares_of
from detcompile.templates.collectives.op import add_partials
from detcompile.templates.ops import ours
from detcompile.weights import named_weights
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.model_cases import certified
from tests.models import gguf_cases
from tests.parallel.cases import answers, dense_logits, needs_gpus, quantized_layer
from tests.parallel.ranks import run_ranks
from tests.quantized_checkpoints import CHECKPOINTS, ODD_CHECKPOINTS, write_gpt_oss, write_mixture

CHECKPOINT_NAMES = [*CHECKPOINTS, *ODD_CHECKPOINTS]
NUMERICS = Numerics()
SERVED = {
    ("cpu", 2): [("fp8", torch.bfloat16)],
    ("cpu", 4): [("gptq_v2, act order", torch.float16)],
    ("cuda", 2): [("fp8", torch.bfloat16), ("gptq_v2, act order", torch.float16), ("compressed int4", torch.bfloat16)],
    ("cuda", 4): [("awq", torch.float16)],
}


def checkpoint_linear(name: str, n: int, k: int) -> QuantizedLinear:
    """A linear in a checkpoint's format, with a bias."""
    generator = torch.Generator().manual_seed(n + k)
    config, make = {**CHECKPOINTS, **ODD_CHECKPOINTS}[name]
    tensors, _ = make(torch.randn(n, k, generator=generator))
    weight, order = LAYOUTS[config["quant_method"]].read("down_proj" if k == 160 else "up_proj", tensors, config)
    return QuantizedLinear(weight, torch.randn(n, generator=generator).bfloat16(), order)


def gguf_linear(kind: str, n: int, k: int) -> QuantizedLinear:
    """A linear of a GGUF type, whose blocks may have up to 256 values."""
    stored = gguf_cases.stored((n, -(-k // 256) * 256), kind, np.random.default_rng(n + k))
    tensor_type = next(each for each in TENSOR_TYPES.values() if each.name == kind)
    weight, _ = LAYOUTS["gguf"].read("down_proj", packed_linear(stored, tensor_type), {})
    return QuantizedLinear(weight, None)


FORMATS: dict[str, Callable[[int, int], QuantizedLinear]] = {
    **{name: functools.partial(checkpoint_linear, name) for name in CHECKPOINT_NAMES},
    **{kind: functools.partial(gguf_linear, kind) for kind in PACKINGS},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("n", "k"), exhaustive_unless(lambda shape: shape == (48, 160), [(48, 160), (80, 64), (24, 352)])
)
def test_shares_of_a_linear_keep_its_bits(name: str, n: int, k: int) -> None:
    """Columns of heads in any order, and ranges of K whose products meet in the tree of one rank."""
    whole = FORMATS[name](n, k)
    values = whole.dequantized(torch.float64)
    x = torch.randn(5, whole.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole.radices = list(NUMERICS.radices)
    expected = whole(x)
    for tp in (2, 4):
        above, below = NUMERICS.split_radices(tp)
        partials = []
        for rank in range(tp):
            ranks = TensorParallel(size=tp, rank=rank, group="never used")
            first, last = (side * (n // 4) // tp for side in (rank, rank + 1))
            features = torch.arange(n).view(4, -1)[:, first:last].flatten()
            columns = copy.deepcopy(whole)
            keep_features(columns, features)
            assert torch.equal(columns.dequantized(torch.float64), values[features])
            assert_bitwise_equal(columns(x), expected[:, features])
            shard = QuantizedRowShard(whole, (above, below), ranks)
            inputs = torch.arange(x.shape[1])[shard.share] if shard.inputs is None else shard.inputs
            assert torch.equal(shard.linear.dequantized(torch.float64), values[:, inputs])
            parts, linear = shard.linear.quantized[:4], shard.linear
            partials.append(ours.dequant_matmul_partial(x[:, inputs], *parts, linear.group, linear.rows, below, tp))
        total = add_partials(torch.stack(partials), whole.bias, None, above, x.dtype)
        assert_bitwise_equal(total, expected, f"{name} on {tp} ranks")


@pytest.mark.parametrize("num_experts", [0, 2])
def test_no_whole_quantized_weights_are_kept(num_experts: int) -> None:
    linear = checkpoint_linear("fp8", 48, 160)
    model: Any = QuantizedStack(linear.quantized, num_experts) if num_experts else linear
    assert shares_of(model, NUMERICS, 8, TensorParallel(size=2, rank=0, group="never used"), False) is None


def gguf_layers(kinds: list[str]) -> PreTrainedModel:
    """A layer of each type, in float32, where rounding hides nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = gguf_cases.write(Path(folder, "kept.gguf"), kinds)
        return detcompile.load_model(path, device="cpu", dequantize=False, dtype=torch.float32)


MIXTURES: dict[str, Callable[[Path], object]] = {
    "fp8 experts": lambda folder: write_mixture(folder, "fp8", torch.float32),
    "int4 experts": lambda folder: write_mixture(folder, "compressed int4 with zeros", torch.float32),
    "mxfp4 experts": lambda folder: write_gpt_oss(folder, torch.float32),
}
MIXTURES |= {f"{name}, kept": write for name, write in MIXTURES.items()}
PARTS = [CHECKPOINT_NAMES[:5], CHECKPOINT_NAMES[5:10], CHECKPOINT_NAMES[10:], list(PACKINGS)[:6], list(PACKINGS)[6:]]
PARTS += [list(MIXTURES)[:3], list(MIXTURES)[3:]]


def mixture_layer(name: str) -> PreTrainedModel:
    """A layer whose experts are quantized."""
    with tempfile.TemporaryDirectory() as folder:
        MIXTURES[name](Path(folder))
        model = detcompile.load_model(folder, device="cpu", dequantize=False if name.endswith("kept") else None)
    pin_experts(model)
    return model


def graphs(formats: list[str], tp: int) -> dict[str, Tensor]:
    """Logits of the certified graphs; GGUF types are layers of one model."""
    if formats[0] in PACKINGS:
        return {"gguf": dense_logits(gguf_layers(formats), tp)}
    if formats[0] in MIXTURES:
        return {name: dense_logits(mixture_layer(name), tp) for name in formats}
    return {name: dense_logits(quantized_layer(name, torch.float32, "cpu"), tp) for name in formats}


def graphs_on_a_rank(rank: int, formats: list[str], tp: int) -> dict[str, Tensor]:
    return graphs(formats, tp)


@EXHAUSTIVE
def test_quantized_experts_have_bits_of_dequantized_ones() -> None:
    logits = graphs(list(MIXTURES), 1)
    for name in list(MIXTURES)[:3]:
        assert_bitwise_equal(logits[f"{name}, kept"], logits[name], name)


@EXHAUSTIVE
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("formats", PARTS, ids=lambda part: part[0])
def test_every_format_has_the_bits_of_one_rank(formats: list[str], tp: int) -> None:
    whole = graphs(formats, 1)
    for rank, actual in enumerate(run_ranks(tp, graphs_on_a_rank, formats, tp)):
        for name, expected in whole.items():
            assert len(expected.unique()) > expected.shape[0] * expected.shape[1]
            assert_bitwise_equal(actual[name], expected, f"{name} on rank {rank} of {tp}")


def served(name: str, dtype: torch.dtype, device: str, tp: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The fingerprint, and answers."""
    compile_model = certified if device == "cpu" else detcompile.compile
    model = compile_model(quantized_layer(name, dtype, device), tp=tp, max_context=256)
    return model.fingerprint_parts, answers(model)


def served_on_a_rank(rank: int, device: str, tp: int) -> list[tuple[dict[str, str], dict[str, Tensor]]]:
    return [served(*case, device, tp) for case in SERVED[device, tp]]


@pytest.mark.parametrize(
    ("device", "tp"),
    [
        pytest.param(device, tp, marks=needs_gpus(tp) if device == "cuda" else EXHAUSTIVE, id=f"{device}-{tp}")
        for device, tp in SERVED
    ],
)
def test_answers_and_fingerprints_equal_those_of_one_rank(device: str, tp: int) -> None:
    wholes = {case: served(*case, device, 1) for case in SERVED[device, tp]}
    for rank, cases in enumerate(run_ranks(tp, served_on_a_rank, device, tp, device_type=device)):
        for ((name, _), (parts, whole)), (rank_parts, actual) in zip(wholes.items(), cases, strict=True):
            assert rank_parts == parts
            assert len(whole["batch"].unique()) > 1
            for what, expected in whole.items():
                assert_bitwise_equal(actual[what], expected, f"{what} of {name} on rank {rank} of {tp}")


def stages_model() -> PreTrainedModel:
    """In a worker process, which compiles nothing else."""
    program_source.compile_fx_inner = run_plainly
    return quantized_layer("gptq_v2, act order", torch.float16, "cpu", layers=2)


@EXHAUSTIVE
@pytest.mark.parametrize("tp", [1, 2])
def test_stages_have_the_bits_of_one_process(tp: int) -> None:
    whole = certified(quantized_layer("gptq_v2, act order", torch.float16, "cpu", layers=2), max_context=256)
    numbers = {"tp": tp, "pp": 2, "numerics": NUMERICS, "max_context": 256}
    with compile_in_workers(stages_model, **numbers) as stages:
        assert stages.fingerprint_parts == whole.fingerprint_parts
        held = stages.apply(bytes_held)
        assert max(held) < sum(held) / 2 * 1.2 / tp
        actual = answers(stages)
    for what, expected in answers(whole).items():
        assert_bitwise_equal(actual[what], expected, what)


def bytes_held(model: CompiledModel) -> int:
    """Bytes of the layers' weights that a worker holds."""
    weights = named_weights(model.model).items()
    return sum(weight.untyped_storage().nbytes() for name, weight in weights if ".layers." in name)
