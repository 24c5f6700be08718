"""Doors: where the exact float64 gradient of a weight enters the world of torch's parameters, and is rounded once.

torch adds the gradients of micro-batches into ``.grad`` in the parameter's own dtype, each sum rounded. A ledger keeps
their float64 sum, which is exact, beside the parameter, and ``.grad`` is always that sum rounded.
"""

from typing import Any

import torch
from torch import Tensor, nn

from detcompile.templates.training.exactness import ExactnessGuard

__all__ = ["Ledger", "door"]


class Ledger:
    """The exact gradient of one parameter since its ``.grad`` was last None.

    It goes by torch's own rules: a ``.grad`` of None starts a new sum, and one that was changed from outside (scaled,
    zeroed, replaced) is what the next gradient is added to.

    Args:
        parameter: the parameter; None where something else keeps the sum (training.sharding).
        name: what messages call the parameter.
        guard: bounds the gradient, so that sums which may not be exact are refused.
    """

    def __init__(self, parameter: nn.Parameter | None, name: str, guard: ExactnessGuard) -> None:
        self.name, self.guard = name, guard
        self._exact: Tensor | None = None
        self._rounded: tuple[Tensor, int] | None = None  # what .grad was set to, and its version then
        self._hook: Any = None
        if parameter is not None:
            parameter.grad_dtype = None  # float64 while autograd adds, the parameter's own afterwards
            self._hook = parameter.register_post_accumulate_grad_hook(self._round)

    def release(self, parameter: nn.Parameter) -> None:
        """Leave the sum to something else from now on."""
        self._hook.remove()
        self._hook = None
        parameter.grad_dtype = parameter.dtype

    def open(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put the float64 sum where autograd is about to add a gradient to it.

        Raises:
            NumericsError: the sum may not be exact any more. On a GPU ``Trainer.clip_grad_norm_`` says so, later.
        """
        if self._hook is not None:
            grad = parameter.grad
            if grad is None:
                self.guard.forget(self.name)
            elif grad.dtype is not torch.float64:
                known = self._rounded is not None and grad is self._rounded[0] and grad._version == self._rounded[1]
                parameter.grad = self._exact if known else grad.double()
        self.guard.add(self.name, gradient)
        if gradient.device.type == "cpu":
            self.guard.require_one(self.name)

    def _round(self, parameter: Tensor) -> None:
        self._exact = parameter.grad
        assert self._exact is not None
        rounded = self._exact.to(parameter.dtype)
        parameter.grad = rounded
        self._rounded = rounded, rounded._version


class _Door(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, ledger: Ledger) -> Tensor:
        ctx.parameter, ctx.ledger = parameter, ledger
        return stand_in(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ledger.open(ctx.parameter, grad)
        return grad, None


def door(parameter: nn.Parameter, ledger: Ledger) -> Tensor:
    """The float64 stand-in of a parameter, a zero of its shape without memory, whose gradient is the parameter's."""
    port: Tensor = _Door.apply(parameter, ledger) if torch.is_grad_enabled() else stand_in(parameter)
    return port


def stand_in(parameter: Tensor) -> Tensor:
    """A float64 zero of a parameter's shape, without memory."""
    return parameter.new_zeros((), dtype=torch.float64).expand(parameter.shape)
