"""Causal attention kernels in the KV order: chunks of keys at absolute positions, blocks of 64 keys inside a chunk.

Legend: T tokens, S sequences, H query heads, G query heads of one KV head, D and DV head dims (DP, DVP: the next
powers of two), BM rows of a tile, BQ tokens of a tile, c: what a score is multiplied by inside exp2.

The scores of SCALED rows: see attention_scores.

A tile's rows are BQ tokens x HEADS query heads of one KV head. Per chunk a row has a maximum m, a sum l and an output
o; chunks meet ascending. Sums over keys go through ``tl.dot`` (with columns of ones for l): ``tl.sum`` would take an
order that depends on how many warps share a row. In float32 each block has sums of its own, which join those before by
one fma: a chain through a whole chunk lost twice as much as they do. A block in which a row sees no key leaves its bits
alone, so that tiles may skip it or not. A row that sees a value that is not finite gets NaN in that column; a row that
does not see it gets none of it, though both share a tile. A sink joins a row last, after its last chunk.
"""

import triton
import triton.language as tl

from detcompile.templates.attention.scores import join_sink, related, shaped
from detcompile.templates.device.dependent_launch import let_next_start, wait_for_earlier

__all__ = ["KEYS", "attention_kernel", "merge_kernel", "sequence_of", "write_kv_kernel"]

KEYS = tl.constexpr(64)  # keys of a block


@triton.jit
def _merge(M_R, L_R, O_RD, m_R, l_R, o_RD, c):
    """Running (M, L, O) and the next chunk's (m, l, o). Nothing seen yet is m = -inf, l = 0, o = 0."""
    top = tl.maximum(M_R, m_R)
    safe = tl.where(top == -float("inf"), 0.0, top)
    old = tl.exp2((M_R - safe) * c)
    new = tl.exp2((m_R - safe) * c)
    return top, L_R * old + l_R * new, O_RD * old[:, None] + o_RD * new[:, None]


@triton.jit
def _close_chunk(M_R, L_R, O_RD, m_R, l_RC, o_RD, n, c, CHUNK: tl.constexpr):
    """Before the first key n of a chunk: merges what the chunk before it left, and starts afresh."""
    if n % CHUNK == 0:
        M_R, L_R, O_RD = _merge(M_R, L_R, O_RD, m_R, tl.max(l_RC, 1), o_RD, c)
        m_R = tl.full(m_R.shape, -float("inf"), tl.float32)
        l_RC = tl.zeros(l_RC.shape, tl.float32)
        o_RD = tl.zeros(o_RD.shape, tl.float32)
    return M_R, L_R, O_RD, m_R, l_RC, o_RD


@triton.jit
def _quotient(O, L_R, dtype: tl.constexpr):
    """O * (1 / L) + 0.0, rounded: no negative zero, and for whatever was not finite one NaN of the narrow type (what a
    conversion makes of a NaN differs from kernel to kernel)."""
    inverse = tl.div_rn(tl.full(L_R.shape, 1.0, tl.float32), L_R)
    y = O * inverse[:, None] + 0.0
    return tl.where(tl.abs(y) < float("inf"), y.to(dtype), tl.full(y.shape, float("nan"), dtype))


@triton.jit
def sequence_of(index, cu_ptr, S, BQ: tl.constexpr, PER_SEQUENCE: tl.constexpr):
    """Largest s in 0..S with cu[s] // BQ + s * PER_SEQUENCE <= index. Sequence S is the padding past cu[S].

    With PER_SEQUENCE = 1 index counts tiles (each sequence may end inside one), with BQ = 1 and 0 it is a token.
    """
    low = 0
    high = S + 1
    while high - low > 1:  # 32 places at once: loads that wait for each other are what takes the time
        step = (high - low + 31) // 32
        place = low + (1 + tl.arange(0, 32)) * step
        before = tl.load(cu_ptr + place, mask=place < high, other=0) // BQ + place * PER_SEQUENCE <= index
        low += tl.sum(((place < high) & before).to(tl.int32), 0) * step
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def _first_seen(pos, window, CHUNKED: tl.constexpr):
    """The first key that a query at pos sees: of the chunk of `window` tokens that pos lies in, or the window before
    it, which may start below 0."""
    if CHUNKED:
        first = pos // window * window
    else:
        first = pos - window + 1
    return first


