"""The gate of an MLP as one operation: recognized where it is, with the bytes of the separate ones on a GPU."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import detcompile
from detcompile.orders.numerics import Numerics
from detcompile.passes import pipeline
from detcompile.passes.backend import Backend
from detcompile.passes.rewrites import matmuls
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import certified, random_model

APART = tuple(apply for apply in pipeline.PASSES if apply is not matmuls.fuse_gates)


@pytest.fixture
def on_every_device() -> Iterator[None]:
    with mock.patch.object(matmuls, "GATE_DEVICES", ("cpu", "cuda")):
        yield


def count(model: detcompile.CompiledModel, op: str = "gated_matmul") -> int:
    return sum(entry.count for entry in model.certificate.entries if entry.op == f"detcompile.{op}.default")


@pytest.mark.parametrize(
    ("name", "dtype", "op"),
    [
        pytest.param("llama", torch.float32, "gated_matmul", marks=EXHAUSTIVE),
        # One linear makes both halves: nothing is joined.
        pytest.param("phi3", torch.bfloat16, "silu_mul", marks=EXHAUSTIVE),
        ("olmo2", torch.bfloat16, "gated_matmul"),
    ],
)
def test_every_gate_is_found_and_means_the_same(name: str, dtype: torch.dtype, op: str, on_every_device: None) -> None:
    model = certified(random_model(name, dtype, num_hidden_layers=1))
    assert count(model, op) == count(model) + count(model, "silu_mul") == 1
    with mock.patch.object(pipeline, "PASSES", APART):
        separate = certified(random_model(name, dtype, num_hidden_layers=1))
    assert count(separate) == count(separate, "silu_mul") == 0
    tokens = torch.randint(0, 160, (3, 40), generator=torch.Generator().manual_seed(1))
    logits, wanted = model(tokens).logits.float(), separate(tokens).logits.float()
    assert (logits - wanted).norm() < 4 * torch.finfo(dtype).eps * wanted.norm()  # the CPU's exponentials differ
    assert_bitwise_equal(model(tokens[1:2]).logits, model(tokens).logits[1:2], "a row alone")


def test_another_activation_stays_apart(on_every_device: None) -> None:
    model = certified(random_model("gemma2", torch.float32, num_hidden_layers=1))
    assert count(model) == count(model, "silu_mul") == 0


class Halves(torch.nn.Module):
    """A product that is cut in two: ``cut`` says where, ``turned`` which half is the gate."""

    def __init__(self, cut: int, turned: bool, read_twice: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 64, bias=False)
        self.cut, self.turned, self.read_twice = cut, turned, read_twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.linear(x)
        left, right = both[:, : self.cut], both[:, self.cut : 2 * self.cut]
        gate, up = (right, left) if self.turned else (left, right)
        out = torch.nn.functional.silu(gate) * up
        return out + left if self.read_twice else out


@pytest.mark.parametrize(
    ("cut", "turned", "read_twice", "fused"),
    [(32, False, False, True), (32, True, False, False), (16, False, False, False), (32, False, True, False)],
)
def test_only_a_gate_followed_by_up_is_fused(
    cut: int, turned: bool, read_twice: bool, fused: bool, on_every_device: None
) -> None:
    torch.manual_seed(0)
    module = Halves(cut, turned, read_twice)
    backend = Backend(Numerics(), join_weights=True)
    x = torch.randn(5, 24)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        actual = torch.compile(module, backend=backend)(x)
        expected = module(x)
    ops = [entry.op for entry in backend.certificates[-1].entries]
    assert ("detcompile.gated_matmul.default" in ops) is fused
    assert ("detcompile.silu_mul.default" in ops) is not fused
    torch.testing.assert_close(actual, expected)


def test_a_gate_that_lies_in_columns_stays_apart(on_every_device: None) -> None:
    """As mamba's, whose features come before its tokens: what follows views the product with its strides."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        columns = x.transpose(1, 2)
        return (columns * torch.nn.functional.silu(columns)).transpose(1, 2).reshape(-1, x.shape[2]).view(x.shape)

    backend = Backend(Numerics(), certify_only=True)
    x = torch.randn(3, 5, 8)
    torch._dynamo.mark_dynamic(x, (0, 1))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(forward, backend=backend)(x), forward(x))
    assert not any("silu_mul" in entry.op for entry in backend.certificates[-1].entries)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_a_gpu_the_bytes_are_those_of_inductors_kernel(dtype: torch.dtype) -> None:
    """In float32. In 16 bits, rounding hides the approximation almost everywhere."""
    fused = detcompile.compile(random_model("qwen3", dtype, "cuda"))
    with mock.patch.object(pipeline, "PASSES", APART):
        separate = detcompile.compile(random_model("qwen3", dtype, "cuda"))
    assert count(fused) == 2 and count(separate) == count(separate, "silu_mul") == 0
    tokens = torch.randint(0, 160, (3, 40), generator=torch.Generator().manual_seed(1)).cuda()
    actual, expected = fused(tokens).logits, separate(tokens).logits
    if dtype is torch.float32:
        assert_bitwise_equal(actual, expected)
    else:
        assert (actual.float() - expected.float()).norm() < 4 * torch.finfo(dtype).eps * expected.float().norm()
