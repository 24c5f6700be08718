"""causal_conv on the GPU: one program per token and block of channels, then one that shifts each sequence's state.

Legend: T tokens, S sequences, C channels, W taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["causal_conv_cuda"]

BLOCK = 256  # channels per program


@triton.jit
def _input(x_ptr, x_stride, slot_ptr, first, place, channel, inside, continues, C: tl.constexpr, W: tl.constexpr):
    """The input ``place`` tokens after the sequence's first token of the step; before it if negative."""
    now = tl.load(x_ptr + (first + place).to(tl.int64) * x_stride + channel, mask=inside & (place >= 0), other=0.0)
    known = inside & (place < 0) & continues
    before = tl.load(slot_ptr + (W - 1 + place) * C + channel, mask=known, other=0.0)
    return tl.where(place >= 0, now, before)


@triton.jit(do_not_specialize=["S", "x_stride"])
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, slots_ptr, cu_seqlens_ptr, seq_lens_ptr, S, x_stride,
    C: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    low, high = 0, S  # search the last sequence that starts at t or before, skipping empty ones
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) <= t:
            low = middle
        else:
            high = middle
    first = tl.load(cu_seqlens_ptr + low)
    end = tl.load(cu_seqlens_ptr + low + 1)
    slot = tl.load(slots_ptr + low)
    continues = (slot >= 0) & (tl.load(seq_lens_ptr + low) > end - first)
    slot_ptr = state_ptr + slot.to(tl.int64) * ((W - 1) * C)
    total = tl.zeros([BLOCK], tl.float32)
    for w in tl.static_range(W):
        place, live = t - first + (w + 1 - W), inside & (t < end)
        x = _input(x_ptr, x_stride, slot_ptr, first, place, channel, live, continues, C, W)
        tap = tl.load(weight_ptr + channel * W + w, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(x.to(tl.float32), tap, total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(t < end, total, 0.0)  # rows past the last sequence are padding
    tl.store(out_ptr + t.to(tl.int64) * C + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_stride"])
def _shift_kernel(
    x_ptr, state_ptr, slots_ptr, cu_seqlens_ptr, seq_lens_ptr, x_stride,
    C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(cu_seqlens_ptr + s)
    count = tl.load(cu_seqlens_ptr + s + 1) - first
    slot = tl.load(slots_ptr + s)
    continues = (slot >= 0) & (tl.load(seq_lens_ptr + s) > count)
    inside = (channel < C) & (slot >= 0) & (count > 0)
    slot_ptr = state_ptr + slot.to(tl.int64) * ((W - 1) * C)
    for i in tl.static_range(W - 1):  # ascending: reads stay ahead of writes
        column = _input(x_ptr, x_stride, slot_ptr, first, count + (i + 1 - W), channel, inside, continues, C, W)
        tl.store(slot_ptr + i * C + channel, column, mask=inside)


def causal_conv_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Run x [T, C] of unit last stride, weight [C, W] -> [T, C]; the state is shifted by the step's tokens."""
    (T, C), W, S = x.shape, weight.shape[1], len(state_slots)
    out = torch.empty((T, C), dtype=x.dtype, device=x.device)
    if T == 0 or C == 0 or S == 0:
        return out.zero_()
    blocks = triton.cdiv(C, BLOCK)
    given = (state, state_slots, cu_seqlens, seq_lens)
    _conv_kernel[(T, blocks)](
        x, weight.contiguous(), bias, state, out, *given[1:], S, x.stride(0),
        C=C, W=W, HAS_BIAS=bias is not None, BLOCK=BLOCK, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    if W > 1:
        _shift_kernel[(S, blocks)](x, *given, x.stride(0), C=C, W=W, BLOCK=BLOCK, num_warps=2)
    return out
