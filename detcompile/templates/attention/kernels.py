"""Causal attention kernels in the KV order: chunks of keys at absolute positions, blocks of 64 keys inside a chunk.

Legend: T tokens, S sequences, H query heads, G query heads of one KV head, D and DV head dims (DP, DVP: the next
powers of two), BM rows of a tile, BQ tokens of a tile, BLOCK_SIZE keys of a cache block, c: log2e_scale, the factor of
a score inside exp2.

The scores of rows with NEEDS_SCORES: see scores.py.

A tile's rows are BQ tokens x HEADS query heads of one KV head. Per chunk a row has a maximum m, a sum l and an output
o; chunks are merged in ascending order. Sums over keys use ``tl.dot`` (with columns of ones for l), because the order
of ``tl.sum`` depends on how many warps share a row. In float32 each block is summed separately and added to the
previous sum by one fma: a chain through a whole chunk had twice the error. A block in which a row sees no key leaves
the row's bits unchanged, so tiles may skip it or not. A row that sees a nonfinite value gets NaN in that column; a row
of the same tile that does not see it is unaffected. A sink is added last, after the last chunk.
"""

import triton
import triton.language as tl

from detcompile.templates.attention.merge import merged, quotient
from detcompile.templates.attention.operands import AttentionLaunch, padded
from detcompile.templates.attention.scores import first_seen, join_sink, related, sequence_of, shaped
from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2

KEYS = tl.constexpr(64)  # per block


def launch(given: AttentionLaunch) -> None:
    """Run the kernel; it serves every problem."""
    schedule, problem, rule, q, k, v, out, target, max_and_sum, step, T, S, chunks, split = given
    group, dense = problem.group, problem.block_size == 0
    heads = min(next_power_of_2(group), schedule.block_m)
    sinks = out if rule.sinks is None else rule.sinks.contiguous()
    slopes = out if rule.alibi_slopes is None else rule.alibi_slopes.contiguous()
    bias = out if rule.relative_bias is None else rule.relative_bias.contiguous()
    extent = 0 if rule.relative_bias is None else bias.shape[-1]
    grid = (given.tiles(heads), problem.kv_heads * cdiv(group, heads), chunks if split else 1)
    launcher(attention_kernel)[grid](
        q, k, v, target, max_and_sum, *step, sinks, slopes, bias, rule.log2e_scale, rule.pre_scale, rule.softcap,
        rule.window, extent, T, S, problem.heads, chunks,
        q.stride(0) if dense else 0, *q.stride()[1:3], *k.stride()[:3], *v.stride()[:3],
        out.stride(0) if dense else 0, *out.stride()[1:3], step.block_table.stride(0),
        G=group, HEADS=heads, D=problem.d, DV=problem.dv, DP=padded(problem.d), DVP=padded(problem.dv),
        BLOCK_SIZE=problem.block_size, CHUNK=problem.chunk, WINDOWED=problem.windowed, CHUNKED=problem.chunked,
        NEEDS_SCORES=problem.needs_scores, CAPPED=problem.capped, ALIBI=problem.alibi, RELATIVE=problem.relative,
        SINKS=problem.sinks, SPLIT=split, BM=schedule.block_m, num_warps=schedule.warps, num_stages=schedule.stages,
        enable_fp_fusion=False, **launch_options(q.device),
    )  # fmt: skip


@triton.jit
def _close_chunk(M_R, L_R, O_RD, m_R, l_RC, o_RD, n, c, CHUNK: tl.constexpr):
    """Before the first key n of a chunk: merge the previous chunk and reset (m, l, o)."""
    if n % CHUNK == 0:
        M_R, L_R, O_RD = merged(M_R, L_R, O_RD, m_R, tl.max(l_RC, 1), o_RD, c)
        m_R = tl.full(m_R.shape, -float("inf"), tl.float32)
        l_RC = tl.zeros(l_RC.shape, tl.float32)
        o_RD = tl.zeros(o_RD.shape, tl.float32)
    return M_R, L_R, O_RD, m_R, l_RC, o_RD


