"""Doors: where the exact float64 gradient of a weight enters the world of torch's parameters, and is rounded once.

torch adds the gradients of micro-batches into ``.grad`` in the parameter's own dtype, each sum rounded. A door keeps
their float64 sum, which is exact, beside the parameter, and ``.grad`` is always that sum rounded.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Ledger", "door"]


class Ledger:
    """The exact gradient of one parameter since its ``.grad`` was last None.

    It goes by torch's own rules: a ``.grad`` of None starts a new sum, and one that was changed from outside (scaled,
    zeroed, replaced) is what the next gradient is added to.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        parameter.grad_dtype = None  # float64 while autograd adds, the parameter's own afterwards
        parameter.register_post_accumulate_grad_hook(self._round)
        self._exact: Tensor | None = None
        self._rounded: tuple[Tensor, int] | None = None  # what .grad was set to, and its version then

    def open(self, parameter: nn.Parameter) -> None:
        """Put the float64 sum where autograd will add to it."""
        grad = parameter.grad
        if grad is None or grad.dtype is torch.float64:
            return
        known = self._rounded is not None and grad is self._rounded[0] and grad._version == self._rounded[1]
        parameter.grad = self._exact if known else grad.double()

    def _round(self, parameter: Tensor) -> None:
        self._exact = parameter.grad
        assert self._exact is not None
        rounded = self._exact.to(parameter.dtype)
        parameter.grad = rounded
        self._rounded = rounded, rounded._version


class _Door(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, ledger: Ledger | None) -> Tensor:
        ctx.parameter, ctx.ledger = parameter, ledger
        return parameter.new_zeros((), dtype=torch.float64).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.ledger is not None:
            ctx.ledger.open(ctx.parameter)
        return grad, None


def door(parameter: nn.Parameter, ledger: Ledger | None) -> Tensor:
    """The float64 stand-in of a parameter, a zero of its shape without memory, whose gradient is the parameter's.

    Args:
        ledger: keeps the exact sum; None where something else does (training.sharding).
    """
    port: Tensor = _Door.apply(parameter, ledger)
    return port