@triton.jit
def _attend_block(
    q, m, l, o, n, low, high, pos, window, c, inner, cap, slope, bias_row, extent,
    k_ptr, v_ptr, table_ptr, k_page, k_token, v_page, v_token,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr,
    RELATIVE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys n..n+63, all of them visible to every row unless PARTIAL.

    Keys outside low..high are read as zeros: their slots may hold NaN. In a partial block p = 0 meets values that
    their row must not see: values that are not finite are taken out of the product, and put into the rows that see
    them.
    """
    key = n + tl.arange(0, KEYS)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    live = key >= 0
    if PARTIAL:
        live = (key >= low) & (key < high)
    if PAGE == 0:
        k_row = key.to(tl.int64) * k_token
        v_row = key.to(tl.int64) * v_token
    else:
        page = tl.load(table_ptr + key // PAGE, mask=live, other=0).to(tl.int64)
        k_row = page * k_page + key % PAGE * k_token
        v_row = page * v_page + key % PAGE * v_token
    k_ok = (d < D)[:, None]
    v_ok = (dv < DV)[None, :]
    if PARTIAL:
        k_ok = k_ok & live[None, :]
        v_ok = v_ok & live[:, None]
    k = tl.load(k_ptr + k_row[None, :] + d[:, None], mask=k_ok, other=0.0)
    s = tl.dot(q, k, input_precision="ieee")
    if SCALED:
        s = shaped(s, key, pos, inner, cap, slope, CAPPED, ALIBI)
    if RELATIVE:
        s = related(s, key, pos, bias_row, extent)
    if PARTIAL:
        visible = key[None, :] <= pos[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] >= _first_seen(pos, window, CHUNKED)[:, None])
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
        strange = tl.where(finite, 0.0, 1.0).to(v.dtype)
        v = tl.where(finite, v, 0.0).to(v.dtype)
        seen = tl.dot(tl.where(visible, 1.0, 0.0).to(v.dtype), strange, input_precision="ieee")
        o = tl.where(seen > 0.0, float("nan"), o)
    ones = tl.full((KEYS, 16), 1.0, v.dtype)
    if v.dtype == tl.float32:
        o = tl.fma(o, alpha[:, None], tl.dot(p, v, input_precision="ieee"))
        l = tl.fma(l, alpha[:, None], tl.dot(p, ones, input_precision="ieee"))
    else:
        o = tl.dot(p, v, o, input_precision="ieee")
        l = tl.dot(p, ones, l * alpha[:, None], input_precision="ieee")
    return top, l, o


@triton.jit(do_not_specialize=["T", "S", "chunks"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stat_ptr, cu_ptr, lens_ptr, table_ptr, sinks_ptr, slopes_ptr, bias_ptr, c, inner, cap,
    window, extent, T, S, H, chunks,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_batch, out_token, out_head,
    table_row,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, ALIBI: tl.constexpr, RELATIVE: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of tokens, axis 1: KV heads x groups of HEADS, axis 2: chunks if SPLIT.

    PAGE = 0: dense, S batches of T tokens; k_page and v_page are the batch strides. SPLIT: out [T, H, chunks, DV] and
    stat [T, H, chunks, 2] take the chunk's o and (m, l), fp32. sinks and slopes [H], read where SINKS and ALIBI.
    bias: [batch or 1, T, H, extent], read where RELATIVE.
    WINDOWED: a query sees the `window` tokens up to its own; CHUNKED too: those of the chunk of `window` tokens.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    BQ: tl.constexpr = BM // HEADS
    GROUPS: tl.constexpr = (G + HEADS - 1) // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest causal rows first
    if PAGE == 0:
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
    if PAGE != 0:
        if sequence == S:  # padding
            if not SPLIT:
                tl.store(out_row[:, None] + dv[None, :], tl.zeros((BM, DVP), out_ptr.dtype.element_ty), mask=out_ok)
            return

    pos = tl.where(ok, past + token, -1)
    high = past + tl.minimum((local + 1) * BQ, length)
    low = 0
    if WINDOWED:
        low = tl.maximum(_first_seen(past + local * BQ, window, CHUNKED), 0)
    first = low // KEYS * KEYS
    last = high
    if SPLIT:
        first = tl.maximum(first, tl.program_id(2) * CHUNK)
        last = tl.minimum(high, (tl.program_id(2) + 1) * CHUNK)
        if first >= last:
            return

    q_row = q_ptr + sequence.to(tl.int64) * q_batch + t * q_token + head * q_head
    q = tl.load(q_row[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    k_ptr += kv_head.to(tl.int64) * k_head
    v_ptr += kv_head.to(tl.int64) * v_head
    if PAGE == 0:
        k_ptr += sequence.to(tl.int64) * k_page
        v_ptr += sequence.to(tl.int64) * v_page
    else:
        table_ptr += sequence.to(tl.int64) * table_row
    slope = tl.zeros((BM,), tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=ok, other=0.0).to(tl.float32)
    bias_row = bias_ptr + tl.zeros((BM,), tl.int64)
    if RELATIVE:
        place = t
        if PAGE == 0:
            place += sequence.to(tl.int64) * T
        bias_row += (place * H + head) * extent
    M = tl.full((BM,), -float("inf"), tl.float32)
    L = tl.zeros((BM,), tl.float32)
    O = tl.zeros((BM, DVP), tl.float32)
    m, l, o = M, tl.zeros((BM, 16), tl.float32), O
    # Blocks that every row of the tile sees whole; with a window or a chunk, none is known to be.
    whole = first
    if not WINDOWED:
        whole = tl.maximum(first, tl.minimum(last, (past + local * BQ + 1) // KEYS * KEYS))
    for n in range(first, whole, KEYS):
        if not SPLIT:
            M, L, O, m, l, o = _close_chunk(M, L, O, m, l, o, n, c, CHUNK)
        m, l, o = _attend_block(
            q, m, l, o, n, low, high, pos, window, c, inner, cap, slope, bias_row, extent,
            k_ptr, v_ptr, table_ptr, k_page, k_token, v_page, v_token,
            D, DV, DP, DVP, PAGE, WINDOWED, CHUNKED, SCALED, CAPPED, ALIBI, RELATIVE, False,
        )  # fmt: skip
    for n in tl.range(whole, last, KEYS, num_stages=None if WINDOWED else 1):  # else one or two blocks
        if not SPLIT:
            M, L, O, m, l, o = _close_chunk(M, L, O, m, l, o, n, c, CHUNK)
        m, l, o = _attend_block(
            q, m, l, o, n, low, high, pos, window, c, inner, cap, slope, bias_row, extent,
            k_ptr, v_ptr, table_ptr, k_page, k_token, v_page, v_token,
            D, DV, DP, DVP, PAGE, WINDOWED, CHUNKED, SCALED, CAPPED, ALIBI, RELATIVE, True,
        )  # fmt: skip
    l_row = tl.max(l, 1)  # its columns are equal
    if SPLIT:
        partial = (t * H + head) * chunks + tl.program_id(2)
        tl.store(stat_ptr + partial * 2, m, mask=ok)
        tl.store(stat_ptr + partial * 2 + 1, l_row, mask=ok)
        tl.store(out_ptr + partial[:, None] * DV + dv[None, :], o, mask=out_ok)
    else:
        M, L, O = _merge(M, L, O, m, l_row, o, c)
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=ok, other=0.0).to(tl.float32)
            L = join_sink(M, L, sink, inner, SCALED)
        tl.store(out_row[:, None] + dv[None, :], _quotient(O, L, out_ptr.dtype.element_ty), mask=out_ok)


@triton.jit
def _partial(part_ptr, stat_ptr, partial, chunk, last, dv, DV: tl.constexpr):
    """(m, l, o) that a chunk left; past the last chunk what merges without a trace."""
    ok = chunk <= last + tl.zeros((1,), tl.int32)
    m = tl.load(stat_ptr + (partial + chunk) * 2 + tl.arange(0, 1), mask=ok, other=-float("inf"))
    l = tl.load(stat_ptr + (partial + chunk) * 2 + 1 + tl.arange(0, 1), mask=ok, other=0.0)
    o = tl.load(part_ptr + (partial + chunk) * DV + dv[None, :], mask=ok[:, None] & (dv < DV)[None, :], other=0.0)
    return m, l, o


@triton.jit(do_not_specialize=["S", "chunks"])
def merge_kernel(
    part_ptr, stat_ptr, out_ptr, cu_ptr, lens_ptr, sinks_ptr, c, inner, window, S, chunks, out_token, out_head,
    DV: tl.constexpr, DVP: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    SCALED: tl.constexpr, SINKS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chunk partials of one token (axis 0) and head (axis 1), ascending. Only chunks that the row sees were written."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    t = tl.program_id(0)
    head = tl.program_id(1)
    dv = tl.arange(0, DVP)
    sequence = sequence_of(t, cu_ptr, S, 1, 0)
    out_row = out_ptr + t.to(tl.int64) * out_token + head * out_head
    if sequence == S:
        tl.store(out_row + dv, tl.zeros((DVP,), out_ptr.dtype.element_ty), mask=dv < DV)
        return
    pos = tl.load(lens_ptr + sequence) - tl.load(cu_ptr + sequence + 1) + t
    first = 0
    if WINDOWED:
        first = tl.maximum(_first_seen(pos, window, CHUNKED), 0) // CHUNK
    partial = (t.to(tl.int64) * tl.num_programs(1) + head) * chunks
    M = tl.full((1,), -float("inf"), tl.float32)
    L = tl.zeros((1,), tl.float32)
    O = tl.zeros((1, DVP), tl.float32)
    one = tl.arange(0, 1)
    last = pos // CHUNK
    for chunk in range(first, last + 1, AHEAD):  # several at a time, so that their loads do not wait for each other
        for i in tl.static_range(AHEAD):
            m, l, o = _partial(part_ptr, stat_ptr, partial, chunk + i, last, dv, DV)
            M, L, O = _merge(M, L, O, m, l, o, c)
    if SINKS:
        sink = tl.load(sinks_ptr + head + one).to(tl.float32)
        L = join_sink(M, L, sink, inner, SCALED)
    tl.store(out_row + dv[None, :], _quotient(O, L, out_ptr.dtype.element_ty), mask=(dv < DV)[None, :])


@triton.jit(do_not_specialize=["T"])
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, T, k_token, k_head, v_token, v_head,
    k_page, k_slot, k_slot_head, v_page, v_slot, v_slot_head, COPIED: tl.constexpr,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr,
    DVP: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One slot a program, which takes the K and V rows of token ``slot's index % T``; a negative slot takes none."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < 0:
        return
    if COPIED:
        t = t % T
    h = tl.arange(0, HEADS_P)[:, None]
    d = tl.arange(0, DP)[None, :]
    dv = tl.arange(0, DVP)[None, :]
    page = slot // PAGE
    place = slot % PAGE
    k_ok = (h < HEADS) & (d < D)
    v_ok = (h < HEADS) & (dv < DV)
    k = tl.load(k_ptr + t * k_token + h * k_head + d, mask=k_ok)
    v = tl.load(v_ptr + t * v_token + h * v_head + dv, mask=v_ok)
    k_to = k_cache_ptr + page * k_page + place * k_slot + h * k_slot_head + d
    v_to = v_cache_ptr + page * v_page + place * v_slot + h * v_slot_head + dv
    tl.store(k_to, k.to(k_cache_ptr.dtype.element_ty), mask=k_ok)
    tl.store(v_to, v.to(v_cache_ptr.dtype.element_ty), mask=v_ok)