@triton.jit
def _attend_block(
    q, m, l, o, n, low, high, pos, window, c, pre_scale, cap, slope, bias_row, extent,
    k_ptr, v_ptr, table_ptr, k_block, k_token, v_block, v_token,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr,
    ALIBI: tl.constexpr, RELATIVE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys n..n+63, all of them visible to every row unless PARTIAL.

    Keys outside low..high are read as zeros: their slots may hold NaN. In a partial block p = 0 would multiply values
    that the row must not see, so nonfinite values are replaced by zeros in the product, and rows that see them get NaN.
    """
    key = n + tl.arange(0, KEYS)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    live = key >= 0
    if PARTIAL:
        live = (key >= low) & (key < high)
    if BLOCK_SIZE == 0:
        k_row = key.to(tl.int64) * k_token
        v_row = key.to(tl.int64) * v_token
    else:
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        k_row = block * k_block + key % BLOCK_SIZE * k_token
        v_row = block * v_block + key % BLOCK_SIZE * v_token
    k_ok = (d < D)[:, None]
    v_ok = (dv < DV)[None, :]
    if PARTIAL:
        k_ok = k_ok & live[None, :]
        v_ok = v_ok & live[:, None]
    k = tl.load(k_ptr + k_row[None, :] + d[:, None], mask=k_ok, other=0.0)
    s = tl.dot(q, k, input_precision="ieee")
    if NEEDS_SCORES:
        s = shaped(s, key, pos, pre_scale, cap, slope, CAPPED, ALIBI)
    if RELATIVE:
        s = related(s, key, pos, bias_row, extent)
    if PARTIAL:
        visible = key[None, :] <= pos[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] >= first_seen(pos, window, CHUNKED)[:, None])
        s = tl.where(visible, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    alpha = tl.exp2((m - safe) * c)
    v = tl.load(v_ptr + v_row[:, None] + dv[None, :], mask=v_ok, other=0.0)
    p = tl.exp2((s - safe[:, None]) * c).to(v.dtype)
    if v.dtype != tl.float32:
        o = o * alpha[:, None]
    if PARTIAL:
        finite = tl.abs(v) < float("inf")
        nonfinite = tl.where(finite, 0.0, 1.0).to(v.dtype)
        v = tl.where(finite, v, 0.0).to(v.dtype)
        seen = tl.dot(tl.where(visible, 1.0, 0.0).to(v.dtype), nonfinite, input_precision="ieee")
        o = tl.where(seen > 0.0, float("nan"), o)
    ones = tl.full((KEYS, 16), 1.0, v.dtype)
    if v.dtype == tl.float32:
        o = tl.fma(o, alpha[:, None], tl.dot(p, v, input_precision="ieee"))
        l = tl.fma(l, alpha[:, None], tl.dot(p, ones, input_precision="ieee"))
    else:
        o = tl.dot(p, v, o, input_precision="ieee")
        l = tl.dot(p, ones, l * alpha[:, None], input_precision="ieee")
    return top, l, o


@triton.jit
def _tokens_of(tile, cu_ptr, lens_ptr, T, S, BQ: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return a tile's sequence and index in it, and the sequence's first token in the step, its tokens in the step and
    its earlier tokens."""
    if BLOCK_SIZE == 0:
        tiles = (T + BQ - 1) // BQ
        sequence = tile // tiles
        local = tile % tiles
        start = 0
        length = T
        past = 0
    else:
        sequence = sequence_of(tile, cu_ptr, S, BQ, 1)
        start = tl.load(cu_ptr + sequence)
        local = tile - (start // BQ + sequence)
        real = sequence < S
        length = tl.load(cu_ptr + sequence + 1, mask=real, other=T) - start
        past = tl.load(lens_ptr + sequence, mask=real, other=0) - length
    return sequence, local, start, length, past


@triton.jit
def _keys_of(
    sequence, kv_head, k_ptr, v_ptr, table_ptr, k_block, k_head, v_block, v_head, table_row, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Pointers to a KV head's keys and values (if dense, of the sequence) and to the sequence's block table row."""
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    if BLOCK_SIZE == 0:
        k_ptr += sequence.to(tl.int64) * k_block
        v_ptr += sequence.to(tl.int64) * v_block
    else:
        table_ptr += sequence.to(tl.int64) * table_row
    return k_ptr, v_ptr, table_ptr


@triton.jit
def _biases(
    slopes_ptr, bias_ptr, sequence, t, head, ok, T, H, extent,
    BM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIBI: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """Slopes of a tile's rows and pointers to their biases, if ALIBI and RELATIVE."""
    slope = tl.zeros((BM,), tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=ok, other=0.0).to(tl.float32)
    bias_row = bias_ptr + tl.zeros((BM,), tl.int64)
    if RELATIVE:
        place = t
        if BLOCK_SIZE == 0:
            place += sequence.to(tl.int64) * T
        bias_row += (place * H + head) * extent
    return slope, bias_row


@triton.jit
def _store_partial(out_ptr, max_and_sum_ptr, partial, m, l, o, dv, ok, out_ok, DV: tl.constexpr):
    """Store a chunk's (m, l, o) for the merge."""
    tl.store(max_and_sum_ptr + partial * 2, m, mask=ok)
    tl.store(max_and_sum_ptr + partial * 2 + 1, l, mask=ok)
    tl.store(out_ptr + partial[:, None] * DV + dv[None, :], o, mask=out_ok)


@triton.jit(do_not_specialize=["T", "S", "chunks"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, max_and_sum_ptr, cu_ptr, lens_ptr, table_ptr, sinks_ptr, slopes_ptr, bias_ptr, c,
    pre_scale, cap, window, extent, T, S, H, chunks,
    q_batch, q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, out_batch, out_token, out_head,
    table_row,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, RELATIVE: tl.constexpr, SINKS: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of tokens, axis 1: KV heads x groups of HEADS, axis 2: chunks if SPLIT.

    BLOCK_SIZE = 0: dense, S batches of T tokens; k_block and v_block are the batch strides. SPLIT: out
    [T, H, chunks, DV] and max_and_sum [T, H, chunks, 2] receive the chunk's o and (m, l), fp32. sinks and slopes [H]
    are read if SINKS and ALIBI; bias [batch or 1, T, H, extent] if RELATIVE.
    WINDOWED: a query sees the last `window` tokens up to itself; with CHUNKED, those of its chunk of `window` tokens.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    BQ: tl.constexpr = BM // HEADS
    GROUPS: tl.constexpr = (G + HEADS - 1) // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest causal rows first
    sequence, local, start, length, past = _tokens_of(tile, cu_ptr, lens_ptr, T, S, BQ, BLOCK_SIZE)
    row = tl.arange(0, BM)
    token = local * BQ + row // HEADS
    kv_head = tl.program_id(1) // GROUPS
    member = tl.program_id(1) % GROUPS * HEADS + row % HEADS
    ok = (token < length) & (member < G)
    head = kv_head * G + member
    t = (start + token).to(tl.int64)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    out_row = out_ptr + sequence.to(tl.int64) * out_batch + t * out_token + head * out_head
    out_ok = ok[:, None] & (dv < DV)[None, :]
    if local * BQ >= length:
        return
    if BLOCK_SIZE != 0:
        if sequence == S:  # padding
            if not SPLIT:
                tl.store(out_row[:, None] + dv[None, :], tl.zeros((BM, DVP), out_ptr.dtype.element_ty), mask=out_ok)
            return

    pos = tl.where(ok, past + token, -1)
    high = past + tl.minimum((local + 1) * BQ, length)
    low = 0
    if WINDOWED:
        low = tl.maximum(first_seen(past + local * BQ, window, CHUNKED), 0)
    first = low // KEYS * KEYS
    last = high
    if SPLIT:
        first = tl.maximum(first, tl.program_id(2) * CHUNK)
        last = tl.minimum(high, (tl.program_id(2) + 1) * CHUNK)
        if first >= last:
            return

    q_row = q_ptr + sequence.to(tl.int64) * q_batch + t * q_token + head * q_head
    q = tl.load(q_row[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    k_ptr, v_ptr, table_ptr = _keys_of(
        sequence, kv_head, k_ptr, v_ptr, table_ptr, k_block, k_head, v_block, v_head, table_row, BLOCK_SIZE
    )  # fmt: skip
    slope, bias_row = _biases(
        slopes_ptr, bias_ptr, sequence, t, head, ok, T, H, extent, BM, BLOCK_SIZE, ALIBI, RELATIVE
    )  # fmt: skip
    M = tl.full((BM,), -float("inf"), tl.float32)
    L = tl.zeros((BM,), tl.float32)
    O = tl.zeros((BM, DVP), tl.float32)
    m, l, o = M, tl.zeros((BM, 16), tl.float32), O
    # Blocks that every row of the tile sees completely; none with a window or a chunk.
    whole = first
    if not WINDOWED:
        whole = tl.maximum(first, tl.minimum(last, (past + local * BQ + 1) // KEYS * KEYS))
    for n in range(first, whole, KEYS):
        if not SPLIT:
            M, L, O, m, l, o = _close_chunk(M, L, O, m, l, o, n, c, CHUNK)
        m, l, o = _attend_block(
            q, m, l, o, n, low, high, pos, window, c, pre_scale, cap, slope, bias_row, extent,
            k_ptr, v_ptr, table_ptr, k_block, k_token, v_block, v_token,
            D, DV, DP, DVP, BLOCK_SIZE, WINDOWED, CHUNKED, NEEDS_SCORES, CAPPED, ALIBI, RELATIVE, False,
        )  # fmt: skip
    for n in tl.range(whole, last, KEYS, num_stages=None if WINDOWED else 1):  # one or two blocks unless WINDOWED
        if not SPLIT:
            M, L, O, m, l, o = _close_chunk(M, L, O, m, l, o, n, c, CHUNK)
        m, l, o = _attend_block(
            q, m, l, o, n, low, high, pos, window, c, pre_scale, cap, slope, bias_row, extent,
            k_ptr, v_ptr, table_ptr, k_block, k_token, v_block, v_token,
            D, DV, DP, DVP, BLOCK_SIZE, WINDOWED, CHUNKED, NEEDS_SCORES, CAPPED, ALIBI, RELATIVE, True,
        )  # fmt: skip
    l_row = tl.max(l, 1)  # all columns are equal
    if SPLIT:
        partial = (t * H + head) * chunks + tl.program_id(2)
        _store_partial(out_ptr, max_and_sum_ptr, partial, m, l_row, o, dv, ok, out_ok, DV)
    else:
        M, L, O = merged(M, L, O, m, l_row, o, c)
        if SINKS:
            L = join_sink(M, L, tl.load(sinks_ptr + head, mask=ok, other=0.0).to(tl.float32), pre_scale, NEEDS_SCORES)
        tl.store(out_row[:, None] + dv[None, :], quotient(O, L, out_ptr.dtype.element_ty), mask=out_ok)
