"""attention_gpu.py's tiles for Hopper GPUs, with copies and layouts chosen by hand. Same bits.

Legend: as in attention_gpu.py, with D = V. A program is one warpgroup, with 64 rows. Two programs share a
multiprocessor: one multiplies while the other computes weights of the softmax.

Tensor cores need int8 operands whose summed index is contiguous. It is contiguous in queries and keys. Weights are
multiplied from the registers that hold them, with the keys in another order. Values are copied as they are cached, and
then transposed by the threads.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from detcompile.config import int8_tensor_cores
from detcompile.templates.attention.hopper_blocks import sequence_of
from detcompile.templates.device.dependent_launch import gluon_let_next_start, gluon_wait_for_earlier
from detcompile.templates.device.gate import is_hopper
from detcompile.templates.device.primitives import barrier
from detcompile.templates.exact.functions import (
    MAGIC,
    bits,
    ceil,
    exp2_clipped,
    left_digits,
    oldest_key,
    one_over,
    shift,
    sink_state,
)

ROWS = 64
_KEYS, _GROUP = gl.constexpr(128), gl.constexpr(8)  # keys of a block, blocks of a group
_NONE = gl.constexpr(-1.7014118346046923e38)  # -2^127: the peak before the first key
_BY_KEY = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def supports(q: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], group: int) -> bool:
    """Return True if the kernels can run with these sizes. They have no soft cap and no ALiBi."""
    D, block_size = q.shape[2], caches[0].shape[1]
    aligned = all(
        cache.numel() < 1 << 31 and cache.data_ptr() % 16 == 0 and not any(step % 4 for step in cache.stride()[:3])
        for cache in caches
    )
    fits = v.shape[2] == D and D in (64, 128) and group <= ROWS and block_size % 32 == 0
    return fits and aligned and is_hopper(q.device) and int8_tensor_cores()


@gluon.jit
def _pages(table_ptr, first, limit, SIZE: gl.constexpr):
    """The pages of the 128 keys from `first` on, one for each quarter; any page for a quarter at or past `limit`."""
    p0 = gl.load(table_ptr + first // SIZE, mask=first < limit, other=0)
    p1 = p0
    p2 = p0
    p3 = p0
    if SIZE % 128 != 0:
        p2 = gl.load(table_ptr + (first + 64) // SIZE, mask=first + 64 < limit, other=0)
        p3 = p2
    if SIZE % 64 != 0:
        p1 = gl.load(table_ptr + (first + 32) // SIZE, mask=first + 32 < limit, other=0)
        p3 = gl.load(table_ptr + (first + 96) // SIZE, mask=first + 96 < limit, other=0)
    return p0, p1, p2, p3


@gluon.jit
def _copy_rows(
    tile, bytes_ptr, pages, first, limit, block, SLOT: gl.constexpr, D: gl.constexpr, SIZE: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """Start copying digits [128, D] of the keys from `first` on. Quarters that begin at or past `limit` are skipped.

    ORDER 0: row i has key i. Otherwise the 32 rows of a quarter are four parts of eight rows w.
    ORDER 1: row w of part i has key 4 w + i.
    ORDER 2: row w = 4 c + q of part 2 h + b has key 16 c + 8 h + 2 q + b.
    """
    ROWS_AT_ONCE: gl.constexpr = 2048 // D
    LOADS: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    row = gl.arange(0, ROWS_AT_ONCE, layout=gl.SliceLayout(1, LOADS))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LOADS))
    key = row
    STEP: gl.constexpr = 16 if ORDER == 0 else 2 if ORDER == 1 else 8  # of keys, after 16 rows
    if ORDER == 1:
        key = row % 8 * 4 + row // 8
    if ORDER == 2:
        key = row % 8 // 4 * 16 + row % 4 * 2 + row // 16 * 8 + row // 8 % 2
    for quarter in gl.static_range(4):
        start = first + quarter * 32
        wanted = (start < limit) & (row[:, None] >= 0) & (d[None, :] >= 0)
        at = bytes_ptr + 4 * (pages[quarter].to(gl.int64) * block + start % SIZE * SLOT)
        at = at + (4 * SLOT * key[:, None] + d[None, :])
        for part in gl.static_range(32 // ROWS_AT_ONCE):  # one address, plus constants
            rows = tile.slice(quarter * 32 + part * ROWS_AT_ONCE, ROWS_AT_ONCE)
            async_copy.async_copy_global_to_shared(rows, at + 4 * SLOT * STEP * part, mask=wanted)
    async_copy.commit_group()


@gluon.jit
def _scales(word_ptr, pages, first, limit, block, SLOT: gl.constexpr, SIZE: gl.constexpr):
    """Scales of the 128 keys from `first` on, in order of keys; 1 for keys at or past `limit`."""
    p0, p1, p2, p3 = pages
    i = gl.arange(0, 128, layout=_BY_KEY)
    page = gl.where(i < 64, gl.where(i < 32, p0, p1), gl.where(i < 96, p2, p3)).to(gl.int64)
    return gl.load(word_ptr + page * block + (first + i) % SIZE * SLOT, mask=first + i < limit, other=1.0)


@gluon.jit
def _transpose(raw, turned, V: gl.constexpr):
    """Transpose raw [128, V] int8, copied in parts, to turned [V, 128]. Row b * V / 4 + w is feature 4 w + b; its bytes
    4 i to 4 i + 3 come from row i of each part."""
    WORDS: gl.constexpr = V // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([WORDS // 4, 1], [32 // WORDS, WORDS], [4, 1], [1, 0])
    flat = gl.reshape(gl.zeros([32, WORDS], gl.int32, LAYOUT), [4, 8 * WORDS])
    QUARTERS: gl.constexpr = flat.type.layout
    words = raw._reinterpret(gl.int32, [4, 32 * WORDS], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    w0 = gl.reshape(words.slice(0, 8 * WORDS, dim=1).load(QUARTERS), [32, WORDS])
    w1 = gl.reshape(words.slice(8 * WORDS, 8 * WORDS, dim=1).load(QUARTERS), [32, WORDS])
    w2 = gl.reshape(words.slice(16 * WORDS, 8 * WORDS, dim=1).load(QUARTERS), [32, WORDS])
    w3 = gl.reshape(words.slice(24 * WORDS, 8 * WORDS, dim=1).load(QUARTERS), [32, WORDS])
    parts = gl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;
        prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632;
        }""",
        "=r,=r,=r,=r,r,r,r,r", [w0, w1, w2, w3], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    target = turned._reinterpret(gl.int32, [V, 32], gl.NVMMASharedLayout(128, 32, 2))
    for b in gl.static_range(4):
        target.slice(b * WORDS, WORDS).store(gl.permute(parts[b], (1, 0)))


