"""GradAccumulator: the exact float64 gradient of a parameter; its ``.grad`` is that sum, rounded once.

torch's AccumulateGrad adds the gradients of micro-batches to ``.grad`` in the parameter's dtype and rounds every sum. A
GradAccumulator takes its place: it adds multiples of 2^grid in float64, which is exact, and sets ``.grad``. The forward
uses a *handle* of the parameter (``grad_handle``), a float64 tensor to which the backward passes the gradient.
"""

import threading
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from detcompile.errors import InvalidInput
from detcompile.templates.training.exactness import ExactnessGuard, largest_magnitude, round_to_grid
from detcompile.templates.training.pointwise import rounded_gradient
from detcompile.torch_internals.autograd import backward_id, call_after_backward, tensor_hooks, version_of


class _Arrival(NamedTuple):
    """A gradient that a handle has passed to autograd."""

    values: Tensor  # the gradient, or only its largest magnitude if autograd may change it
    address: int
    version: int

    def measured(self) -> "_Arrival":
        """Return this arrival with the largest magnitude in place of the gradient."""
        return self._replace(values=largest_magnitude(self.values))


class GradAccumulator:
    """The exact gradient of one parameter since its ``.grad`` was last None.

    It follows torch's rules: a ``.grad`` of None starts a new sum, and elements of ``.grad`` that were changed from
    outside (scaled, zeroed, replaced) are kept as the new base. A gradient that does not come from a handle, such as
    the gradient of a penalty with its own backward, is rounded to a multiple of 2^grid and then also added exactly.
    Backwards may run in several threads.

    Args:
        name: the parameter's name in messages.
        guard: bounds the gradient, so that sums that may be inexact are rejected.

    Attributes:
        ranks: number of ranks that add up their gradients in training.sharding; 0 if this object keeps the sum.
    """

    def __init__(self, parameter: nn.Parameter, name: str, guard: ExactnessGuard) -> None:
        self.name, self.guard, self.ranks = name, guard, 0
        self._lock = threading.Lock()
        self._exact: Tensor | None = None
        self._bound: Tensor | None = None  # the guard's bound for that sum
        self._arrivals: dict[int, list[_Arrival]] = {}  # by autograd's id of the backward
        self._node: Any = None
        parameter.grad_dtype = None  # float64 gradients reach a float32 parameter
        self.replace_accumulation(get_gradient_edge(parameter).node)

    def replace_accumulation(self, node: Any) -> None:
        """Replace ``node``, the parameter's AccumulateGrad. Moving the parameter to a device creates a new node.

        The node references the parameter. Its hook must not reference this object, or neither would ever be freed.
        """
        with self._lock:
            if node is self._node:
                return
            self._node, reference = node, weakref.WeakMethod(self._add)

            def add(gradients: tuple[Tensor | None]) -> tuple[None] | None:
                method = reference()
                return None if method is None else method(*gradients)

            self._hook = node.register_prehook(add)

    def leave_to(self, ranks: int) -> None:
        """Let ``ranks`` ranks add gradients from now on, in place of this object."""
        self._hook.remove()
        self.ranks, self._node = ranks, None

    def require(self, parameter: Tensor) -> None:
        """Raise InvalidInput if the parameter was replaced; FSDP replaces parameters and is allowed to."""
        if self.ranks:
            return
        if self._node.variable is not parameter:
            raise InvalidInput(
                f"{self.name} is not the parameter that the trainer was created with, so its gradient is not an exact "
                "sum. Load weights without assign=True, which copies them; pass tensors without requires_grad to "
                "torch.func.functional_call; or create a trainer from the changed model."
            )
        if parameter.dtype is not torch.float32:
            raise InvalidInput(
                f"{self.name} was converted to {parameter.dtype}: trained parameters are float32, and the forward "
                "rounds them to the model's dtype. Create the trainer again, without converting it."
            )

    def announce(self, gradient: Tensor) -> None:
        """Record a gradient that a handle passes to autograd.

        Raises:
            NumericsError: ranks add up the gradient, and their sum may be inexact. On a GPU
                ``Trainer.clip_grad_norm_`` raises this later.
        """
        if self.ranks:
            self._count(gradient)
            return
        backward = backward_id()
        if backward not in self._arrivals:  # dropped at the backward's end: `torch.autograd.grad` adds nothing
            drop = partial(self._arrivals.pop, backward, None)
            call_after_backward(drop)
        arrivals = self._arrivals.setdefault(backward, [])
        arrivals.append(_Arrival(gradient, gradient.data_ptr(), version_of(gradient)))
        # A single gradient without hooks is measured in `_add`, by the pass that rounds it.
        if len(arrivals) > 1 or tensor_hooks(self._node.variable):
            arrivals[:] = [arrival.measured() for arrival in arrivals]

    def _count(self, magnitudes: Tensor) -> None:
        self.guard.add(self.name, magnitudes)
        if magnitudes.device.type == "cpu":
            self.guard.require_one(self.name, max(1, self.ranks))

    def _add(self, gradient: Tensor | None) -> tuple[None] | None:
        """Add the gradient that autograd is about to add to ``.grad``; autograd then adds nothing.

        Raises:
            NumericsError: the sum may be inexact. On a GPU ``Trainer.clip_grad_norm_`` raises this later.
            InvalidInput: the gradient does not come from handles alone.
        """
        parameter, rounded = self._node.variable, None
        if gradient is None or not parameter.requires_grad:
            return None
        with self._lock, torch.no_grad():
            arrivals = self._arrivals.pop(backward_id(), [])
            self.guard.restart(self.name, self._follow(parameter.grad))
            if not arrivals:
                dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
                largest = largest_magnitude(dense)
                self._count(largest)
                if dense.device.type == "cpu":
                    self.guard.warn_if_small(f"the gradient of {self.name}", float(largest))
                gradient = round_to_grid(dense.to(torch.float64, copy=True), self.guard.grid)
            elif self._is_unchanged(gradient, arrivals):
                taken = _take_memory(gradient) if self._exact is None else None
                if taken is None:
                    self._count(gradient)
                else:
                    rounded, magnitudes = rounded_gradient(taken)
                    self._count(magnitudes)
                    self._exact, gradient = taken, None
            else:
                announced = torch.stack([arrival.measured().values for arrival in arrivals]).sum()
                self._count(torch.maximum(announced, largest_magnitude(gradient)))
                self._require_handles_alone(gradient)
            if self._exact is None:
                self._exact = torch.zeros_like(parameter, dtype=torch.float64)
            if gradient is not None:
                self._exact += gradient
            self._bound = self.guard.bound_of(self.name)
            parameter.grad = self._exact.to(parameter.dtype) if rounded is None else rounded
        return (None,)

    def _follow(self, grad: Tensor | None) -> Tensor | None:
        """Update the sum to the current values of ``.grad``; torch does not count changes through ``.data`` or numpy.

        It works in place, because there may be no memory for another float64 gradient. Returns the sum's bound.
        """
        if grad is None:
            self._exact = self._bound = None
            return None
        grad, exact, bound = grad.detach(), self._exact, self._bound
        if exact is None or bound is None:
            exact = self._exact = grad.to(torch.float64, copy=True)
            self._bound = largest_magnitude(grad)
        else:
            changed = grad != exact.to(grad.dtype)
            other = grad.masked_fill(~changed, 0.0)
            exact.masked_fill_(changed, 0.0).add_(other)
            kept = bound.where((~changed & (grad != 0)).any(), 0.0)
            self._bound = torch.maximum(largest_magnitude(other), kept)
        round_to_grid(exact, self.guard.grid)
        return self._bound

    def _is_unchanged(self, gradient: Tensor, arrivals: list[_Arrival]) -> bool:
        """Return True if a gradient comes from one handle and autograd added nothing to it."""
        (first, *others), hooks = arrivals, tensor_hooks(self._node.variable)
        return not others and not hooks and first[1:] == (gradient.data_ptr(), version_of(gradient))

    def _require_handles_alone(self, gradient: Tensor) -> None:
        """Reject a backward's gradient unless it consists of multiples of 2^grid, as handles' gradients do."""
        if gradient.dtype is torch.float64:
            rounded = round_to_grid(gradient.clone(), self.guard.grid)
            if bool(((gradient == rounded) | gradient.isnan()).all()):
                return
        if tensor_hooks(self._node.variable):
            raise InvalidInput(
                f"a hook of {self.name} changes individual gradients, so sums would depend on the micro-batches. "
                "Remove it, and change .grad after the last backward."
            )
        raise InvalidInput(
            f"in one backward {self.name} received gradients from the trainer and from something else (a penalty, a "
            "second loss), which autograd adds inexactly. Call backward() separately for each loss: then the sum is "
            "exact."
        )


