"""Causal attention of docs/exact.md on the GPU, in plain Triton.

Legend: T tokens, S sequences, Hq Hkv heads, D head dim, V width of a value, W words of a cached row (see attention.py).

A program's tile has ROWS rows: tokens of one sequence times the query heads of one key head. If tiles are too few to
fill the GPU, several programs share a tile. The keys are cut into units of UNIT blocks, each program takes some, and a
second kernel merges the units' states. A unit is a block or a group of the definition, so a split changes no bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.config import int8_tensor_cores
from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.attention.scores import sequence_of
from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier
from detcompile.templates.device.gate import multiprocessors
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.exact import attention_hopper
from detcompile.templates.exact.cache_gpu import Rotation, write_heads
from detcompile.templates.exact.functions import (
    LOG2_E,
    MAGIC,
    bits,
    ceil,
    dot,
    exp2_short,
    left_digits,
    oldest_key,
    one_over,
    shift,
    sink_state,
    tanh,
)

_MOST_BYTES = 64 << 20  # of states, if units are single blocks
_BLOCK, _GROUP = tl.constexpr(128), tl.constexpr(8)  # keys of a block, blocks of a group


class ExactRule(NamedTuple):
    """Scores and visible keys of exact attention; the operations' last arguments.

    Attributes:
        scale: factor of the products q k; 0 means 1 / sqrt(D).
        window: how many keys a token sees, the newest, itself included; 0 means all.
        softcap: bound of the scores; 0 means none.
        sinks: logits [Hq] that count only in the softmax's denominator.
        slopes: ALiBi's slopes [Hq]; slope * (key - position) is added to a score.
        chunk: positions in a chunk; a token sees no key before its chunk. 0 means no chunks.
    """

    scale: float = 0.0
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    chunk: int = 0


@triton.jit
def _merge(acc, total, peak, acc2, total2, peak2):
    """The state of the keys of two states."""
    new = tl.maximum(peak, peak2)
    mine, its = shift(peak - new), shift(peak2 - new)
    zeros = tl.zeros_like(acc)
    return tl.fma(acc2, its[:, None] + zeros, acc * mine[:, None]), tl.fma(total2, its, total * mine), new


@triton.jit
def _block(
    first, q_high, q_low, r, position, oldest, slope, k_ptr, k_word_ptr, v_ptr, v_word_ptr, table_ptr, block_size,
    k_block, k_slot, v_block, v_slot, softcap, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    DIGITS: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, INT8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Each row's state for one block, whether the row sees a key of the block, and whether it sees a poisoned key.

    MASKED: some row does not see some key of the block. Otherwise every row sees every key.
    """
    j, d, e = tl.arange(0, _BLOCK), tl.arange(0, DP), tl.arange(0, VP)
    key = first + j
    newest, first_seen = tl.max(position, 0), tl.min(oldest, 0)  # other keys may have no block
    inside = (key <= newest) & (key >= first_seen)
    page = tl.load(table_ptr + key // block_size, mask=inside, other=0).to(tl.int64)
    k_at, v_at = page * k_block + key % block_size * k_slot, page * v_block + key % block_size * v_slot
    k_scale, v_scale = tl.load(k_word_ptr + k_at + DIGITS * D // 4), tl.load(v_word_ptr + v_at + DIGITS * V // 4)
    faulty = ((k_scale != k_scale) | (v_scale != v_scale)).to(tl.int32)
    k_scale, v_scale = tl.where(k_scale == k_scale, k_scale, 1.0), tl.where(v_scale == v_scale, v_scale, 1.0)
    k_from = k_ptr + 4 * k_at[None, :] + d[:, None]
    k = tl.load(k_from, mask=(d < D)[:, None], other=0) if D < DP else tl.load(k_from)
    score = dot(q_high, k, tl.zeros([q_high.shape[0], _BLOCK], tl.int32), INT8) * 256
    score = dot(q_low, k, score, INT8)
    if DIGITS == 2:
        k = tl.load(k_from + D, mask=(d < D)[:, None], other=0) if D < DP else tl.load(k_from + D)
        score = dot(q_high, k, score, INT8)
    z = score.to(tl.float32) * k_scale[None, :] * r[:, None]
    if CAPPED:
        z = tanh(tl.div_rn(z, softcap)) * softcap * LOG2_E
    if ALIBI:
        z = z + slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        visible = (key[None, :] <= position[:, None]) & (key[None, :] >= oldest[:, None])
        z = tl.where(visible, z, float("-inf"))
        faulty = tl.max(tl.where(visible, faulty[None, :], 0), 1)
        scale = tl.where(visible, v_scale[None, :], 0.0)  # invisible ones may be infinite, and 0 * infinity is NaN
        reach = tl.max(scale, 1)
        share = scale * tl.div_rn(32512.0, reach)[:, None]
        seen = (first <= position) & (first + _BLOCK > oldest)
    else:
        faulty = tl.zeros_like(position) + tl.max(faulty, 0)
        widest = tl.max(v_scale, 0)
        reach = tl.zeros_like(r) + widest
        share = (v_scale * tl.div_rn(32512.0, widest))[None, :] + tl.zeros_like(z)
        seen = position >= 0
    peak = ceil(tl.max(z, 1))
    p = exp2_short(z - peak[:, None])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    # fma leaves MAGIC's bits above the integer: the sum has them 128 times, the two low bytes do not have them.
    count = (tl.sum(bits(tl.fma(p, tl.zeros_like(p) + 32512.0, MAGIC)), 1) + 0x60000000).to(tl.float32)
    weight = bits(tl.fma(p, share, MAGIC))
    high, low = _as_left(((weight + 128) >> 8).to(tl.int8)), _as_left(weight.to(tl.int8))
    # The rows of values follow _as_left's order of keys.
    order = j // 16 * 16 + j % 4 // 2 * 8 + j % 16 // 4 * 2 + j % 2
    key = first + order
    inside = (key <= newest) & (key >= first_seen)
    page = tl.load(table_ptr + key // block_size, mask=inside, other=0).to(tl.int64)
    v_from = v_ptr + 4 * (page * v_block + key % block_size * v_slot)[:, None] + e[None, :]
    v = tl.load(v_from, mask=(e < V)[None, :], other=0) if V < VP else tl.load(v_from)
    o = dot(high, v, tl.zeros([q_high.shape[0], VP], tl.int32), INT8) * 256
    o = dot(low, v, o, INT8)
    if DIGITS == 2:
        v = tl.load(v_from + V, mask=(e < V)[None, :], other=0) if V < VP else tl.load(v_from + V)
        o = dot(high, v, o, INT8)
    return o.to(tl.float32) * reach[:, None], count, peak, seen, tl.where(seen, faulty, 0)


@triton.jit
def _as_left(p):
    """Weights [ROWS, 128] with columns in an order in which each thread multiplies the weights that it computed."""
    parts = tl.reshape(p, [p.shape[0], 8, 2, 4, 2])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), [p.shape[0], 128])


@triton.jit
def _add_block(acc, total, peak, poisoned, o, count, m, seen, faulty):
    """The state after a block. Rows that see no key of the block keep their state."""
    new_acc, new_total, new_peak = _merge(acc, total, peak, o, count, m)
    acc = tl.where(seen[:, None], new_acc, acc)
    return acc, tl.where(seen, new_total, total), tl.where(seen, new_peak, peak), tl.maximum(poisoned, faulty)


@triton.jit(do_not_specialize=["T", "S", "units", "splits"])
def _attention_kernel(
    q_ptr, k_ptr, k_word_ptr, v_ptr, v_word_ptr, cu_ptr, lens_ptr, table_ptr, sinks_ptr, slopes_ptr, out_ptr,
    state_ptr, T, S, max_blocks, units, splits, block_size, k_block, k_slot, k_head, v_block, v_slot, v_head, window,
    chunk, factor, softcap, G: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, DIGITS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr, INT8: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """G query heads a key head, as HEADS of ROWS rows; strides of caches count words, k_ptr and v_ptr are bytes.

    UNIT 0: out [T, Hq, V] is the result. Else out [T, Hq, units, V] and state [T, Hq, units, 3] (total, peak, poisoned)
    are the units' states.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    BQ: tl.constexpr = ROWS // HEADS
    tile, g, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)  # long rows first
    i, d, e = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, VP)
    sequence = sequence_of(tile, cu_ptr, S, BQ, 1)
    start = tl.load(cu_ptr + sequence)
    real = sequence < S
    length = tl.load(cu_ptr + sequence + 1, mask=real, other=T) - start
    token = (tile - (start // BQ + sequence)) * BQ + i // HEADS
    known = (token < length) & (i % HEADS < G)
    head = (start + token).to(tl.int64) * (tl.num_programs(1) * G) + g * G + i % HEADS
    at, inside = head[:, None] * V + e[None, :], known[:, None] & (e < V)[None, :]
    if real & (tl.max(known.to(tl.int32), 0) > 0):
        past = tl.load(lens_ptr + sequence) - length
        position = past + tl.minimum(token, length - 1)
        oldest = oldest_key(position, window, chunk)
        q = tl.load(q_ptr + head[:, None] * D + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
        q_bits, q_scale, poisoned = left_digits(q)
        q_high, q_low, r = ((q_bits + 128) >> 8).to(tl.int8), q_bits.to(tl.int8), q_scale * factor
        slope = tl.zeros([ROWS], tl.float32)
        if ALIBI:
            slope = tl.load(slopes_ptr + g * G + i % HEADS, mask=known, other=0.0) * LOG2_E
        k_word_ptr += g * k_head
        v_word_ptr += g * v_head
        k_ptr += 4 * g.to(tl.int64) * k_head
        v_ptr += 4 * g.to(tl.int64) * v_head
        table_ptr += sequence.to(tl.int64) * max_blocks
        total, peak = tl.zeros([ROWS], tl.float32), tl.full([ROWS], -1.7014118346046923e38, tl.float32)  # -2^127
        if SINKS and UNIT == 0:
            peak, total, endless = sink_state(sinks_ptr, g * G + i % HEADS, known)
            poisoned = tl.maximum(poisoned, endless)
        SPAN: tl.constexpr = (_GROUP if UNIT == 0 else UNIT) * _BLOCK
        begin, end = tl.min(oldest, 0), tl.max(position, 0)
        whole_from, whole_to = tl.max(oldest, 0), tl.min(position, 0)  # all rows see these and all keys between
        for unit in range(begin // SPAN + split, end // SPAN + 1, splits):
            acc2, total2 = tl.zeros([ROWS, VP], tl.float32), tl.zeros([ROWS], tl.float32)
            peak2 = tl.full([ROWS], -1.7014118346046923e38, tl.float32)
            faulty2 = tl.zeros([ROWS], tl.int32)
            for first in range(
                tl.maximum(unit * SPAN, begin // _BLOCK * _BLOCK), tl.minimum(unit * SPAN + SPAN, end + 1), _BLOCK
            ):
                if (first >= whole_from) & (first + _BLOCK - 1 <= whole_to):
                    o, count, m, seen, faulty = _block(
                        first, q_high, q_low, r, position, oldest, slope, k_ptr, k_word_ptr, v_ptr, v_word_ptr,
                        table_ptr, block_size, k_block, k_slot, v_block, v_slot, softcap, D, DP, V, VP, DIGITS, CAPPED,
                        ALIBI, INT8, False,
                    )  # fmt: skip
                    acc2, total2, peak2 = _merge(acc2, total2, peak2, o, count, m)
                    faulty2 = tl.maximum(faulty2, faulty)
                else:
                    o, count, m, seen, faulty = _block(
                        first, q_high, q_low, r, position, oldest, slope, k_ptr, k_word_ptr, v_ptr, v_word_ptr,
                        table_ptr, block_size, k_block, k_slot, v_block, v_slot, softcap, D, DP, V, VP, DIGITS, CAPPED,
                        ALIBI, INT8, True,
                    )  # fmt: skip
                    acc2, total2, peak2, faulty2 = _add_block(acc2, total2, peak2, faulty2, o, count, m, seen, faulty)
            faulty2 = tl.maximum(faulty2, poisoned)
            if UNIT == 0:  # out holds the row's sums, registers only those of one group
                poisoned = faulty2
                seen = (unit * SPAN <= position) & (unit * SPAN + SPAN > oldest)
                acc = tl.zeros([ROWS, VP], tl.float32)
                if unit > begin // SPAN:
                    acc = tl.load(out_ptr + at, mask=inside, other=0.0)
                acc, total, peak, poisoned = _add_block(acc, total, peak, poisoned, acc2, total2, peak2, seen, faulty2)
                if unit == end // SPAN:
                    acc = tl.where((poisoned != 0)[:, None], float("nan"), acc * one_over(total)[:, None])
                tl.store(out_ptr + at, acc, mask=inside)
            else:
                place = head * units + unit
                tl.store(out_ptr + place[:, None] * V + e[None, :], acc2, mask=inside)
                tl.store(state_ptr + place * 3, total2, mask=known)
                tl.store(state_ptr + place * 3 + 1, peak2, mask=known)
                tl.store(state_ptr + place * 3 + 2, faulty2.to(tl.float32), mask=known)
    elif UNIT == 0:
        tl.store(out_ptr + at, tl.zeros([ROWS, VP], tl.float32), mask=inside)


@triton.jit(do_not_specialize=["S", "units"])
def _merge_kernel(
    part_ptr, state_ptr, cu_ptr, lens_ptr, sinks_ptr, out_ptr, S, units, window, chunk, V: tl.constexpr,
    VP: tl.constexpr, SINKS: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the states of the units that a token sees, for one token (axis 0) and head (axis 1)."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    t, h, e = tl.program_id(0), tl.program_id(1), tl.arange(0, VP)[None, :]
    row = t.to(tl.int64) * tl.num_programs(1) + h + tl.arange(0, 1)
    sequence = sequence_of(t, cu_ptr, S, 1, 0)
    acc, total = tl.zeros([1, VP], tl.float32), tl.zeros([1], tl.float32)
    if sequence < S:
        position = tl.load(lens_ptr + sequence) - tl.load(cu_ptr + sequence + 1) + t
        oldest = oldest_key(position, window, chunk)
        peak, poisoned = tl.full([1], -1.7014118346046923e38, tl.float32), tl.zeros([1], tl.int32)
        if SINKS:
            peak, total, poisoned = sink_state(sinks_ptr, h + tl.arange(0, 1), tl.arange(0, 1) == 0)
        MEMBERS: tl.constexpr = _GROUP // UNIT
        GROUP_KEYS: tl.constexpr = _GROUP * _BLOCK
        SPAN: tl.constexpr = UNIT * _BLOCK
        for group in range(oldest // GROUP_KEYS, position // GROUP_KEYS + 1):
            acc2, total2 = tl.zeros([1, VP], tl.float32), tl.zeros([1], tl.float32)
            peak2, faulty2 = tl.full([1], -1.7014118346046923e38, tl.float32), tl.zeros([1], tl.int32)
            for member in tl.static_range(MEMBERS):
                unit = group * MEMBERS + member
                seen = ((unit * SPAN <= position) & (unit * SPAN + SPAN > oldest)) & (row >= 0)
                place = row * units + unit
                o = tl.load(part_ptr + place[:, None] * V + e, mask=seen[:, None] & (e < V), other=0.0)
                count, m = tl.load(state_ptr + place * 3, mask=seen), tl.load(state_ptr + place * 3 + 1, mask=seen)
                faulty = tl.load(state_ptr + place * 3 + 2, mask=seen, other=0.0).to(tl.int32)
                if MEMBERS == 1:
                    acc2, total2, peak2, faulty2 = o, count, m, faulty
                else:
                    acc2, total2, peak2, faulty2 = _add_block(acc2, total2, peak2, faulty2, o, count, m, seen, faulty)
            acc, total, peak = _merge(acc, total, peak, acc2, total2, peak2)
            poisoned = tl.maximum(poisoned, faulty2)
        acc = tl.where((poisoned != 0)[:, None], float("nan"), acc * one_over(total)[:, None])
    tl.store(out_ptr + row[:, None] * V + e, acc, mask=e < V)


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
    rotation: Rotation | None = None,
) -> Tensor:
    """Run ``attention.paged_attention_cpu`` on the GPU, with the factor of attention._factor."""
    (T, Hq, D), (_, Hkv, V) = q.shape, v.shape
    out = torch.empty((T, Hq, V), dtype=torch.float32, device=q.device)
    if T == 0:
        return out
    q = write_heads(caches, slot_mapping, q, k, v, digits, rotation)
    S, group = len(step.seq_lens), Hq // Hkv
    hopper = not rule.softcap and rule.slopes is None and attention_hopper.supports(q, v, caches, group)
    decode = hopper and T <= 4 * S and group <= 16
    heads = max(4, next_power_of_2(group)) if decode else next_power_of_2(group)
    rows = attention_hopper.ROWS if hopper else max(heads, 64 if T * heads > 32 * S else 16)
    tiles = T if decode else T // (rows // heads) + S + 1
    block_size, max_blocks = caches.k.shape[1], step.block_table.shape[1]
    blocks = cdiv(block_size * max_blocks, _BLOCK.value)
    unit = _unit(tiles * Hkv, q.device, blocks * out.nbytes)
    units = cdiv(blocks, unit) if unit else 1
    splits = min(units, max(1, 4 * multiprocessors(q.device) // (tiles * Hkv))) if unit else 1
    part, state = out, out
    if unit:
        part = torch.empty((T, Hq, units, V), dtype=torch.float32, device=q.device)
        state = torch.empty((T, Hq, units, 3), dtype=torch.float32, device=q.device)
    k_bytes, v_bytes = (cache.view(torch.int8) for cache in caches)
    sinks, slopes = (out if given is None else given.contiguous() for given in (rule.sinks, rule.slopes))
    (k_block, k_slot, k_head), (v_block, v_slot, v_head) = (cache.stride()[:3] for cache in caches)
    overlap = launch_options(q.device)
    common = dict(G=group, HEADS=heads, D=D, DIGITS=digits, SINKS=rule.sinks is not None, UNIT=unit, **overlap)
    if hopper:
        kernels = attention_hopper.hopper_exact_attention_kernel, attention_hopper.hopper_exact_decode_kernel
        launcher(kernels[decode])[(tiles, Hkv, splits)](
            q, k_bytes, caches.k, v_bytes, caches.v, *step, sinks, part, state, T, S, max_blocks, units, splits,
            k_block, v_block, rule.window, rule.chunk, factor, **common, SIZE=block_size, K_SLOT=k_slot, K_HEAD=k_head,
            V_SLOT=v_slot, V_HEAD=v_head, num_warps=4, maxnreg=128 if decode else 255, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        launcher(_attention_kernel)[(tiles, Hkv, splits)](
            q, k_bytes, caches.k, v_bytes, caches.v, *step, sinks, slopes, part, state, T, S, max_blocks, units, splits,
            block_size, k_block, k_slot, k_head, v_block, v_slot, v_head, rule.window, rule.chunk, factor, rule.softcap,
            **common, ROWS=rows, DP=_padded(D), V=V, VP=_padded(V), CAPPED=rule.softcap > 0,
            ALIBI=rule.slopes is not None, INT8=int8_tensor_cores(), num_warps=4, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    if unit:
        launcher(_merge_kernel)[(T, Hq)](
            part, state, *step[:2], sinks, out, S, units, rule.window, rule.chunk, V=V, VP=_padded(V),
            SINKS=rule.sinks is not None, UNIT=unit, num_warps=1, enable_fp_fusion=False, **overlap,
        )  # fmt: skip
    return out


def _padded(features: int) -> int:
    return max(32, next_power_of_2(features))


def _unit(programs: int, device: torch.device, num_bytes: int) -> int:
    """Return how many blocks of keys form a unit; 0 if this many programs fill the GPU, so that nothing is split.

    Args:
        num_bytes: size of all states if a unit is one block.
    """
    count = multiprocessors(device)
    if programs >= 2 * count:
        return 0
    return 1 if 2 * programs < count and num_bytes <= _MOST_BYTES else _GROUP.value
