"""Causal attention of docs/exact.md on the GPU, in plain Triton: one program a token and key head.

Legend: T tokens, S sequences, Hq Hkv heads, D head dim, V width of a value, W words of a cached row (see attention.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.device.launcher import launcher, next_power_of_2
from detcompile.templates.exact.functions import ceil, exp2_short, near, one_over, power_of_two, tanh
from detcompile.templates.exact.gpu import quantize_cuda

_BLOCK, _GROUP = tl.constexpr(128), tl.constexpr(8)  # keys of a block, blocks of a group
_LOG2_E = tl.constexpr(1.4426950216293335)


class ExactRule(NamedTuple):
    """Scores and visible keys of exact attention; the operations' last arguments.

    Attributes:
        scale: factor of the products; 0 for 1 / sqrt(D).
        window: a token sees the newest keys, itself included; 0 for all.
        softcap: bound of the scores; 0 for none.
        sinks: logits [Hq] that only the denominator counts.
        slopes: of ALiBi [Hq]; slope * (key - position) is added to a score.
        chunk: a token sees no key before its chunk of so many positions; 0 for no chunks.
    """

    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    chunk: int = 0


@triton.jit
def _shift(k):
    """2^k for integers k <= 0; 0 below -126."""
    return tl.where(k < -126.0, 0.0, power_of_two(tl.maximum(k, -126.0).to(tl.int32)))


@triton.jit
def _merge(acc, total, peak, acc2, total2, peak2):
    """The state of both states' keys."""
    new = tl.maximum(peak, peak2)
    mine, its = _shift(peak - new), _shift(peak2 - new)
    zeros = tl.zeros_like(acc)
    return tl.fma(acc2, its[:, None] + zeros, acc * mine[:, None]), tl.fma(total2, its, total * mine), new


@triton.jit
def _scales(scale_ptr, at, inside):
    """Scales of keys, 1 for those that are NaN or outside; and whether any was NaN."""
    scale = tl.load(scale_ptr + at, mask=inside, other=1.0)
    return tl.where(scale == scale, scale, 1.0), tl.max(tl.where(scale == scale, 0, 1), 0)


