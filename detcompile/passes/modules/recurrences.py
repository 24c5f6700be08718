"""Recurrences: route the scans and convolutions of layers that carry a state to our templates.

transformers defines them as functions of its modeling files. A method that calls one gets a new global scope, in which
that name is our adapter (passes.adapters.scans). The rest of the layer stays Hugging Face's. Layers that compute
their recurrence in place get another forward (MIXERS of contrib's files).

Every call that keeps a state is known by its number within a forward, in the order in which the model runs.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.passes.modules.attention import STEP_KWARG
from detcompile.step import StateShape, StepInputs
from detcompile.templates.ops import ours

Scan = Callable[..., Any]


class Recurrences:
    """The calls in a model's forward that carry a state, and the current step.

    Attributes:
        shapes: state of each call, in call order; empty until the model has run once on a step.
    """

    def __init__(self) -> None:
        self.shapes: list[StateShape] = []
        self._step: StepInputs | None = None
        self._num_states = 0
        self._num_attention = 0

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve each channel with its last inputs: x [B, T, C], weight [C, W], bias [C] -> [B, T, C]."""
        bound = self._next(StateShape((weight.shape[1] - 1, weight.shape[0]), x.dtype is torch.float32))
        if bound is None:
            return ours.dense_causal_conv(x, weight, bias)
        step, state = bound
        order = (state, step.state_slots, step.cu_seqlens, step.seq_lens)
        return ours.causal_conv(x.squeeze(0), weight, bias, *order).unsqueeze(0)

    def delayed(self, x: Tensor, delay: int) -> Tensor:
        """Return x [B, T, C] of ``delay`` tokens before; zeros before the first."""
        if not delay:
            return x
        ones = x.new_ones(x.shape[2])
        return self.convolve(x, torch.stack([ones, *[torch.zeros_like(ones)] * delay], -1), None)

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None = None,
        rates: Tensor | None = None,
    ) -> Tensor:
        """templates.recurrences.linear: q and k [B, T, G, K], v [B, T, H, V], decay and beta alike -> [B, T, H, V].

        Inputs and result are rounded to float32.
        """
        q, k, v, decay = q.float(), k.float(), v.float(), decay.float()
        beta = None if beta is None else beta.float()
        rates = None if rates is None else rates.float()
        bound = self._next(StateShape((v.shape[2], q.shape[3], v.shape[3]), True))
        if bound is None:
            return ours.dense_linear_recurrence(q, k, v, decay, beta, rates)
        step, state = bound
        packed = (None if value is None else value.squeeze(0) for value in (q, k, v, decay, beta))
        order = (rates, state, step.state_slots, step.cu_seqlens, step.seq_lens)
        return ours.linear_recurrence(*packed, *order).unsqueeze(0)

    def average(self, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
        """templates.recurrences.wkv: k and v [B, T, C], decay and bonus [C] -> [B, T, C]; all rounded to float32."""
        k, v, decay, bonus = k.float(), v.float(), decay.float(), bonus.float()
        bound = self._next(StateShape((3, v.shape[2]), True))
        if bound is None:
            return ours.dense_wkv(k, v, decay, bonus)
        step, state = bound
        order = (state, step.state_slots, step.cu_seqlens, step.seq_lens)
        return ours.wkv(k.squeeze(0), v.squeeze(0), decay, bonus, *order).unsqueeze(0)

    def greatest(self, x: Tensor, decay: Tensor) -> Tensor:
        """templates.recurrences.running_max: x and decay [B, T, C] -> [B, T, C]; both are rounded to float32."""
        x, decay = x.float(), decay.float()
        bound = self._next(StateShape((1, x.shape[2]), True))
        if bound is None:
            return ours.dense_running_max(x, decay)
        step, state = bound
        order = (state, step.state_slots, step.cu_seqlens, step.seq_lens)
        return ours.running_max(x.squeeze(0), decay.squeeze(0), *order).unsqueeze(0)

    def attention_place(self, _: nn.Module) -> int:
        """Return the number of this attention call within the forward."""
        place = self._num_attention
        self._num_attention += 1
        return place

    def bind(self, scan: Scan) -> Scan:
        """Return ``scan(self, ...)`` as a function of the other arguments."""

        def bound(*args: Any, **kwargs: Any) -> Any:
            return scan(self, *args, **kwargs)

        return bound

    def follow(self, model: PreTrainedModel) -> None:
        """Read the step from the keyword of each forward of ``model``, and restart the counts there."""

        def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._step = kwargs.get(STEP_KWARG)
            self._num_states = self._num_attention = 0

        def end(*_: Any) -> None:
            self._step = None
            self._num_states = self._num_attention = 0  # restored: a call leaves no state behind

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end)

    def _next(self, shape: StateShape) -> tuple[StepInputs, Tensor] | None:
        """Return the step and the state of this call; None without a step, or if the step only collects shapes."""
        index = self._num_states
        self._num_states += 1
        step = self._step
        if step is None:
            return None
        if not step.states:
            self.shapes[index:] = [shape]
            return None
        return step, step.states[index]


def rebound(method: Callable[..., Any], names: dict[str, Scan]) -> types.FunctionType:
    """Return ``method`` without decorators, in a global scope with these functions as ``names``."""
    plain: Any = inspect.unwrap(method)
    scope = {**plain.__globals__, **names}
    del scope["__name__"]  # torch.compile would look names up in that module
    copied = types.FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__
    return copied
