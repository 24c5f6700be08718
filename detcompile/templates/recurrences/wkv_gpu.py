"""wkv on the GPU: one program per sequence and block of channels iterates over the tokens.

Legend: T tokens, S sequences, C channels. Numerator, denominator and exponent of a block stay in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.device.primitives import exponential

__all__ = ["wkv_cuda"]

BLOCK = 32  # channels per program: few, because a single sequence has no other parallel work


@triton.jit
def _wkv_kernel(
    k_ptr, v_ptr, decay_ptr, bonus_ptr, state_ptr, out_ptr, slots_ptr, cu_seqlens_ptr, seq_lens_ptr,
    C: tl.constexpr, BLOCK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    first = tl.load(cu_seqlens_ptr + s)
    end = tl.load(cu_seqlens_ptr + s + 1)
    slot = tl.load(slots_ptr + s)
    known = inside & (slot >= 0) & (tl.load(seq_lens_ptr + s) > end - first)
    slot_ptr = state_ptr + slot.to(tl.int64) * (3 * C) + channel
    values = tl.load(slot_ptr, mask=known, other=0.0)
    weights = tl.load(slot_ptr + C, mask=known, other=0.0)
    most = tl.load(slot_ptr + 2 * C, mask=known, other=-1e38)
    fall = tl.load(decay_ptr + channel, mask=inside, other=0.0)
    more = tl.load(bonus_ptr + channel, mask=inside, other=0.0)
    for t in range(first, end):
        place = tl.cast(t, tl.int64) * C + channel
        key = tl.load(k_ptr + place, mask=inside, other=0.0)
        value = tl.load(v_ptr + place, mask=inside, other=0.0)
        raised = key + more
        top = tl.maximum(most, raised)
        before, now = exponential(most - top, ON_GPU), exponential(raised - top, ON_GPU)
        tl.store(out_ptr + place, tl.div_rn(before * values + now * value, before * weights + now), mask=inside)
        fallen = most + fall
        most = tl.maximum(fallen, key)
        before, now = exponential(fallen - most, ON_GPU), exponential(key - most, ON_GPU)
        values = before * values + now * value
        weights = before * weights + now
    written = inside & (slot >= 0) & (end > first)
    tl.store(slot_ptr, values, mask=written)
    tl.store(slot_ptr + C, weights, mask=written)
    tl.store(slot_ptr + 2 * C, most, mask=written)


def wkv_cuda(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Run the op on the GPU: k and v [T, C], decay and bonus [C], float32 -> [T, C]."""
    (T, C), S = v.shape, len(state_slots)
    out = torch.zeros((T, C), dtype=torch.float32, device=v.device)  # padding rows stay zeros
    if out.numel() == 0 or S == 0:
        return out
    given = [value.contiguous() for value in (k, v, decay, bonus)]
    _wkv_kernel[(S, triton.cdiv(C, BLOCK))](
        *given, state, out, state_slots, cu_seqlens, seq_lens,
        C=C, BLOCK=BLOCK, ON_GPU=v.is_cuda, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
