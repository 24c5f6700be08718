"""linear_recurrence on the GPU: one program per sequence, head and block of values iterates over the tokens.

Legend: T tokens, S sequences, H heads, G groups, K keys, V values. A program keeps its part of the state, [KEYS, WIDTH]
with K zero-padded to a power of two, in registers. Both sums over the keys are explicit, in Row order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.device.primitives import exponential

MOST_ELEMENTS = 8192  # of a state, per program
GROUP = 32  # lanes that a Row combines first


@triton.jit
def _halve(x_GKV):
    """[G, K, V] -> [G, K / 2, V]: the upper half of the second dim is added to the lower half."""
    G: tl.constexpr = x_GKV.shape[0]
    half: tl.constexpr = x_GKV.shape[1] // 2
    return tl.sum(tl.reshape(x_GKV, [G, 2, half, x_GKV.shape[2]]), 1)  # two terms: the order does not matter


@triton.jit
def _halve_down(x_GKV):
    """[G, K, V] -> [G, 1, V], for K up to 512."""
    x = x_GKV
    if x.shape[1] >= 512:
        x = _halve(x)
    if x.shape[1] >= 256:
        x = _halve(x)
    if x.shape[1] >= 128:
        x = _halve(x)
    if x.shape[1] >= 64:
        x = _halve(x)
    if x.shape[1] >= 32:
        x = _halve(x)
    if x.shape[1] >= 16:
        x = _halve(x)
    if x.shape[1] >= 8:
        x = _halve(x)
    if x.shape[1] >= 4:
        x = _halve(x)
    if x.shape[1] >= 2:
        x = _halve(x)
    return x


@triton.jit
def _sum_keys(x_KV, KEYS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """[KEYS, WIDTH] -> [WIDTH] in the order Row(lanes=KEYS)."""
    group: tl.constexpr = GROUP if KEYS > GROUP else KEYS
    x = _halve_down(tl.reshape(x_KV, [KEYS // group, group, WIDTH]))
    return tl.reshape(_halve_down(tl.reshape(x, [1, KEYS // group, WIDTH])), [WIDTH])


@triton.jit
def _recurrence_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, rates_ptr, state_ptr, out_ptr, slots_ptr, cu_seqlens_ptr, seq_lens_ptr,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, DELTA: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    s, h = tl.program_id(0), tl.program_id(1)
    key = tl.arange(0, KEYS)
    value = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    first = tl.load(cu_seqlens_ptr + s)
    end = tl.load(cu_seqlens_ptr + s + 1)
    slot = tl.load(slots_ptr + s)
    continues = (slot >= 0) & (tl.load(seq_lens_ptr + s) > end - first)
    inside = (key < K)[:, None] & (value < V)[None, :]
    place = (h * K + key)[:, None] * V + value[None, :]
    slot_ptr = state_ptr + slot.to(tl.int64) * (H * K * V)
    state = tl.load(slot_ptr + place, mask=inside & continues, other=0.0)
    if KIND == 2:
        rates = tl.load(rates_ptr + place, mask=inside, other=0.0)
    for t in range(first, end):
        token = tl.cast(t, tl.int64)
        row = token * H + h
        of_keys = (token * G + h // (H // G)) * K + key
        q = tl.load(q_ptr + of_keys, mask=key < K, other=0.0)[:, None]
        k = tl.load(k_ptr + of_keys, mask=key < K, other=0.0)[:, None]
        update = tl.load(v_ptr + row * V + value, mask=value < V, other=0.0)
        if KIND == 0:
            state = state * exponential(tl.load(decay_ptr + row), ON_GPU)
        elif KIND == 1:
            state = state * exponential(tl.load(decay_ptr + row * K + key, mask=key < K, other=0.0), ON_GPU)[:, None]
        else:
            step = tl.load(decay_ptr + row * V + value, mask=value < V, other=0.0)[None, :]
            state = state * exponential(step * rates, ON_GPU)
        if DELTA:
            update = (update - _sum_keys(k * state, KEYS, WIDTH, GROUP)) * tl.load(beta_ptr + row)
        state = state + k * update[None, :]
        tl.store(out_ptr + row * V + value, _sum_keys(q * state, KEYS, WIDTH, GROUP), mask=value < V)
    tl.store(slot_ptr + place, state, mask=inside & (slot >= 0) & (end > first))


def linear_recurrence_cuda(
    kind: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    rates: Tensor | None,
    state: Tensor,
    *step: Tensor,
) -> Tensor:
    """Run q and k [T, G, K], v [T, H, V] float32 -> [T, H, V]; tiles and warps depend only on K and V.

    Args:
        kind: the decay's kind, from linear.decay_kind.
    """
    (T, H, V), (G, K), S = v.shape, q.shape[1:], len(step[0])
    out = torch.zeros((T, H, V), dtype=torch.float32, device=v.device)  # padding rows stay zeros
    if out.numel() == 0 or S == 0:
        return out
    given = [None if value is None else value.contiguous() for value in (q, k, v, decay, beta, rates)]
    keys = triton.next_power_of_2(K)
    width = min(triton.next_power_of_2(V), max(16, MOST_ELEMENTS // keys), 64)
    _recurrence_kernel[(S, H, triton.cdiv(V, width))](
        *given, state, out, *step,
        H=H, G=G, K=K, V=V, KEYS=keys, WIDTH=width, GROUP=GROUP, KIND=kind, DELTA=beta is not None,
        ON_GPU=v.is_cuda, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