_TAKEN: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # sums, by address of their memory


def _take_memory(gradient: Tensor) -> Tensor | None:
    """Return a sum in a gradient's memory; None if other gradients may share it, as of two biases of one sum."""
    memory = gradient.untyped_storage()
    if not gradient.is_contiguous() or gradient.nbytes != memory.nbytes() or memory.data_ptr() in _TAKEN:
        return None
    taken = _TAKEN[memory.data_ptr()] = gradient.detach()
    return taken


class _GradHandle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, accumulator: GradAccumulator) -> Tensor:
        ctx.accumulator = accumulator
        return stand_in(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.accumulator.announce(grad)
        return grad, None


def grad_handle(parameter: nn.Parameter, accumulator: GradAccumulator) -> Tensor:
    """Return a parameter's float64 stand-in, a zero of its shape without memory, whose gradient is the parameter's.

    Raises:
        InvalidInput: it is not the accumulator's parameter.
    """
    accumulator.require(parameter)
    if not torch.is_grad_enabled():
        return stand_in(parameter)
    if accumulator.ranks and parameter.grad_dtype is not torch.float64:
        parameter.grad_dtype = torch.float64  # for a gathered parameter
    handle: Any = _GradHandle.apply(parameter, accumulator)
    if not accumulator.ranks:
        accumulator.replace_accumulation(handle.grad_fn.next_functions[0][0])
    return handle


def stand_in(parameter: Tensor) -> Tensor:
    """Return a float64 zero of a parameter's shape, without memory."""
    return parameter.new_zeros((), dtype=torch.float64).expand(parameter.shape)
