"""The guard bounds gradients and names the parameter whose sum may be inexact."""

import math

import pytest
import torch

from detcompile.errors import NumericsError
from detcompile.templates.training.exactness import ExactnessGuard, largest_magnitude, limit_of

CPU = torch.device("cpu")


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_bounds_are_sums_of_largest_magnitudes():
    guard = ExactnessGuard(("a", "b", "c"), -44)
    guard.add("b", double(1.0, -3.0))
    guard.add("b", double(-1.0, 2.0))
    guard.add("c", double(0.5)[0])
    assert guard.bounds(CPU).tolist() == [0.0, 5.0, 0.5]
    guard.require(guard.bounds(CPU))
    guard.clear()
    assert guard.bounds(CPU).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_largest_magnitude_is_exact_in_every_dtype(dtype: torch.dtype):
    values = torch.tensor([[0.1, -0.3], [0.2, 0.0]], dtype=dtype)
    largest = largest_magnitude(values)
    assert largest.dtype is torch.float64 and largest.item() == -values[0, 1].item()
    values[1, 1] = math.nan
    assert largest_magnitude(values).isnan()


def test_what_cancels_counts_all_the_same():
    guard = ExactnessGuard(("embed", "norm"), -44)
    guard.add("norm", double(limit_of(-44)))
    guard.require(guard.bounds(CPU))
    guard.add("norm", double(-1.0))
    with pytest.raises(NumericsError, match=r"gradient of norm may reach 129; .* up to 128\. Divide the loss"):
        guard.require(guard.bounds(CPU))


def test_a_template_that_gave_up_is_seen():
    guard = ExactnessGuard(("a", "b", "c"), -40)
    guard.add("a", double(math.inf, 1.0))
    guard.add("c", double(math.inf, 1.0))
    with pytest.raises(NumericsError, match=r"a exceed 2048; .* \(also exceeded by 1 other parameters\)\. Divide"):
        guard.require(guard.bounds(CPU))


def test_nan_is_the_callers():
    guard = ExactnessGuard(("a",), -44)
    guard.add("a", double(math.nan, 1.0))
    guard.require(guard.bounds(CPU))


def test_bounds_of_ranks_add_up():
    guards = [ExactnessGuard(("a",), -44) for _ in range(2)]
    for guard in guards:
        guard.add("a", double(100.0))
        guard.require(guard.bounds(CPU))
    with pytest.raises(NumericsError, match="may reach 200"):
        guards[0].require(sum(guard.bounds(CPU) for guard in guards))
