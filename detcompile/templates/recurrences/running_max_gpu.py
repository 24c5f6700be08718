"""running_max on the GPU: a program for each sequence and block of channels walks the sequence's tokens.

Legend: T tokens, S sequences, C channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["running_max_cuda"]

BLOCK = 32  # channels of a program


@triton.jit
def _max_kernel(
    x_ptr, decay_ptr, state_ptr, out_ptr, slots_ptr, cu_seqlens_ptr, seq_lens_ptr, C: tl.constexpr, BLOCK: tl.constexpr
):
    s = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    first = tl.load(cu_seqlens_ptr + s)
    end = tl.load(cu_seqlens_ptr + s + 1)
    slot = tl.load(slots_ptr + s)
    known = inside & (slot >= 0) & (tl.load(seq_lens_ptr + s) > end - first)
    own_ptr = state_ptr + slot.to(tl.int64) * C + channel
    most = tl.load(own_ptr, mask=known, other=0.0)
    for t in range(first, end):
        place = tl.cast(t, tl.int64) * C + channel
        fallen = most + tl.load(decay_ptr + place, mask=inside, other=0.0)
        most = tl.maximum(fallen, tl.load(x_ptr + place, mask=inside, other=0.0), propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_ptr + place, most, mask=inside)
    tl.store(own_ptr, most, mask=inside & (slot >= 0) & (end > first))


def running_max_cuda(
    x: Tensor, decay: Tensor, state: Tensor, state_slots: Tensor, cu_seqlens: Tensor, seq_lens: Tensor
) -> Tensor:
    """x and decay [T, C] float32 -> [T, C]."""
    (T, C), S = x.shape, len(state_slots)
    out = torch.zeros((T, C), dtype=torch.float32, device=x.device)  # rows of padding stay zeros
    if out.numel() == 0 or S == 0:
        return out
    given = (x.contiguous(), decay.contiguous(), state, out, state_slots, cu_seqlens, seq_lens)
    _max_kernel[(S, triton.cdiv(C, BLOCK))](*given, C=C, BLOCK=BLOCK, num_warps=1, enable_fp_fusion=False)
    return out
