"""Quantized linears of a GGUF file: gguf's values, matmul's bytes. They use the kept kernels and programs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

import detcompile
from detcompile.models.gguf.header import TENSOR_TYPES, TensorType
from detcompile.models.gguf.packing import PACKINGS, packed_linear
from detcompile.templates.matmul.op import matmul_cpu
from detcompile.templates.quantized.op import dequant_matmul_cpu, dequantized_cpu
from detcompile.templates.quantized.weights import QuantizedWeight, dequantized
from tests.bits import assert_bitwise_equal
from tests.model_cases import certified
from tests.models.gguf_cases import write


@given(
    kind=st.sampled_from([each for each in TENSOR_TYPES.values() if each.name in PACKINGS]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_packed_values_equal_gguf_reader(
    kind: TensorType, shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    draws, packing, k = np.random.default_rng(seed), PACKINGS[kind.name], shape[1] * kind.block
    blocks = draws.integers(0, 256, (*shape, kind.size), dtype=np.uint8)
    for place in {packing.d, packing.d if packing.minimum is None else packing.minimum}:
        numbers = draws.choice(np.float16([0.0, -0.0, 6e-8, -0.31, 0.017, 3.1]), (*shape, 1))
        blocks[..., place : place + 2] = numbers.view(np.uint8)
    stored = blocks.reshape(shape[0], -1)
    parts = packed_linear(stored, kind)
    weight = QuantizedWeight(parts["qweight"], parts["scales"], None, parts.get("mins"), k, packing.group, 1)
    expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType[kind.name]).copy()).to(dtype)
    assert_bitwise_equal(dequantized(weight, dtype), expected, kind.name)
    assert_bitwise_equal(dequantized_cpu(weight, dtype), expected, kind.name)
    x = torch.from_numpy(draws.standard_normal((3, k), dtype=np.float32)).to(dtype)
    product = dequant_matmul_cpu(x, weight, None, None, [])
    assert_bitwise_equal(product, matmul_cpu(x, expected, None, None, []), kind.name)


@pytest.mark.exhaustive  # two programs
def test_kept_weights_give_the_same_bits(tmp_path: Path) -> None:
    path = write(tmp_path / "kept.gguf", ["Q4_1"])
    ids, logits, models = torch.arange(1, 65)[None], [], []
    for choice in (True, False):
        model = certified(detcompile.load_model(path, device="cpu", dequantize=choice), max_context=128)
        logits.append(model(ids).logits)
        models.append(model)
    assert_bitwise_equal(*logits)
    plain, kept = models
    assert "detcompile.dequant_matmul.default" in {entry.op for entry in kept.certificate.entries}
    assert plain.fingerprint != kept.fingerprint
