"""Code that looks like an RMSNorm keeps its meaning, whether or not it becomes the template."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from detcompile import Backend, Numerics
from tests.bits import assert_bitwise_equal

WEIGHT = torch.linspace(0.5, 2, 16)


def root(x: Tensor, shift: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.rsqrt(shift(x.pow(2).mean(-1, keepdim=True)))


WRITTEN = {
    "a norm": (lambda x: x * root(x, lambda mean: mean + 0.5) * WEIGHT, True),
    "the shift first": (lambda x: WEIGHT * (root(x, lambda mean: 0.5 + mean) * x), True),
    "a shift that is scaled": (lambda x: x * root(x, lambda mean: torch.add(mean, 0.5, alpha=3.0)) * WEIGHT, False),
    "a shift that is subtracted": (lambda x: x * root(x + 9, lambda mean: mean - 0.5) * WEIGHT, False),
    "a shift of each feature": (lambda x: x * root(x, lambda mean: mean + WEIGHT), False),
    "the root of other values": (lambda x: x * root(x + 1, lambda mean: mean + 0.5) * WEIGHT, False),
    "a mean of cubes": (lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 0.5), False),
    "a mean of the values": (lambda x: x * torch.rsqrt((x * x.abs()).mean(-1, keepdim=True).abs() + 0.5), False),
}


@pytest.mark.parametrize(("function", "whole"), WRITTEN.values(), ids=WRITTEN.keys())
def test_result_equals_torch(function: Callable[[Tensor], Tensor], whole: bool) -> None:
    torch._dynamo.reset()
    x, backend = torch.randn(3, 16), Backend(Numerics(), certify_only=True)
    actual, exact = torch.compile(function, backend=backend, fullgraph=True)(x), function(x.double())
    assert any("rms_norm" in entry.op for entry in backend.certificates[0].entries) == whole
    assert float((actual - exact).abs().max()) < 1e-5 * float(1 + exact.abs().max())


ROUNDED = WEIGHT.bfloat16()


def as_llama(x: Tensor) -> Tensor:
    h = x.float()
    return ROUNDED * (h * root(h, lambda mean: mean + 0.5)).to(x.dtype)


def as_gemma(x: Tensor) -> Tensor:
    h = x.float()
    return (h * root(h, lambda mean: mean + 0.5) * WEIGHT).to(x.dtype)


@pytest.mark.parametrize("written", [as_llama, as_gemma])
def test_rounding_follows_the_model(written: Callable[[Tensor], Tensor]) -> None:
    """Squares are powers of two, whose sum no order changes."""
    torch._dynamo.reset()
    x = torch.tensor([0.5, -1.0, 2.0, -4.0])[torch.randint(4, (200, 16), generator=torch.Generator().manual_seed(3))]
    backend = Backend(Numerics(), certify_only=True)
    actual = torch.compile(written, backend=backend, fullgraph=True)(x.bfloat16())
    assert any("rms_norm" in entry.op for entry in backend.certificates[0].entries)
    assert_bitwise_equal(actual, written(x.bfloat16()))
