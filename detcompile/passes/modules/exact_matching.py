"""Identify what a module computes: run a copy of it in float64 and compare with a formula.

Float32 results of equal formulas differ by their order of steps, as much as those of similar formulas. In float64 they
agree to about 1e-15, so that formulas which float32 could tell apart are told apart here.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TOLERANCE = 1e-9  # relative; a sixtieth of float32's rounding
_CANCELLED = 4e-15  # of the size of what a formula subtracts


class _Float64(TorchFunctionMode):
    """Calls that ask for float32 give float64."""

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
    """Return what a float64 module or a constructor computes in float64; None if it takes other arguments."""
    try:
        with _Float64():
            return function(*given)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return None


def has_other_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is not its class's."""
    return "forward" in vars(module)


def takes_one_argument(module: nn.Module) -> bool:
    """Return whether a module's forward takes a tensor and nothing else."""
    kinds = {parameter.kind for parameter in inspect.signature(module.forward).parameters.values()}
    return kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD} and len(inspect.signature(module.forward).parameters) == 1


def agree(actual: Any, expected: Tensor, size: Tensor | float) -> bool:
    """Return whether float64 results agree to 1e-9 of their values.

    Args:
        size: of the terms of a sum, whose float64 rounding may remain where they cancel.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error = (actual - expected).abs()
    return bool((error <= _TOLERANCE * expected.abs() + _CANCELLED * size).all())
