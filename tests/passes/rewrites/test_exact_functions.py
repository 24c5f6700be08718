"""Rewrites of exact arithmetic keep the values of operations that round once, or not at all."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from detcompile.passes.rewrites.exact_functions import pin_exact_functions

SIZES = torch.logspace(-44, 38, 300, base=10).float()
X = torch.cat([SIZES, -SIZES, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0])])


def divided_by(y: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x / y


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"x / 2^{k}": divided_by(2.0**k) for k in (-149, -127, -126, -3, 0, 5, 124, 125, 127)},
    "x / 3": divided_by(3.0),
    "1 / x": torch.reciprocal,
    "clamp": lambda x: torch.clamp(x, -2.0, 3.0),
    "clamp with crossed bounds": lambda x: torch.clamp(x, 3.0, -2.0),
    "clamp from below": lambda x: torch.clamp_min(x, 0.5),
    "clamp from above": lambda x: torch.clamp_max(x, 0.5),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "relu": torch.relu,
    "square": lambda x: x**2,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_their_values(name: str) -> None:
    gm = pin_exact_functions(make_fx(OPERATIONS[name], tracing_mode="fake")(X), "exact16")
    gm.recompile()
    actual, expected = gm(X), OPERATIONS[name](X)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
