"""What operations that carry a state from token to token share: which state a sequence has, and how that is checked.

A state tensor is [num_slots, ...]; sequence s of a packed step reads and writes row ``state_slots[s]`` of it. A
sequence whose first token is in the step starts from zeros and does not read; one with NO_SLOT starts from zeros and
writes nothing. The other metadata are StepInputs'.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.step import NO_SLOT
from detcompile.templates.cpu import library as cpu_library

__all__ = ["check_state_steps", "dense_steps", "run_on_cpu"]

_FAULTS = {  # enum StateFault of states.h
    1: "cu_seqlens must start at 0 and ascend to at most T; it does not at sequence {where}",
    2: "seq_lens[{where}] is less than the sequence's tokens in this step",
    3: "state_slots[{where}] is neither NO_SLOT nor a slot of the state",
}


def check_state_steps(op: str, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *steps: Tensor) -> None:
    """Raise InvalidInput unless ``state`` is [num_slots, *shape] and state_slots, cu_seqlens and seq_lens fit."""
    if tuple(state.shape[1:]) != shape or state.dtype != dtype or not state.is_contiguous():
        raise InvalidInput(
            f"detcompile::{op}: state {tuple(state.shape)} {state.dtype} must be contiguous {dtype} [num_slots, "
            f"{', '.join(map(str, shape))}]. Allocate it for this layer."
        )
    S = steps[0].shape[0] if steps[0].dim() else 0
    for name, tensor, extent in zip(("state_slots", "cu_seqlens", "seq_lens"), steps, (S, S + 1, S), strict=True):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != (extent,) or not tensor.is_contiguous():
            raise InvalidInput(
                f"detcompile::{op}: {name} must be contiguous int32 ({extent},), not {tensor.dtype} "
                f"{tuple(tensor.shape)}. Build the step's metadata as step.StepInputs describes it."
            )


def run_on_cpu(
    op: str,
    given: Sequence[Tensor | None],
    state: Tensor,
    steps: Sequence[Tensor],
    out: Tensor,
    sizes: Sequence[int],
    isa: str | None,
) -> Tensor:
    """``out`` [T, ...], filled by the C++ kernel of ``op``, which takes every operand by its address, then ``sizes``.

    Raises:
        InvalidInput: the metadata point outside the state or the step; nothing is written.
    """
    operands = [None if value is None else value.data_ptr() for value in (*given, state, out, *steps)]
    sizes = (len(out), len(steps[0]), len(state), *sizes)
    where = ctypes.c_int64()
    kernel = getattr(cpu_library.library(isa), f"detcompile_{op}")
    fault = kernel(*operands, (ctypes.c_int64 * len(sizes))(*sizes), cpu_library.thread_count(), ctypes.byref(where))
    if fault:
        raise InvalidInput(
            f"detcompile::{op}: {_FAULTS[fault].format(where=where.value)} ({len(state)} slots, T = {len(out)}). Build "
            "the step's metadata as step.StepInputs describes it."
        )
    return out


def dense_steps(B: int, T: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """state_slots, cu_seqlens and seq_lens of B whole sequences of T tokens that keep no state."""
    slots = torch.full((B,), NO_SLOT, dtype=torch.int32, device=device)
    ends = torch.arange(B + 1, dtype=torch.int32, device=device) * T
    return slots, ends, torch.full((B,), T, dtype=torch.int32, device=device)
