"""Doors: where the exact float64 gradient of a weight enters the world of torch's parameters, and is rounded once.

torch adds the gradients of micro-batches into ``.grad`` in the parameter's own dtype, each sum rounded. A ledger keeps
their float64 sum, which is exact, beside the parameter, and ``.grad`` is always that sum rounded.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from detcompile.errors import InvalidInput
from detcompile.templates.training.exactness import ExactnessGuard

__all__ = ["Ledger", "door"]


class Ledger:
    """The exact gradient of one parameter since its ``.grad`` was last None.

    It goes by torch's own rules: a ``.grad`` of None starts a new sum, and elements that were changed from outside
    (scaled, zeroed, replaced, by whatever means) are what the next gradient is added to.

    Args:
        name: what messages call the parameter.
        guard: bounds the gradient, so that sums which may not be exact are refused.

    Attributes:
        ranks: how many add their gradients up elsewhere (training.sharding); 0 where this keeps the sum.
    """

    def __init__(self, parameter: nn.Parameter, name: str, guard: ExactnessGuard) -> None:
        self.name, self.guard, self.ranks = name, guard, 0
        self._parameter = weakref.ref(parameter)
        self._exact: Tensor | None = None
        self._bound: Tensor | None = None  # the guard's, of that sum
        self._backward = -1  # autograd's number of the backward that opened it last
        parameter.grad_dtype = None  # float64 while autograd adds, the parameter's own afterwards
        self._hook = parameter.register_post_accumulate_grad_hook(self._round)

    def leave_to(self, ranks: int) -> None:
        """Have so many ranks add up their gradients themselves from now on."""
        self._hook.remove()
        self.ranks = ranks

    def require(self, parameter: nn.Parameter) -> None:
        """Refuse another parameter in the place of the one that this was made for; FSDP makes others, and may."""
        if not self.ranks and self._parameter() is not parameter:
            raise InvalidInput(
                f"{self.name} is another parameter than the trainer was made with, whose gradient is no exact sum. "
                "Load weights without assign=True, which copies them, or make the trainer of the changed model."
            )

    def open(self, parameter: nn.Parameter, gradient: Tensor, accumulation: Any) -> None:
        """Count a gradient that autograd is about to add, and have it added to the float64 sum.

        Args:
            accumulation: autograd's node that adds to ``.grad``. It does not run in ``torch.autograd.grad``, which
                leaves ``.grad`` as it is.

        Raises:
            NumericsError: the sum may not be exact any more. On a GPU ``Trainer.clip_grad_norm_`` says so, later.
        """
        if not self.ranks:
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:  # the first of its doors: others of this backward add to the same bound
                self._backward = backward
                self.guard.restart(self.name, self._follow(parameter.grad))
            held: list[Any] = []
            held.append(accumulation.register_prehook(lambda _: self._put_exact(parameter, held.pop())))
        self.guard.add(self.name, gradient)
        if gradient.device.type == "cpu":
            self.guard.require_one(self.name, max(1, self.ranks))

    def _follow(self, grad: Tensor | None) -> Tensor | None:
        """Have the sum be of ``.grad`` as it is now, by its values: torch counts no changes by ``.data`` or numpy.

        In place, as the memory of another float64 gradient may not be there. Returns the sum's bound.
        """
        if grad is None:
            return None
        grad, exact, bound = grad.detach(), self._exact, self._bound
        if exact is None or bound is None:
            self._exact, self._bound = grad.double(), torch.linalg.vector_norm(grad, float("inf")).double()
        else:
            changed = grad != exact.to(grad.dtype)
            other = grad.masked_fill(~changed, 0.0)
            exact.masked_fill_(changed, 0.0).add_(other)
            kept = bound.where((~changed & (grad != 0)).any(), 0.0)
            self._bound = torch.maximum(torch.linalg.vector_norm(other, float("inf")).double(), kept)
        return self._bound

    def _put_exact(self, parameter: nn.Parameter, registered: Any) -> None:
        """Put the float64 sum where autograd adds, once however many doors asked for it."""
        registered.remove()
        if parameter.grad is not None and parameter.grad.dtype is not torch.float64:
            parameter.grad = self._exact

    def _round(self, parameter: Tensor) -> None:
        self._exact = parameter.grad
        assert self._exact is not None
        parameter.grad, self._bound = self._exact.to(parameter.dtype), self.guard.bound_of(self.name)


class _Door(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, ledger: Ledger) -> Tensor:
        ctx.parameter, ctx.ledger = parameter, ledger
        return stand_in(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ledger.open(ctx.parameter, grad, ctx.next_functions[0][0])
        return grad, None


def door(parameter: nn.Parameter, ledger: Ledger) -> Tensor:
    """The float64 stand-in of a parameter, a zero of its shape without memory, whose gradient is the parameter's.

    Raises:
        InvalidInput: it is not the ledger's parameter.
    """
    ledger.require(parameter)
    if ledger.ranks and parameter.grad_dtype is not torch.float64:
        parameter.grad_dtype = torch.float64  # of a parameter that was gathered
    port: Tensor = _Door.apply(parameter, ledger) if torch.is_grad_enabled() else stand_in(parameter)
    return port


def stand_in(parameter: Tensor) -> Tensor:
    """A float64 zero of a parameter's shape, without memory."""
    return parameter.new_zeros((), dtype=torch.float64).expand(parameter.shape)
