"""The gradient norm is one value for all ranks and orders, and torch's up to rounding."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from detcompile import clip_grad_norm_
from detcompile.errors import InvalidInput
from detcompile.templates.training.exactness import ExactnessGuard
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.parallel.ranks import run_ranks

SHAPES = [(7, 33), (5,), (), (12, 4, 9), (0, 3), (2, 1000)]


def parameters(scale: float = 1.0) -> list[nn.Parameter]:
    actual = []
    for seed, shape in enumerate(SHAPES):
        parameter = nn.Parameter(torch.zeros(shape))
        generator = torch.Generator().manual_seed(seed)
        sizes = 10.0 ** torch.randint(-8, 3, shape, generator=generator)
        parameter.grad = torch.randn(shape, generator=generator) * sizes * scale
        actual.append(parameter)
    return actual


@pytest.mark.parametrize("scale", [1.0, 2.0**-30])
def test_the_norm_is_exact_over_rows(scale: float):
    square = Fraction(0)
    for parameter in parameters(scale):
        rows = parameter.grad.reshape(len(parameter) if parameter.dim() else 1, -1) if parameter.numel() else ()
        for row in rows:
            total = Fraction(float(torch.ops.detcompile.row_sum((row * row)[None], torch.float32)))
            square += math.floor(total * 2**96) * Fraction(1, 2**96)
    norm = clip_grad_norm_(parameters(scale), 1.0)
    assert norm.dtype == torch.float64 and float(norm) == math.sqrt(square)


def test_clipping_scales_only_gradients_above_the_norm():
    given, ours, theirs = parameters(), parameters(), parameters()
    norm = clip_grad_norm_(ours, 2.0)
    assert abs(float(norm) - float(torch.nn.utils.clip_grad_norm_(theirs, 2.0))) < 1e-5 * float(norm)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)
    clip_grad_norm_(left := parameters(), 1e9)
    for a, b in zip(left, given):
        assert_bitwise_equal(a.grad, b.grad)


def test_norm_ignores_order_of_parameters_and_rows():
    expected = clip_grad_norm_(parameters(), 1.0)
    assert_bitwise_equal(clip_grad_norm_(parameters()[::-1], 1.0), expected)
    flipped = parameters()
    for parameter in flipped:
        parameter.grad = parameter.grad.flip(0) if parameter.dim() else parameter.grad
    assert_bitwise_equal(clip_grad_norm_(flipped, 1.0), expected)
    whole = nn.Parameter(torch.zeros(64, 8))
    whole.grad = torch.randn(64, 8)
    cut = [nn.Parameter(torch.zeros(part.shape)) for part in whole.grad.split([1, 40, 23])]
    for parameter, part in zip(cut, whole.grad.split([1, 40, 23])):
        parameter.grad = part.clone()
    assert_bitwise_equal(clip_grad_norm_(cut, 1e-3), clip_grad_norm_(whole, 1e-3))
    assert_bitwise_equal(torch.cat([parameter.grad for parameter in cut]), whole.grad)


def test_repeated_parameters_and_shared_gradients_are_scaled_once():
    once, (twice, other) = parameters()[:1], (parameters()[0] for _ in range(2))
    norm = clip_grad_norm_(once, 1.0)
    assert_bitwise_equal(clip_grad_norm_([twice, twice], 1.0), norm)
    assert_bitwise_equal(twice.grad, once[0].grad)
    twice.grad = parameters()[0].grad
    other.grad = twice.grad.view_as(twice)  # another tensor over the same memory
    clip_grad_norm_([twice, other], 1.0)
    assert float(torch.cat([twice.grad, other.grad]).norm()) == pytest.approx(1.0)


def test_many_rows_do_not_overflow():
    parameter = nn.Parameter(torch.zeros(1 << 15, 1))
    parameter.grad = torch.full((1 << 15, 1), 2.0**15 - 2.0**-8)
    exact = (1 << 15) * Fraction(float(parameter.grad[0].square()))
    assert float(clip_grad_norm_(parameter, 1.0)) == math.sqrt(exact)


@pytest.mark.parametrize(("value", "expected"), [(math.inf, math.inf), (math.nan, math.nan), (1e30, math.inf)])
def test_non_finite_gradients_give_non_finite_norm(value, expected):
    given = parameters()
    given[0].grad[3, 5] = value
    norm = float(clip_grad_norm_(given, 1.0))
    assert norm == expected or (math.isnan(norm) and math.isnan(expected))


def test_guard_bounds_of_untrained_parameters_are_zero():
    guard = ExactnessGuard((), -44)
    guard.require(guard.bounds(torch.device("cpu")))
    guard = ExactnessGuard(("one", "two"), -44)
    guard.add("two", torch.full((3,), 7.0, dtype=torch.float64))
    assert guard.bounds(torch.device("cpu")).tolist() == [0.0, 7.0]


def test_bad_arguments_are_refused():
    parameter = nn.Parameter(torch.zeros(3))
    assert float(clip_grad_norm_(parameter, 1.0)) == 0.0
    with pytest.raises(InvalidInput, match=r"max_norm=0\.0 must be positive"):
        clip_grad_norm_(parameter, 0.0)
    for given in (None, "1", torch.nan, torch.ones(2)):
        with pytest.raises(InvalidInput, match=r"max_norm .*: give a number"):
            clip_grad_norm_(parameter, given)
    for given in (nn.Linear(2, 2), nn.Linear(2, 2).named_parameters(), [{"params": []}]):
        with pytest.raises(InvalidInput, match=r"give tensors, such as module.parameters\(\)"):
            clip_grad_norm_(given, 1.0)
    for gradient in (torch.ones(1).expand(3), torch.ones(3).to_sparse(), torch._neg_view(torch.ones(3))):
        parameter.grad = gradient
        with pytest.raises(InvalidInput, match=r"a gradient is sparse, expanded or a negated view"):
            clip_grad_norm_(parameter, 1.0)
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    half.grad = torch.zeros_like(half)
    with pytest.raises(InvalidInput, match=r"a gradient is torch.bfloat16, not float32"):
        clip_grad_norm_(half, 1.0)


def sharded_norm(_rank: int, world: int) -> list[Tensor]:
    """Return the norm of sharded gradients, and the clipped gradients whole."""
    mesh = init_device_mesh("cpu", (world,))
    sharded = []
    for parameter in parameters():
        if parameter.dim() and parameter.numel():
            gradient = distribute_tensor(parameter.grad, mesh, [Shard(0)])
            parameter = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            parameter.grad = gradient
        sharded.append(parameter)
    norm = clip_grad_norm_(sharded, 1.0)
    return [norm, *(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in sharded)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=EXHAUSTIVE)])
def test_norm_is_equal_for_any_number_of_ranks(world):
    given = parameters()
    expected = clip_grad_norm_(given, 1.0)
    for norm, *gradients in run_ranks(world, sharded_norm, world):
        assert_bitwise_equal(norm, expected)
        for actual, parameter in zip(gradients, given, strict=True):
            assert_bitwise_equal(actual, parameter.grad)
