"""wkv: each channel's average of past values, with weights exp(key) that decay token by token.

Legend: T tokens, S sequences, C channels, B batch.

    out[t] = (sum over i < t of e^(k[i] + (t - 1 - i) decay) v[i]  +  e^(k[t] + bonus) v[t]) / the same sum without v

The WKV operator of RWKV-4 (Peng et al., arXiv:2305.13048). Everything is float32. Numerator and denominator are stored
divided by e^m, where m is the maximum exponent so far, so that no key overflows:

    top = max(m, k + bonus)    out = (e^(m - top) num + e^(k + bonus - top) v) / (e^(m - top) den + e^(k + bonus - top))
    top = max(m + decay, k)    num, den <- e^(m + decay - top) (num, den) + e^(k - top) (v, 1)    m <- top

A sequence's tokens are processed one after the other and each operation is rounded, so the result does not depend on
chunks of a prompt or on the batch. The state between steps is [num_slots, 3, C] float32 (templates.recurrences.states):
num, den, m. On a GPU one program per sequence and block of channels iterates over the tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.device.primitives import exponential
from detcompile.templates.recurrences.states import STATE, STEPS, dense_steps, run_on_cpu
from detcompile.templates.registration import define

_OPERANDS = "Tensor k, Tensor v, Tensor decay, Tensor bonus"
BLOCK = 32  # channels per program: few, because a single sequence has no other parallel work


def wkv_cpu(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor, *step: Tensor, isa: str | None = None
) -> Tensor:
    """Run the op on the CPU: k and v [T, C], decay and bonus [C], float32 -> [T, C]; padding rows get zeros.

    Raises:
        InvalidInput: metadata points outside the state; nothing is written.
    """
    T, C = v.shape
    given = [value.contiguous() for value in (k, v, decay, bonus)]
    out = torch.empty((T, C), dtype=torch.float32, device="cpu")
    return run_on_cpu("wkv", given, state, step, out, [C], isa)


def _dense_wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Run k and v [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = v.shape
    state = v.new_empty((1, 3, C), dtype=torch.float32)
    steps = dense_steps(B, T, v.device)
    return torch.ops.detcompile.wkv(k.flatten(0, 1), v.flatten(0, 1), decay, bonus, state, *steps).view(B, T, C)


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


def wkv_cuda(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor, *step: Tensor) -> Tensor:
    """Run the op on the GPU: k and v [T, C], decay and bonus [C], float32 -> [T, C]."""
    (T, C), S = v.shape, len(step[0])
    out = torch.zeros((T, C), dtype=torch.float32, device=v.device)  # padding rows stay zeros
    if out.numel() == 0 or S == 0:
        return out
    given = [value.contiguous() for value in (k, v, decay, bonus)]
    _wkv_kernel[(S, triton.cdiv(C, BLOCK))](
        *given, state, out, *step,
        C=C, BLOCK=BLOCK, ON_GPU=v.is_cuda, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


_ROWS = {"k": "float32 T C", "v": "float32 T C", "decay": "float32 C", "bonus": "float32 C"}
define(
    f"wkv({_OPERANDS}, {STATE}) -> Tensor",
    _ROWS | {"state": "contiguous float32 Slots 3 C"} | STEPS,
    cpu=wkv_cpu,
    cuda=wkv_cuda,
    fake=lambda k, v, *rest: v.new_empty(v.shape),
)
define(
    f"dense_wkv({_OPERANDS}) -> Tensor",
    _ROWS | {"k": "float32 B T C", "v": "float32 B T C"},
    cpu=_dense_wkv,
    cuda=_dense_wkv,
    fake=lambda k, v, decay, bonus: v.new_empty(v.shape),
)


def reference_wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Return the dense op's value in float64, by the first formula above: [B, T, C]."""
    k, v, decay, bonus = (value.double() for value in (k, v, decay, bonus))
    outs = []
    for t in range(v.shape[1]):
        ages = torch.arange(t - 1, -1, -1, dtype=torch.float64, device=v.device)[:, None]
        exponents = torch.cat([k[:, :t] + ages * decay, k[:, t : t + 1] + bonus], 1)
        outs.append((torch.softmax(exponents, 1) * v[:, : t + 1]).sum(1))
    return torch.stack(outs, 1)
