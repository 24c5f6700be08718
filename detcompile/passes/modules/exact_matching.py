"""Identify what a module computes: run a copy of it in float64 and compare the result with a formula's.

In float32, one formula in two orders of steps differs as much as two similar formulas. In float64, one formula agrees
with itself to about 1e-15, so any two formulas that differ in float32 are told apart.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TOLERANCE = 1e-9  # relative; a sixtieth of float32's rounding
_CANCELLED = 4e-15  # relative to the terms of a sum, which may cancel


class _Float64(TorchFunctionMode):
    """Make calls that request float32 use float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        widened = {key: _widened(arg) for key, arg in (kwargs or {}).items()}
        return func(*map(_widened, args), **widened)


def _widened(arg: Any) -> Any:
    return torch.float64 if arg is torch.float32 else arg


def float64_copy(module: nn.Module) -> Any:
    """Return a copy with float64 parameters and buffers."""
    return copy.deepcopy(module).double()


@torch.no_grad()
def result_in_float64(function: Callable[..., Any], *given: Any) -> Any:
    """Call a float64 module or a constructor, with float64 in place of float32. Return None if the call fails."""
    try:
        with _Float64():
            return function(*given)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return None


def has_other_forward(module: nn.Module) -> bool:
    """Return whether the forward of a module instance was replaced."""
    return "forward" in vars(module)


def takes_one_argument(module: nn.Module) -> bool:
    """Return whether a module's forward has exactly one argument."""
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def agree(actual: Any, expected: Tensor, size: Tensor | float) -> bool:
    """Return whether float64 results agree to 1e-9 of their values.

    Args:
        size: magnitude of the terms of a sum; where they cancel, their rounding errors in float64 may remain.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error = (actual - expected).abs()
    return bool((error <= _TOLERANCE * expected.abs() + _CANCELLED * size).all())
