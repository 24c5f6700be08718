"""Kernels of packed attention: log-sum-exp, dq over descending keys, dk and dv over ascending queries.

Legend: T tokens, S sequences, H query heads, G query heads of one KV head, D DV head dims (DP, DVP: the next powers of
two), BM queries and BN keys of a tile, c: the factor of a product, or of a shaped score, inside exp2.

No program adds to another's output. dq: a program has BM queries of a head and processes their keys downwards from its
own position, in blocks of 128 at absolute positions, each with its own accumulator. dk and dv: a program has BN keys of
a KV head and processes the queries of each of its heads upwards, in one chain; totals of earlier heads are loaded and
added to. Queries and keys that do not see each other add zeros, so tiles may start and end anywhere.
"""

import triton
import triton.language as tl

from detcompile.templates.attention.scores import first_seen, sequence_of, tanh
from detcompile.templates.device.primitives import LOG2_E
from detcompile.templates.rows.tile_sums import tile_total
from detcompile.templates.rows.tiles import CALLERS, load_rows, rows_at

KEY_BLOCK = tl.constexpr(128)  # orders.Keys.block
LSE_QUERIES = tl.constexpr(64)
LSE_KEYS = tl.constexpr(64)


@triton.jit
def _shaped(s, key, pos, pre_scale, cap, slope, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """Turn products into scores in natural units; also return the factor of a score's gradient, without the scale."""
    factor = 1.0
    s = s * pre_scale
    if CAPPED:
        bounded = tanh(s)
        s = cap * bounded
        factor = 1.0 - bounded * bounded
    if ALIBI:
        s = s + slope * (key - pos).to(tl.float32)
    return s, factor


@triton.jit
def _weights(
    s, dp, lse, delta, key, pos, window, c, pre_scale, cap, slope,
    NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """P and dS in fp32 of products s and dp; key, pos and the queries' values broadcast to them."""
    factor = 1.0
    if NEEDS_SCORES:
        s, factor = _shaped(s, key, pos, pre_scale, cap, slope, CAPPED, ALIBI)
    p = tl.exp2(s * c - lse * LOG2_E)
    if PARTIAL:
        seen = key <= pos
        if WINDOWED:
            seen = seen & (key >= first_seen(pos, window, CHUNKED))
        p = tl.where(seen, p, 0.0)
    ds = p * (dp - delta)
    if CAPPED:
        ds = ds * factor
    return p, ds


@triton.jit
def _rows(ptr, row, stride, column, row_ok, WIDTH: tl.constexpr):
    """Load [rows, columns], with zeros past the last row or column."""
    ok = row_ok[:, None]
    if column.shape[0] != WIDTH:
        ok = ok & (column < WIDTH)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=ok, other=0.0)


@triton.jit
def _tile_of(cu_ptr, S, T, BM: tl.constexpr, LAST_FIRST: tl.constexpr):
    """This program's sequence, the sequence's first token in the step and length, and the tile's first token in it.
    Sequence S is the padding."""
    tile = tl.program_id(0)
    if LAST_FIRST:  # queries at a sequence's end take the longest
        tile = tl.num_programs(0) - 1 - tile
    sequence = sequence_of(tile, cu_ptr, S, BM, 1)
    start = tl.load(cu_ptr + sequence)
    length = tl.load(cu_ptr + sequence + 1, mask=sequence < S, other=T) - start
    return sequence, start, length, (tile - (start // BM + sequence)) * BM


@triton.jit(do_not_specialize=["S"])
def lse_kernel(
    q_ptr, k_ptr, lse_ptr, cu_ptr, slopes_ptr, sinks_ptr, c, pre_scale, cap, window, S, H, q_token, q_head, k_token,
    k_head, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """lse [T, H], over keys in blocks at absolute positions; there is one schedule, because a row's sum depends on the
    layout."""
    _sequence, start, length, first = _tile_of(cu_ptr, S, 0, LSE_QUERIES, True)  # as if there were no padding
    if first >= length:
        return
    head = tl.program_id(1)
    pos, d = first + tl.arange(0, LSE_QUERIES), tl.arange(0, DP)
    ok = pos < length
    q = _rows(q_ptr + head * q_head + start.to(tl.int64) * q_token, pos, q_token, d, ok, D)
    k_ptr += (head // G) * k_head + start.to(tl.int64) * k_token
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head).to(tl.float32)
    low = 0
    if WINDOWED:
        low = tl.maximum(first_seen(first, window, CHUNKED), 0)
    m = tl.full((LSE_QUERIES,), -float("inf"), tl.float32)
    l = tl.zeros((LSE_QUERIES,), tl.float32)
    for n in range(low // LSE_KEYS * LSE_KEYS, tl.minimum(first + LSE_QUERIES, length), LSE_KEYS):
        key = n + tl.arange(0, LSE_KEYS)
        s = tl.dot(q, tl.trans(_rows(k_ptr, key, k_token, d, key < length, D)), input_precision="ieee")
        if NEEDS_SCORES:
            s, _ = _shaped(s, key[None, :], pos[:, None], pre_scale, cap, slope, CAPPED, ALIBI)
        s = s * c
        seen = key[None, :] <= pos[:, None]
        if WINDOWED:
            seen = seen & (key[None, :] >= first_seen(pos, window, CHUNKED)[:, None])
        s = tl.where(seen, s, -float("inf"))
        top = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(top == -float("inf"), 0.0, top)
        l = l * tl.exp2(m - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        m = top
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        l += tl.exp2(sink - m)
    lse = (m + tl.log2(l)) * 0.6931471805599453
    tl.store(lse_ptr + (start + pos).to(tl.int64) * H + head, lse, mask=ok)


@triton.jit
def _dq_block(
    dq, q, g, lse, delta, n, pos, length, window, c, pre_scale, cap, slope, k_ptr, v_ptr, k_token, v_token,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """dq plus the sum over keys n..n + 127, which is a separate chain."""
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    part = tl.zeros(dq.shape, tl.float32)
    for first in tl.static_range(0, KEY_BLOCK, BN):
        key = n + first + tl.arange(0, BN)
        k_ok = key < length
        k = _rows(k_ptr, key, k_token, d, k_ok, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(g, tl.trans(_rows(v_ptr, key, v_token, dv, k_ok, DV)), input_precision="ieee")
        _, ds = _weights(
            s, dp, lse[:, None], delta[:, None], key[None, :], pos[:, None], window, c, pre_scale, cap, slope,
            NEEDS_SCORES, CAPPED, ALIBI, WINDOWED, CHUNKED, PARTIAL,
        )  # fmt: skip
        part = tl.dot(ds.to(k.dtype), k, part, input_precision="ieee")
    return dq + part


@triton.jit(do_not_specialize=CALLERS)
def delta_kernel(
    g_ptr, out_ptr, delta_ptr, T, heads, outer, inner, TOKENS, H,
    R: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """delta [H, TOKENS]: sums of g * out over rows [TOKENS * H, R], in the Row order of their length."""
    row, column = rows_at(1, ROWS, W, FOLDS)
    g = load_rows(g_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, 1)
    out = load_rows(out_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, 1)
    total = tile_total(g * out, ROWS, LANES, VECTOR, SHUFFLE)
    tl.store(delta_ptr + (row % H).to(tl.int64) * TOKENS + row // H, total, mask=row < T)


@triton.jit(do_not_specialize=["T", "S"])
def dq_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, cu_ptr, slopes_ptr, dq_ptr, c, pre_scale, cap, scale, window, T, S,
    H, q_token, q_head, k_token, k_head, v_token, v_head,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of BM queries (BM divides 128); axis 1: heads. g [T, H, DV], dq [T, H, D], lse and delta [H, T] are
    contiguous."""
    sequence, start, length, first = _tile_of(cu_ptr, S, T, BM, True)
    if first >= length:
        return
    head = tl.program_id(1)
    pos, d, dv = first + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, DVP)
    ok, token = pos < length, start.to(tl.int64)
    out, out_ok = dq_ptr + ((token + pos) * H + head)[:, None] * D + d[None, :], ok[:, None] & (d < D)[None, :]
    if sequence == S:
        tl.store(out, tl.zeros((BM, DP), dq_ptr.dtype.element_ty), mask=out_ok)
        return
    q = _rows(q_ptr + head * q_head + token * q_token, pos, q_token, d, ok, D)
    g = _rows(g_ptr + (token * H + head) * DV, pos, H * DV, dv, ok, DV)
    of_head = head.to(tl.int64) * T + token
    lse = tl.load(lse_ptr + of_head + pos, mask=ok, other=0.0)
    delta = tl.load(delta_ptr + of_head + pos, mask=ok, other=0.0)
    k_ptr += (head // G) * k_head + token * k_token
    v_ptr += (head // G) * v_head + token * v_token
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head).to(tl.float32)
    low = 0
    if WINDOWED:
        low = tl.maximum(first_seen(first, window, CHUNKED), 0) // KEY_BLOCK * KEY_BLOCK
    diagonal = first // KEY_BLOCK * KEY_BLOCK  # the tile's block; without a window lower blocks are seen completely
    dq = tl.zeros((BM, DP), tl.float32)
    for back in range(0, (diagonal - low if WINDOWED else 0) + 1, KEY_BLOCK):
        dq = _dq_block(
            dq, q, g, lse, delta, diagonal - back, pos, length, window, c, pre_scale, cap, slope, k_ptr, v_ptr, k_token,
            v_token, D, DV, DP, DVP, BN, NEEDS_SCORES, CAPPED, ALIBI, WINDOWED, CHUNKED, True,
        )  # fmt: skip
    if not WINDOWED:
        for back in range(KEY_BLOCK, diagonal + 1, KEY_BLOCK):
            dq = _dq_block(
                dq, q, g, lse, delta, diagonal - back, pos, length, window, c, pre_scale, cap, slope, k_ptr,
                v_ptr, k_token, v_token, D, DV, DP, DVP, BN, NEEDS_SCORES, CAPPED, ALIBI, WINDOWED, CHUNKED, False,
            )  # fmt: skip
    tl.store(out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=out_ok)


@triton.jit
def _dkdv_block(
    dk, dv_sum, k, v, n, key, length, window, c, pre_scale, cap, slope, q_ptr, g_ptr, lse_ptr, delta_ptr, q_token, H,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
    NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add queries n..n + BM to dk and dv; queries past the sequence's end add zeros."""
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    pos = n + tl.arange(0, BM)
    ok = pos < length
    q = _rows(q_ptr, pos, q_token, d, ok, D)
    g = _rows(g_ptr, pos, H * DV, dv, ok, DV)
    lse = tl.load(lse_ptr + pos, mask=ok, other=0.0)
    delta = tl.load(delta_ptr + pos, mask=ok, other=0.0)
    s = tl.dot(k, tl.trans(q), input_precision="ieee")
    dp = tl.dot(v, tl.trans(g), input_precision="ieee")
    p, ds = _weights(
        s, dp, lse[None, :], delta[None, :], key[:, None], pos[None, :], window, c, pre_scale, cap, slope,
        NEEDS_SCORES, CAPPED, ALIBI, WINDOWED, CHUNKED, PARTIAL,
    )  # fmt: skip
    dv_sum = tl.dot(p.to(g.dtype), g, dv_sum, input_precision="ieee")
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv_sum


@triton.jit
def add_head(total_ptr, out_ptr, at, ok, value, scale, member, G: tl.constexpr):
    """Add a head to the total of earlier heads; after the last head, round the sum into out."""
    if G > 1:
        if member > 0:
            value = tl.load(total_ptr + at, mask=ok, other=0.0) + value
    if G == 1 or member == G - 1:  # a constant if G == 1: Gluon cannot compile a branch whose condition folds later
        tl.store(out_ptr + at, (value * scale).to(out_ptr.dtype.element_ty), mask=ok)
    else:
        tl.store(total_ptr + at, value, mask=ok)


@triton.jit(do_not_specialize=["T", "S"])
def dkdv_kernel(
    g_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, cu_ptr, slopes_ptr, dk_ptr, dv_ptr, dk_total_ptr, dv_total_ptr, c,
    pre_scale, cap, scale, window, T, S, H, q_token, q_head, k_token, k_head, v_token, v_head,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, NEEDS_SCORES: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of keys, axis 1: KV heads. dk and dv, and their fp32 totals if G > 1, are contiguous."""
    sequence, start, length, first = _tile_of(cu_ptr, S, T, BN, False)
    if first >= length:
        return
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    key, d, dv = first + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    ok, token = key < length, start.to(tl.int64)
    of_key = ((token + key) * kv_heads + kv_head)[:, None]
    dk_at, dk_ok = of_key * D + d[None, :], ok[:, None] & (d < D)[None, :]
    dv_at, dv_ok = of_key * DV + dv[None, :], ok[:, None] & (dv < DV)[None, :]
    if sequence == S:
        tl.store(dk_ptr + dk_at, tl.zeros((BN, DP), dk_ptr.dtype.element_ty), mask=dk_ok)
        tl.store(dv_ptr + dv_at, tl.zeros((BN, DVP), dv_ptr.dtype.element_ty), mask=dv_ok)
        return
    k = _rows(k_ptr + kv_head * k_head + token * k_token, key, k_token, d, ok, D)
    v = _rows(v_ptr + kv_head * v_head + token * v_token, key, v_token, dv, ok, DV)
    begin, end = first // BM * BM, length
    if WINDOWED:  # end at the last query that sees a key of the tile
        last = tl.minimum(first + BN, length) - 1
        end = tl.minimum(length, (last // window + 1) * window if CHUNKED else last + window)
    whole = end if WINDOWED else tl.minimum(end, tl.cdiv(first + BN, BM) * BM)  # from here queries see the whole tile
    for member in range(G):
        head = kv_head * G + member
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + head).to(tl.float32)
        q_row = q_ptr + head * q_head + token * q_token
        g_row = g_ptr + (token * H + head) * DV
        lse_row = lse_ptr + tl.cast(head, tl.int64) * T + token
        delta_row = delta_ptr + tl.cast(head, tl.int64) * T + token
        tl.debug_barrier()  # the totals of earlier heads are read below by other threads than wrote them
        dk_sum = tl.zeros((BN, DP), tl.float32)
        dv_sum = tl.zeros((BN, DVP), tl.float32)
        for n in range(begin, whole, BM):
            dk_sum, dv_sum = _dkdv_block(
                dk_sum, dv_sum, k, v, n, key, length, window, c, pre_scale, cap, slope, q_row, g_row, lse_row,
                delta_row, q_token, H, D, DV, DP, DVP, BM, NEEDS_SCORES, CAPPED, ALIBI, WINDOWED, CHUNKED, True,
            )  # fmt: skip
        for n in range(whole, end, BM):
            dk_sum, dv_sum = _dkdv_block(
                dk_sum, dv_sum, k, v, n, key, length, window, c, pre_scale, cap, slope, q_row, g_row, lse_row,
                delta_row, q_token, H, D, DV, DP, DVP, BM, NEEDS_SCORES, CAPPED, ALIBI, WINDOWED, CHUNKED, False,
            )  # fmt: skip
        add_head(dk_total_ptr, dk_ptr, dk_at, dk_ok, dk_sum, scale, member, G)
        add_head(dv_total_ptr, dv_ptr, dv_at, dv_ok, dv_sum, 1.0, member, G)
