"""causal_conv: a weighted sum of each channel's last W inputs; the state holds the W - 1 inputs before a step.

Legend: T tokens, S sequences, C channels, W taps, B batch.

    out[t, c] = round(sum over w of x[t - W + 1 + w, c] * weight[c, w] + bias[c])

Sequential over the taps, float32 inside, the bias last, one rounding to x.dtype. Inputs before a sequence's first token
are zeros; inputs of earlier steps are in its state, [num_slots, W - 1, C] in x.dtype, oldest first
(templates.recurrences.states). On a GPU one launch has a program per token and block of channels; a second one shifts
each sequence's state.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.recurrences.states import STATE, STEPS, dense_steps, run_on_cpu
from detcompile.templates.registration import define

BLOCK = 256  # channels per program


def causal_conv_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *step: Tensor, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU: x [T, C], weight [C, W], bias [C] -> [T, C]; rows past cu_seqlens[S] get zeros.

    Raises:
        InvalidInput: metadata points outside the state; nothing is written.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (T, C), W = x.shape, weight.shape[1]
    taps = weight.detach().t().float().contiguous()
    offset = None if bias is None else bias.detach().float().contiguous()
    sizes = [C, W, x.stride(0), cpu_library.dtype_code(x)]
    out = torch.empty((T, C), dtype=x.dtype, device="cpu")
    return run_on_cpu("causal_conv", [x, taps, offset], state, step, out, sizes, isa)


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


def causal_conv_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *step: Tensor) -> Tensor:
    """Run x [T, C], weight [C, W] -> [T, C]; the state is shifted by the step's tokens."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (T, C), W, S = x.shape, weight.shape[1], len(step[0])
    out = torch.empty((T, C), dtype=x.dtype, device=x.device)
    if T == 0 or C == 0 or S == 0:
        return out.zero_()
    blocks = triton.cdiv(C, BLOCK)
    _conv_kernel[(T, blocks)](
        x, weight.contiguous(), bias, state, out, *step, S, x.stride(0),
        C=C, W=W, HAS_BIAS=bias is not None, BLOCK=BLOCK, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    if W > 1:
        _shift_kernel[(S, blocks)](x, state, *step, x.stride(0), C=C, W=W, BLOCK=BLOCK, num_warps=2)
    return out


def _dense_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run x [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = x.shape
    state = x.new_empty((1, weight.shape[1] - 1, C))
    steps = dense_steps(B, T, x.device)
    return torch.ops.detcompile.causal_conv(x.reshape(B * T, C), weight, bias, state, *steps).view(B, T, C)


define(
    f"causal_conv(Tensor x, Tensor weight, Tensor? bias, {STATE}) -> Tensor",
    {"x": "float T C", "weight": "float C W>0", "bias": "float C", "state": "contiguous x Slots W-1 C"} | STEPS,
    cpu=causal_conv_cpu,
    cuda=causal_conv_cuda,
    fake=lambda x, *rest: x.new_empty(x.shape),
)
define(
    "dense_causal_conv(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    {"x": "float B T C", "weight": "float C W>0", "bias": "float C"},
    cpu=_dense_causal_conv,
    cuda=_dense_causal_conv,
    fake=lambda x, weight, bias: x.new_empty(x.shape),
)


def reference_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the dense op's value in float64, unrounded: [B, T, C]."""
    W = weight.shape[1]
    padded = torch.nn.functional.pad(x.double(), (0, 0, W - 1, 0))
    taps = (padded[:, w : w + x.shape[1]] * weight[:, w].double() for w in range(W))
    total = torch.stack(list(taps)).sum(0)
    return total if bias is None else total + bias.double()