@gluon.jit
def _as_left(p, OPERAND: gl.constexpr):
    """Weights [64, 128] as a left operand, with columns in an order in which no thread sends weights to another."""
    parts = gl.permute(gl.reshape(p, [64, 8, 2, 4, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(parts, [64, 128]), OPERAND)


@gluon.jit
def _zero():
    """0, which the compiler cannot see."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _scores(q, k_tiles, k_scale, r, D: gl.constexpr, DIGITS: gl.constexpr, S_L: gl.constexpr):
    zeros = gl.zeros([64, 128], gl.int32, S_L)
    k = k_tiles.index(0).permute((1, 0))
    high = warpgroup_mma(q.index(0), k, zeros, use_acc=False, is_async=True)
    low = warpgroup_mma(q.index(1), k, zeros, use_acc=False, is_async=True)
    if DIGITS == 2:
        low = warpgroup_mma(q.index(0), k_tiles.index(1).permute((1, 0)), low, is_async=True)
    high, low = warpgroup_mma_wait(0, deps=(high, low))
    z = (high * 256 + low).to(gl.float32) * gl.convert_layout(k_scale, gl.SliceLayout(0, S_L))[None, :]
    return z * r[:, None]


@gluon.jit
def _output(weight, v_tiles, V: gl.constexpr, DIGITS: gl.constexpr, O_L: gl.constexpr):
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_L, 4)
    high = _as_left(((weight + 128) >> 8).to(gl.int8), OPERAND)
    low = _as_left(weight.to(gl.int8), OPERAND)
    v = v_tiles.index(0).permute((1, 0))
    o = warpgroup_mma(high, v, gl.zeros([64, V], gl.int32, O_L), use_acc=False, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,)) * 256
    o = warpgroup_mma(low, v, o, is_async=True)
    if DIGITS == 2:
        o = warpgroup_mma(high, v_tiles.index(1).permute((1, 0)), o, is_async=True)
    return warpgroup_mma_wait(0, deps=(o,)).to(gl.float32)


@gluon.jit
def _merge(acc, total, peak, acc2, total2, peak2, AXIS: gl.constexpr, OF_ACC: gl.constexpr):
    """The state of the keys of two states. Totals and peaks lack acc's axis AXIS; OF_ACC is acc's layout without it."""
    new = gl.maximum(peak, peak2)
    mine, its = shift(peak - new), shift(peak2 - new)
    old = acc * gl.expand_dims(gl.convert_layout(mine, OF_ACC), AXIS)
    acc = gl.fma(acc2, gl.expand_dims(gl.convert_layout(its, OF_ACC), AXIS) + gl.zeros_like(acc), old)
    return acc, gl.fma(total2, its, total * mine), new


@gluon.jit(do_not_specialize=["T", "S", "units", "splits"])
def hopper_exact_attention_kernel(
    q_ptr, k_ptr, k_word_ptr, v_ptr, v_word_ptr, cu_ptr, lens_ptr, table_ptr, sinks_ptr, out_ptr, state_ptr,
    T, S, max_blocks, units, splits, k_block, v_block, window, chunk, factor,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DIGITS: gl.constexpr, SIZE: gl.constexpr,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr, SINKS: gl.constexpr,
    UNIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_L)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_L)
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    DIGIT: gl.constexpr = gl.NVMMASharedLayout(D, 8, 2)
    BQ: gl.constexpr = 64 // HEADS
    SPAN: gl.constexpr = (_GROUP if UNIT == 0 else UNIT) * _KEYS
    q_tiles = gl.allocate_shared_memory(gl.int8, [2, 64, D], DIGIT)
    k_tiles = gl.allocate_shared_memory(gl.int8, [DIGITS, 128, D], DIGIT)
    raw_tiles = gl.allocate_shared_memory(gl.int8, [DIGITS, 128, D], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    v_tiles = gl.allocate_shared_memory(gl.int8, [DIGITS, D, 128], gl.NVMMASharedLayout(128, 8, 2))

    gluon_let_next_start(PDL)
    gluon_wait_for_earlier(PDL)
    tile = gl.num_programs(0) - 1 - gl.program_id(0)  # long rows first
    g = gl.program_id(1)
    sequence = sequence_of(tile, cu_ptr, S, BQ, 1, 4)
    start = gl.load(cu_ptr + sequence)
    real = sequence < S
    length = gl.load(cu_ptr + sequence + 1, mask=real, other=T) - start
    base = (tile - (start // BQ + sequence)) * BQ
    row_heads = gl.num_programs(1) * G

    i = gl.arange(0, 64, layout=O_ROW)
    token = base + i // HEADS
    known = (token < length) & (i % HEADS < G)
    head = (start + token).to(gl.int64) * row_heads + g * G + i % HEADS
    column = gl.arange(0, D, layout=gl.SliceLayout(0, O_L))
    feature = column % (D // 4) * 4 + column // (D // 4)  # of _transpose's rows
    if real & (base < length):
        past = gl.load(lens_ptr + sequence) - length
        q_row = gl.arange(0, 64, layout=gl.SliceLayout(1, LANES))
        q_token = base + q_row // HEADS
        q_head = (start + q_token).to(gl.int64) * row_heads + g * G + q_row % HEADS
        d = gl.arange(0, D, layout=gl.SliceLayout(0, LANES))
        q_known = (q_token < length) & (q_row % HEADS < G)
        q = gl.load(q_ptr + q_head[:, None] * D + d[None, :], mask=q_known[:, None], other=0.0)
        q_bits, q_scale, q_poison = left_digits(q)
        q_tiles.index(0).store(((q_bits + 128) >> 8).to(gl.int8))
        q_tiles.index(1).store(q_bits.to(gl.int8))
        fence_async_shared()
        r = gl.convert_layout(q_scale * factor, ROW)
        poisoned = gl.convert_layout(q_poison, ROW)

        row = gl.arange(0, 64, layout=ROW)
        row_token = base + row // HEADS
        row_known = (row_token < length) & (row % HEADS < G)
        position = past + gl.minimum(row_token, length - 1)
        row_head = (start + row_token).to(gl.int64) * row_heads + g * G + row % HEADS
        oldest = oldest_key(position, window, chunk)
        total = gl.zeros([64], gl.float32, ROW)
        peak = gl.full([64], _NONE, gl.float32, ROW)
        if SINKS and UNIT == 0:
            peak, total, endless = sink_state(sinks_ptr, g * G + row % HEADS, row_known)
            poisoned = gl.maximum(poisoned, endless)
        begin = gl.min(oldest, 0)
        limit = gl.max(position, 0) + 1
        whole_from = gl.max(oldest, 0)
        whole_to = gl.min(position, 0)
        # This program's units are consecutive.
        first_unit = begin // SPAN
        share_of_units = ((limit - 1) // SPAN - first_unit + splits) // splits
        from_unit = first_unit + gl.program_id(2) * share_of_units
        begin = gl.maximum(begin // _KEYS * _KEYS, from_unit * SPAN)
        end = gl.minimum(limit, (from_unit + share_of_units) * SPAN)

        table_ptr += sequence.to(gl.int64) * max_blocks
        k_ptr += 4 * g.to(gl.int64) * K_HEAD
        v_ptr += 4 * g.to(gl.int64) * V_HEAD
        k_word_ptr += g * K_HEAD + DIGITS * D // 4
        v_word_ptr += g * V_HEAD + DIGITS * D // 4
        pages = _pages(table_ptr, begin, end, SIZE)
        n0, n1, n2, n3 = _pages(table_ptr, begin + _KEYS, end, SIZE)
        for digit in gl.static_range(DIGITS):
            _copy_rows(k_tiles.index(digit), k_ptr + digit * D, pages, begin, end, k_block, K_SLOT, D, SIZE, 0)
        for digit in gl.static_range(DIGITS):
            _copy_rows(raw_tiles.index(digit), v_ptr + digit * D, pages, begin, end, v_block, V_SLOT, D, SIZE, 2)
        k_next = _scales(k_word_ptr, pages, begin, end, k_block, K_SLOT, SIZE)
        v_next = _scales(v_word_ptr, pages, begin, end, v_block, V_SLOT, SIZE)
        acc = gl.zeros([64, D], gl.float32, O_L)
        total2 = gl.zeros([64], gl.float32, ROW)
        peak2 = gl.full([64], _NONE, gl.float32, ROW)
        faulty2 = poisoned
        for first in range(begin, end, _KEYS):
            k_scale = gl.where(k_next == k_next, k_next, 1.0)
            v_scale = gl.where(v_next == v_next, v_next, 1.0)
            faulty = gl.where((k_next == k_next) & (v_next == v_next), 0, 1)
            following = first + _KEYS
            pages = (n0, n1, n2, n3)
            n0, n1, n2, n3 = _pages(table_ptr, following + _KEYS, end, SIZE)
            k_next = _scales(k_word_ptr, pages, following, end, k_block, K_SLOT, SIZE)
            v_next = _scales(v_word_ptr, pages, following, end, v_block, V_SLOT, SIZE)
            async_copy.wait_group(DIGITS)
            fence_async_shared()
            barrier()
            z = _scores(q_tiles, k_tiles, k_scale, r, D, DIGITS, S_L)
            barrier()
            for digit in gl.static_range(DIGITS):
                tile_k = k_tiles.index(digit)
                _copy_rows(tile_k, k_ptr + digit * D, pages, following, end, k_block, K_SLOT, D, SIZE, 0)
            all_seen = (first >= whole_from) & (first + _KEYS - 1 <= whole_to)
            if all_seen:
                m = ceil(gl.max(z, 1))
                p = exp2_clipped(gl.maximum(z - m[:, None], -100.0))
                widest = gl.max(v_scale, 0)
                factors = gl.convert_layout(v_scale * gl.div_rn(32512.0, widest), COLUMN)[None, :]
                weight = bits(gl.fma(p, factors + gl.zeros_like(p), MAGIC))
                reach = gl.full([64], 1.0, gl.float32, ROW) * widest
                faulty2 = gl.maximum(faulty2, gl.max(faulty, 0))
                seen = row >= 0
            else:
                key = first + gl.arange(0, 128, layout=COLUMN)
                visible = (key[None, :] <= position[:, None]) & (key[None, :] >= oldest[:, None])
                z = gl.where(visible, z, -float("inf"))
                m = ceil(gl.max(z, 1))
                p = gl.where(visible, exp2_clipped(gl.maximum(z - m[:, None], -100.0)), 0.0)
                scale = gl.where(visible, gl.convert_layout(v_scale, COLUMN)[None, :], 0.0)
                reach = gl.max(scale, 1)
                weight = bits(gl.fma(p, scale * gl.div_rn(32512.0, reach)[:, None], MAGIC))
                hurt = gl.convert_layout(faulty, COLUMN)[None, :]
                seen = (first <= position) & (first + _KEYS > oldest)
                faulty2 = gl.maximum(faulty2, gl.where(seen, gl.max(gl.where(visible, hurt, 0), 1), 0))
            count = bits(gl.fma(p, gl.full([64, 128], 32512.0, gl.float32, S_L), MAGIC))
            count = (gl.sum(count, 1) + 0x60000000).to(gl.float32)  # less 128 times MAGIC's bits
            async_copy.wait_group(DIGITS)
            barrier()
            for digit in gl.static_range(DIGITS):
                _transpose(raw_tiles.index(digit), v_tiles.index(digit), D)
            fence_async_shared()
            barrier()
            for digit in gl.static_range(DIGITS):
                raw = raw_tiles.index(digit)
                _copy_rows(raw, v_ptr + digit * D, pages, following, end, v_block, V_SLOT, D, SIZE, 2)
            o = _output(weight, v_tiles, D, DIGITS, O_L) * gl.convert_layout(reach, O_ROW)[:, None]
            if all_seen:
                acc, total2, peak2 = _merge(acc, total2, peak2, o, count, m, 1, O_ROW)
            else:
                new_acc, new_total, new_peak = _merge(acc, total2, peak2, o, count, m, 1, O_ROW)
                acc = gl.where(gl.convert_layout(seen, O_ROW)[:, None], new_acc, acc)
                total2 = gl.where(seen, new_total, total2)
                peak2 = gl.where(seen, new_peak, peak2)
            if (following % SPAN == 0) | (following >= end):
                unit = first // SPAN
                opaque_head = head + _zero()  # else the compiler hoists the addresses out of the loop and spills them
                if UNIT == 0:  # out holds the row's sums, in this order of columns
                    kept = out_ptr + opaque_head[:, None] * D + column[None, :]
                    earlier = gl.load(kept, mask=known[:, None] & (unit > first_unit), other=0.0)
                    merged, merged_total, merged_peak = _merge(earlier, total, peak, acc, total2, peak2, 1, O_ROW)
                    met = (unit * SPAN <= position) & (unit * SPAN + SPAN > oldest)
                    acc = gl.where(gl.convert_layout(met, O_ROW)[:, None], merged, earlier)
                    total = gl.where(met, merged_total, total)
                    peak = gl.where(met, merged_peak, peak)
                    if following < end:
                        gl.store(kept, acc, mask=known[:, None])
                    else:
                        acc = acc * gl.convert_layout(one_over(total), O_ROW)[:, None]
                        acc = gl.where(gl.convert_layout(faulty2, O_ROW)[:, None] != 0, float("nan"), acc)
                        barrier()  # until other threads have read what this one overwrites
                        gl.store(out_ptr + opaque_head[:, None] * D + feature[None, :], acc, mask=known[:, None])
                else:
                    place = row_head * units + unit
                    part = out_ptr + (opaque_head * units + unit)[:, None] * D + feature[None, :]
                    gl.store(part, acc, mask=known[:, None])
                    gl.store(state_ptr + place * 3, total2, mask=row_known)
                    gl.store(state_ptr + place * 3 + 1, peak2, mask=row_known)
                    gl.store(state_ptr + place * 3 + 2, faulty2.to(gl.float32), mask=row_known)
                acc = gl.zeros([64, D], gl.float32, O_L)
                total2 = gl.zeros([64], gl.float32, ROW)
                peak2 = gl.full([64], _NONE, gl.float32, ROW)
        async_copy.wait_group(0)
    elif UNIT == 0:
        zeros = gl.zeros([64, D], gl.float32, O_L)
        gl.store(out_ptr + head[:, None] * D + feature[None, :], zeros, mask=known[:, None])


@gluon.jit
def _split(pairs, HEADS: gl.constexpr):
    """Even and odd columns of [rows, 2 HEADS]."""
    return gl.split(gl.reshape(pairs, [pairs.shape[0], HEADS, 2]))


@gluon.jit
def _totals(tiles, right, ROWS: gl.constexpr, HEADS: gl.constexpr, DIGITS: gl.constexpr, LAYOUT: gl.constexpr):
    """Exact products [ROWS, HEADS] of tiles' digits with `right` [2 HEADS, K], a row for each digit of a head."""
    zeros = gl.zeros([ROWS, 2 * HEADS], gl.int32, LAYOUT)
    pairs = warpgroup_mma(tiles.index(0), right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    high, low = _split(warpgroup_mma_wait(0, deps=(pairs,)), HEADS)
    if DIGITS == 2:
        pairs = warpgroup_mma(tiles.index(1), right.permute((1, 0)), zeros, use_acc=False, is_async=True)
        crossed, _ = _split(warpgroup_mma_wait(0, deps=(pairs,)), HEADS)
        low = low + crossed
    return high * 256 + low


@gluon.jit
def _paired(x):
    """Both digits of integers x [rows, heads], in neighboring columns."""
    pairs = gl.join(((x + 128) >> 8).to(gl.int8), x.to(gl.int8))
    return gl.reshape(pairs, [x.shape[0], 2 * x.shape[1]])


@gluon.jit(do_not_specialize=["T", "S", "units", "splits"])
def hopper_exact_decode_kernel(
    q_ptr, k_ptr, k_word_ptr, v_ptr, v_word_ptr, cu_ptr, lens_ptr, table_ptr, sinks_ptr, out_ptr, state_ptr,
    T, S, max_blocks, units, splits, k_block, v_block, window, chunk, factor,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, DIGITS: gl.constexpr, SIZE: gl.constexpr,
    K_SLOT: gl.constexpr, K_HEAD: gl.constexpr, V_SLOT: gl.constexpr, V_HEAD: gl.constexpr, SINKS: gl.constexpr,
    UNIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attention of one token: the products' rows are keys and features, their columns heads and the heads' digits."""
    N: gl.constexpr = 2 * HEADS
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    Q_L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    DIGIT: gl.constexpr = gl.NVMMASharedLayout(D, 8, 2)
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    SPAN: gl.constexpr = (1 if UNIT == 0 else UNIT) * _KEYS
    q_tile = gl.allocate_shared_memory(gl.int8, [N, D], DIGIT)
    p_tile = gl.allocate_shared_memory(gl.int8, [N, 128], KEYS)
    k_tiles = gl.allocate_shared_memory(gl.int8, [DIGITS, 128, D], DIGIT)
    raw_tiles = gl.allocate_shared_memory(gl.int8, [DIGITS, 128, D], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    v_tiles = gl.allocate_shared_memory(gl.int8, [DIGITS, D, 128], KEYS)

    gluon_let_next_start(PDL)
    gluon_wait_for_earlier(PDL)
    t = gl.program_id(0)
    g = gl.program_id(1)
    sequence = sequence_of(t, cu_ptr, S, 1, 0, 4)
    first_head = (t * gl.num_programs(1) + g) * G
    by_key, _ = _split(gl.zeros([128, N], gl.int32, S_L), HEADS)
    by_feature, _ = _split(gl.zeros([D, N], gl.int32, S_L), HEADS)
    Z_L: gl.constexpr = by_key.type.layout
    O_L: gl.constexpr = by_feature.type.layout
    KEY: gl.constexpr = gl.SliceLayout(1, Z_L)
    HEAD: gl.constexpr = gl.SliceLayout(0, Z_L)
    O_HEAD: gl.constexpr = gl.SliceLayout(0, O_L)
    row = gl.arange(0, D, layout=gl.SliceLayout(1, O_L))
    feature = row % (D // 4) * 4 + row // (D // 4)  # of _transpose's rows
    o_head = gl.arange(0, HEADS, layout=O_HEAD)
    o_at = (first_head + o_head).to(gl.int64)
    o_known = (o_head < G)[None, :] & (feature >= 0)[:, None]
    if sequence < S:
        position = gl.load(lens_ptr + sequence) - gl.load(cu_ptr + sequence + 1) + t
        q_head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, Q_L))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, Q_L))
        q_at = (first_head + q_head).to(gl.int64)[:, None] * D + d[None, :]
        q = gl.load(q_ptr + q_at, mask=(q_head < G)[:, None] & (d >= 0)[None, :], other=0.0)
        q_bits, q_scale, q_poison = left_digits(q)
        digits = gl.permute(gl.join(((q_bits + 128) >> 8).to(gl.int8), q_bits.to(gl.int8)), (0, 2, 1))
        q_tile.store(gl.reshape(digits, [N, D]))
        r = gl.convert_layout(q_scale * factor, HEAD)
        poisoned = gl.convert_layout(q_poison, HEAD)
        head = gl.arange(0, HEADS, layout=HEAD)
        total = gl.zeros([HEADS], gl.float32, HEAD)
        peak = gl.full([HEADS], _NONE, gl.float32, HEAD)
        if SINKS and UNIT == 0:
            peak, total, endless = sink_state(sinks_ptr, g * G + head, head < G)
            poisoned = gl.maximum(poisoned, endless)
        oldest = oldest_key(position, window, chunk)
        first_unit = oldest // SPAN
        share_of_units = (position // SPAN - first_unit + splits) // splits
        from_unit = first_unit + gl.program_id(2) * share_of_units
        begin = gl.maximum(oldest // _KEYS * _KEYS, from_unit * SPAN)
        end = gl.minimum(position + 1, (from_unit + share_of_units) * SPAN)

        table_ptr += sequence.to(gl.int64) * max_blocks
        k_ptr += 4 * g.to(gl.int64) * K_HEAD
        v_ptr += 4 * g.to(gl.int64) * V_HEAD
        k_word_ptr += g * K_HEAD + DIGITS * D // 4
        v_word_ptr += g * V_HEAD + DIGITS * D // 4
        pages = _pages(table_ptr, begin, end, SIZE)
        n0, n1, n2, n3 = _pages(table_ptr, begin + _KEYS, end, SIZE)
        for digit in gl.static_range(DIGITS):
            _copy_rows(k_tiles.index(digit), k_ptr + digit * D, pages, begin, end, k_block, K_SLOT, D, SIZE, 0)
        for digit in gl.static_range(DIGITS):
            _copy_rows(raw_tiles.index(digit), v_ptr + digit * D, pages, begin, end, v_block, V_SLOT, D, SIZE, 1)
        k_next = _scales(k_word_ptr, pages, begin, end, k_block, K_SLOT, SIZE)
        v_next = _scales(v_word_ptr, pages, begin, end, v_block, V_SLOT, SIZE)
        acc = gl.zeros([D, HEADS], gl.float32, O_L)
        acc2 = gl.zeros([D, HEADS], gl.float32, O_L)
        total2 = gl.zeros([HEADS], gl.float32, HEAD)
        peak2 = gl.full([HEADS], _NONE, gl.float32, HEAD)
        for first in range(begin, end, _KEYS):
            i = first + gl.arange(0, 128, layout=_BY_KEY)
            seen = (i <= position) & (i >= oldest)
            k_scale = gl.where(k_next == k_next, k_next, 1.0)
            v_scale = gl.where(seen, gl.where(v_next == v_next, v_next, 1.0), 0.0)
            faulty = gl.where(seen & ((k_next != k_next) | (v_next != v_next)), 1, 0)
            poisoned = gl.maximum(poisoned, gl.max(faulty, 0))
            reach = gl.max(v_scale, 0)
            share = gl.convert_layout(v_scale * gl.div_rn(32512.0, reach), KEY)
            following = first + _KEYS
            pages = (n0, n1, n2, n3)
            n0, n1, n2, n3 = _pages(table_ptr, following + _KEYS, end, SIZE)
            k_next = _scales(k_word_ptr, pages, following, end, k_block, K_SLOT, SIZE)
            v_next = _scales(v_word_ptr, pages, following, end, v_block, V_SLOT, SIZE)
            async_copy.wait_group(DIGITS)
            fence_async_shared()
            barrier()
            scores = _totals(k_tiles, q_tile, 128, HEADS, DIGITS, S_L)
            barrier()
            for digit in gl.static_range(DIGITS):
                tile_k = k_tiles.index(digit)
                _copy_rows(tile_k, k_ptr + digit * D, pages, following, end, k_block, K_SLOT, D, SIZE, 0)
            z = scores.to(gl.float32) * gl.convert_layout(k_scale, KEY)[:, None] * r[None, :]
            visible = gl.convert_layout(seen, KEY)[:, None]
            z = gl.where(visible, z, -float("inf"))
            m = ceil(gl.max(z, 0))
            p = gl.where(visible, exp2_clipped(gl.maximum(z - m[None, :], -100.0)), 0.0)
            counted = gl.sum(bits(gl.fma(p, gl.zeros_like(p) + 32512.0, MAGIC)), 0)
            count = (counted + 0x60000000).to(gl.float32)  # less 128 times MAGIC's bits
            weight = bits(gl.fma(p, share[:, None] + gl.zeros_like(p), MAGIC))
            p_tile.permute((1, 0)).store(_paired(weight))
            async_copy.wait_group(DIGITS)
            barrier()
            for digit in gl.static_range(DIGITS):
                _transpose(raw_tiles.index(digit), v_tiles.index(digit), D)
            fence_async_shared()
            barrier()
            for digit in gl.static_range(DIGITS):
                raw = raw_tiles.index(digit)
                _copy_rows(raw, v_ptr + digit * D, pages, following, end, v_block, V_SLOT, D, SIZE, 1)
            o = _totals(v_tiles, p_tile, D, HEADS, DIGITS, S_L).to(gl.float32) * reach
            acc2, total2, peak2 = _merge(acc2, total2, peak2, o, count, m, 0, O_HEAD)
            GROUP_KEYS: gl.constexpr = (_GROUP if UNIT == 0 else UNIT) * _KEYS
            if (following % GROUP_KEYS == 0) | (following >= end):
                if UNIT == 0:
                    acc, total, peak = _merge(acc, total, peak, acc2, total2, peak2, 0, O_HEAD)
                else:
                    unit = first // SPAN
                    part = out_ptr + (o_at * units + unit)[None, :] * D + feature[:, None]
                    gl.store(part, acc2, mask=o_known)
                    place = state_ptr + ((first_head + head).to(gl.int64) * units + unit) * 3
                    gl.store(place, total2, mask=head < G)
                    gl.store(place + 1, peak2, mask=head < G)
                    gl.store(place + 2, poisoned.to(gl.float32), mask=head < G)
                acc2 = gl.zeros([D, HEADS], gl.float32, O_L)
                total2 = gl.zeros([HEADS], gl.float32, HEAD)
                peak2 = gl.full([HEADS], _NONE, gl.float32, HEAD)
        async_copy.wait_group(0)
        if UNIT == 0:
            acc = acc * gl.convert_layout(one_over(total), O_HEAD)[None, :]
            acc = gl.where(gl.convert_layout(poisoned, O_HEAD)[None, :] != 0, float("nan"), acc)
            gl.store(out_ptr + o_at[None, :] * D + feature[:, None], acc, mask=o_known)
    elif UNIT == 0:
        gl.store(out_ptr + o_at[None, :] * D + feature[:, None], gl.zeros([D, HEADS], gl.float32, O_L), mask=o_known)
