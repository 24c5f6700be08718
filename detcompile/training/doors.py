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
        name: what messages call the parameter.
        guard: bounds the gradient, so that sums which may not be exact are refused.

    Attributes:
        ranks: how many add their gradients up elsewhere (training.sharding); 0 where this keeps the sum.
    """

    def __init__(self, parameter: nn.Parameter, name: str, guard: ExactnessGuard) -> None:
        self.name, self.guard, self.ranks = name, guard, 0
        self._exact: Tensor | None = None
        self._rounded: tuple[Tensor, int] | None = None  # what .grad was set to, and its version then
        parameter.grad_dtype = None  # float64 while autograd adds, the parameter's own afterwards
        self._hook = parameter.register_post_accumulate_grad_hook(self._round)

    def leave_to(self, ranks: int) -> None:
        """Have so many ranks add up their gradients themselves from now on."""
        self._hook.remove()
        self.ranks = ranks

    def open(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put the float64 sum where autograd is about to add a gradient to it.

        Raises:
            NumericsError: the sum may not be exact any more. On a GPU ``Trainer.clip_grad_norm_`` says so, later.
        """
        grad = parameter.grad
        if not self.ranks and grad is not None and grad.dtype is not torch.float64:
            known = self._rounded is not None and grad is self._rounded[0] and grad._version == self._rounded[1]
            parameter.grad = self._exact if known else grad.double()
        self.guard.add(self.name, gradient)
        if gradient.device.type == "cpu":
            self.guard.require_one(self.name, max(1, self.ranks))

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
    if ledger.ranks and parameter.grad_dtype is not torch.float64:
        parameter.grad_dtype = torch.float64  # of a parameter that was gathered
    port: Tensor = _Door.apply(parameter, ledger) if torch.is_grad_enabled() else stand_in(parameter)
    return port


def stand_in(parameter: Tensor) -> Tensor:
    """A float64 zero of a parameter's shape, without memory."""
    return parameter.new_zeros((), dtype=torch.float64).expand(parameter.shape)