@triton.jit
def _attention_kernel(
    q_ptr, q_scale_ptr, k_ptr, k_word_ptr, v_ptr, v_word_ptr, sequence_ptr, position_ptr, table_ptr, sinks_ptr,
    slopes_ptr, out_ptr, S, plane, max_blocks, block_size, k_block, k_slot, k_head, v_block, v_slot, v_head, window,
    chunk, factor, softcap, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, DIGITS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
):  # fmt: skip
    """HEADS query heads a key head, as ROWS rows; strides of caches count words, k_ptr and v_ptr are bytes."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, d, j, e = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, _BLOCK), tl.arange(0, VP)
    head = (t * tl.num_programs(1) + g) * HEADS + i
    at, known = head[:, None] * D + d[None, :], (i < HEADS)[:, None] & (d < D)[None, :]
    sequence = tl.load(sequence_ptr + t)
    acc, total = tl.zeros([ROWS, VP], tl.float32), tl.zeros([ROWS], tl.float32)
    if sequence < S:
        position = tl.load(position_ptr + t)
        q_high = tl.load(q_ptr + at, mask=known, other=0)
        q_low = tl.load(q_ptr + plane + at, mask=known, other=0)
        q_scale = tl.load(q_scale_ptr + head, mask=i < HEADS, other=1.0)
        poisoned = tl.where(q_scale == q_scale, 0, 1)
        r = tl.where(q_scale == q_scale, q_scale, 1.0) * factor
        k_scale_at: tl.constexpr = DIGITS * D // 4
        v_scale_at: tl.constexpr = DIGITS * V // 4
        peak = tl.full([ROWS], -1.7014118346046923e38, tl.float32)  # -2^127
        if SINKS:
            sink = tl.load(sinks_ptr + g * HEADS + i, mask=i < HEADS, other=0.0) * _LOG2_E
            finite = tl.abs(sink) < 1.329227995784916e36  # 2^120
            sink = tl.where(finite, sink, 0.0)
            poisoned = tl.maximum(poisoned, tl.where(finite, 0, 1))
            peak = ceil(sink)
            total = near(exp2_short(sink - peak), total + 32512.0).to(tl.float32)
        slope = tl.zeros([ROWS], tl.float32)
        if ALIBI:
            slope = tl.load(slopes_ptr + g * HEADS + i, mask=i < HEADS, other=0.0) * _LOG2_E
        oldest = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)  # the first key that the token sees
        oldest = tl.maximum(oldest, tl.where(chunk > 0, position // tl.maximum(chunk, 1) * chunk, 0))
        for start in range(oldest // (_GROUP * _BLOCK) * (_GROUP * _BLOCK), position + 1, _GROUP * _BLOCK):
            group_acc, group_total = tl.zeros([ROWS, VP], tl.float32), tl.zeros([ROWS], tl.float32)
            group_peak = tl.full([ROWS], -1.7014118346046923e38, tl.float32)
            begin = tl.maximum(start, oldest // _BLOCK * _BLOCK)
            for first in range(begin, tl.minimum(start + _GROUP * _BLOCK, position + 1), _BLOCK):
                key = first + j
                seen = (key <= position) & (key >= oldest)
                page = tl.load(table_ptr + sequence * max_blocks + key // block_size, mask=seen, other=0).to(tl.int64)
                k_at = page * k_block + key % block_size * k_slot + g * k_head
                v_at = page * v_block + key % block_size * v_slot + g * v_head
                k_scale, k_poison = _scales(k_word_ptr, k_at + k_scale_at, seen)
                v_scale, v_poison = _scales(v_word_ptr, v_at + v_scale_at, seen)
                poisoned = tl.maximum(poisoned, tl.maximum(k_poison, v_poison))
                k_mask, v_mask = (d < D)[:, None] & seen[None, :], seen[:, None] & (e < V)[None, :]
                k = tl.load(k_ptr + 4 * k_at[None, :] + d[:, None], mask=k_mask, other=0)
                score = tl.dot(q_high, k, out_dtype=tl.int32) * 256
                score = tl.dot(q_low, k, score, out_dtype=tl.int32)
                if DIGITS == 2:
                    k = tl.load(k_ptr + 4 * k_at[None, :] + D + d[:, None], mask=k_mask, other=0)
                    score = tl.dot(q_high, k, score, out_dtype=tl.int32)
                z = score.to(tl.float32) * k_scale[None, :] * r[:, None]
                if CAPPED:
                    z = tanh(tl.div_rn(z, z * 0.0 + softcap)) * softcap * _LOG2_E
                if ALIBI:
                    z = z + slope[:, None] * (key - position).to(tl.float32)[None, :]
                block_peak = ceil(tl.max(tl.where(seen[None, :], z, float("-inf")), 1))
                p = tl.where(seen[None, :], exp2_short(z - block_peak[:, None]), 0.0)
                zeros = tl.zeros_like(p)
                count = tl.sum(near(p, zeros + 32512.0), 1).to(tl.float32)
                reach = tl.max(tl.where(seen, v_scale, 0.0), 0)
                weight = near(p, (v_scale * tl.div_rn(reach * 0.0 + 32512.0, reach))[None, :] + zeros)
                high, low = ((weight + 128) >> 8).to(tl.int8), weight.to(tl.int8)
                v = tl.load(v_ptr + 4 * v_at[:, None] + e[None, :], mask=v_mask, other=0)
                o = tl.dot(high, v, out_dtype=tl.int32) * 256
                o = tl.dot(low, v, o, out_dtype=tl.int32)
                if DIGITS == 2:
                    v = tl.load(v_ptr + 4 * v_at[:, None] + V + e[None, :], mask=v_mask, other=0)
                    o = tl.dot(high, v, o, out_dtype=tl.int32)
                group_acc, group_total, group_peak = _merge(
                    group_acc, group_total, group_peak, o.to(tl.float32) * reach, count, block_peak
                )
            acc, total, peak = _merge(acc, total, peak, group_acc, group_total, group_peak)
        acc = tl.where((poisoned != 0)[:, None], float("nan"), acc * one_over(total)[:, None])
    tl.store(out_ptr + head[:, None] * V + e[None, :], acc, mask=(i < HEADS)[:, None] & (e < V)[None, :])


def attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    step: StepMetadata,
    digits: int,
    factor: float,
    rule: ExactRule,
) -> Tensor:
    """Quantize k and v into the caches, then attend, as attention.paged_attention_cpu."""
    (T, Hq, D), (_, Hkv, V) = q.shape, v.shape
    out = torch.empty((T, Hq, V), dtype=torch.float32, device=q.device)
    if T == 0:
        return out
    _write(caches, slot_mapping, (k, v), digits)
    q_digits, q_scale = quantize_cuda(q, 2, False)
    token = torch.arange(T, device=q.device)
    S, max_blocks = step.block_table.shape
    sequence = torch.searchsorted(step.cu_seqlens[1:].contiguous(), token.int(), right=True)
    last = sequence.clamp(max=S - 1)
    position = step.seq_lens[last] - step.cu_seqlens[last + 1] + token
    k_bytes, v_bytes = (cache.view(torch.int8) for cache in caches)
    HEADS = Hq // Hkv
    sinks, slopes = (out if given is None else given.contiguous() for given in (rule.sinks, rule.slopes))
    launcher(_attention_kernel)[(T, Hkv)](
        q_digits, q_scale, k_bytes, caches.k, v_bytes, caches.v, sequence, position, step.block_table, sinks,
        slopes, out, S, q.numel(), max_blocks, caches.k.shape[1], *caches.k.stride()[:3], *caches.v.stride()[:3],
        rule.window, rule.chunk, factor, rule.softcap, HEADS=HEADS, ROWS=max(16, next_power_of_2(HEADS)), D=D,
        DP=max(32, next_power_of_2(D)), V=V, VP=max(32, next_power_of_2(V)), DIGITS=digits, CAPPED=rule.softcap > 0,
        SINKS=rule.sinks is not None, ALIBI=rule.slopes is not None, num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _write_kernel(rows_ptr, slot_ptr, cache_ptr, T, block_size, W, block, slot, head, WORDS: tl.constexpr):
    place, h, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WORDS)
    target = tl.load(slot_ptr + place)
    if target >= 0:
        row = tl.load(rows_ptr + ((place % T) * tl.num_programs(1) + h) * W + i, mask=i < W, other=0)
        at = target // block_size * block + target % block_size * slot + h * head
        tl.store(cache_ptr + at + i, row, mask=i < W)


def _write(caches: Caches, slot_mapping: Tensor, rows: tuple[Tensor, Tensor], digits: int) -> None:
    """Write the quantized rows [T, Hkv, D] at slot_mapping; nothing is written to negative slots."""
    for cache, x in zip(caches, rows):
        planes, scale = quantize_cuda(x, digits, True)
        packed = torch.cat([*(plane.view(torch.float32) for plane in planes), scale[..., None]], -1)
        (T, Hkv, W), block_size = packed.shape, cache.shape[1]
        launcher(_write_kernel)[(len(slot_mapping), Hkv)](
            packed.view(torch.int32), slot_mapping, cache.view(torch.int32), T, block_size, W, *cache.stride()[:3],
            WORDS=next_power_of_2(W), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
