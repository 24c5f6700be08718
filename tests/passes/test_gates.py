"""The gate of an MLP as one operation: recognised where it is, with the bytes of the separate ones on a GPU."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import detcompile
from detcompile.passes import gates, pipeline
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.models import random_model

APART = tuple(apply for apply in pipeline.PASSES if apply is not gates.fuse_gates)


@pytest.fixture
def on_every_device() -> Iterator[None]:
    with mock.patch.object(gates, "DEVICES", ("cpu", "cuda")):
        yield


def count(model: detcompile.CompiledModel) -> int:
    return sum(entry.op == "detcompile.silu_mul.default" for entry in model.certificate.entries)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float32), ("phi3", torch.bfloat16), ("olmo2", torch.bfloat16)]
)
def test_every_gate_is_found_and_means_the_same(name: str, dtype: torch.dtype, on_every_device: None) -> None:
    model = detcompile.compile(random_model(name, dtype))
    assert count(model) == model.model.config.num_hidden_layers
    with mock.patch.object(pipeline, "PASSES", APART):
        separate = detcompile.compile(random_model(name, dtype))
    assert count(separate) == 0
    tokens = torch.randint(0, 160, (3, 40), generator=torch.Generator().manual_seed(1))
    logits, wanted = model(tokens).logits.float(), separate(tokens).logits.float()
    assert (logits - wanted).norm() < 4 * torch.finfo(dtype).eps * wanted.norm()  # the CPU's exponentials differ
    assert_bitwise_equal(model(tokens[1:2]).logits, model(tokens).logits[1:2], "a row alone")


def test_another_activation_stays_apart(on_every_device: None) -> None:
    assert count(detcompile.compile(random_model("gemma2", torch.float32))) == 0


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_a_gpu_the_bytes_are_those_of_inductors_kernel(dtype: torch.dtype) -> None:
    fused = detcompile.compile(random_model("qwen3", dtype, "cuda"))
    with mock.patch.object(pipeline, "PASSES", APART):
        separate = detcompile.compile(random_model("qwen3", dtype, "cuda"))
    assert count(fused) == 2 and count(separate) == 0
    tokens = torch.randint(0, 160, (3, 40), generator=torch.Generator().manual_seed(1)).cuda()
    assert_bitwise_equal(fused(tokens).logits, separate(tokens).logits)
