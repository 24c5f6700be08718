"""Shared parts of operations with a recurrent state: state slots, metadata checks and the CPU call.

A state tensor is [num_slots, ...]; sequence s of a packed step reads and writes row ``state_slots[s]``. A sequence
whose first token is in the step starts from zeros and does not read its row; one with NO_SLOT starts from zeros and
writes nothing. The other metadata are those of StepInputs.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.step import NO_SLOT
from detcompile.templates.cpu import library as cpu_library

STATE = "Tensor(a!) state, Tensor state_slots, Tensor cu_seqlens, Tensor seq_lens"  # the last arguments
STEPS = {  # declarations of the last three arguments, `step` in the implementations
    "state_slots": "contiguous int32 S",
    "cu_seqlens": "contiguous int32 S+1",
    "seq_lens": "contiguous int32 S",
}

_FAULTS = {  # enum StateFault of states.h
    1: "cu_seqlens must start at 0 and ascend to at most T; it does not at sequence {where}",
    2: "seq_lens[{where}] is less than the sequence's tokens in this step",
    3: "state_slots[{where}] is neither NO_SLOT nor a slot of the state",
    4: "state_slots[{where}] is a slot that an earlier sequence has too",
}


def run_on_cpu(
    op: str,
    given: Sequence[Tensor | None],
    state: Tensor,
    step: Sequence[Tensor],
    out: Tensor,
    sizes: Sequence[int],
    isa: str | None,
) -> Tensor:
    """Run the C++ kernel of ``op``, which fills ``out`` [T, ...]; it takes the operands, then ``sizes``.

    Raises:
        InvalidInput: metadata points outside the state or the step; nothing is written.
    """
    sizes = (len(out), len(step[0]), len(state), *sizes)
    where = ctypes.c_int64()
    kernel = getattr(cpu_library.library(isa), f"detcompile_{op}")
    arguments = ((ctypes.c_int64 * len(sizes))(*sizes), cpu_library.thread_count(), ctypes.byref(where))
    fault = kernel(*given, state, out, *step, *arguments)
    if fault:
        raise InvalidInput(
            f"detcompile::{op}: {_FAULTS[fault].format(where=where.value)} ({len(state)} slots, T = {len(out)}). Build "
            "the metadata as step.StepInputs describes."
        )
    return out


def dense_steps(B: int, T: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return state_slots, cu_seqlens and seq_lens of B whole sequences of T tokens without a state."""
    slots = torch.full((B,), NO_SLOT, dtype=torch.int32, device=device)
    ends = torch.arange(B + 1, dtype=torch.int32, device=device) * T
    return slots, ends, torch.full((B,), T, dtype=torch.int32, device=device)
