"""What a warpgroup of hopper.py does with its tile: the order of kernels.py, block by block.

Legend: as in hopper.py. S_L, O_L and L_L are the register layouts of scores, outputs and sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # per block
LANES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SUMS = gl.constexpr(8)  # columns of ones: the minimum of a warpgroup MMA


@gluon.jit
def attend_tile(
    W: gl.constexpr, ring, q_tiles, totals, ones, pointers, first, last, shift, place, c, window, H, chunks, strides,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, CHUNK: gl.constexpr, WINDOWED: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend 64 rows over the keys first..last; base is their first token in the sequence's part of the step."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    L_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_L)
    BQ: gl.constexpr = 64 // HEADS
    q_ptr, out_ptr, max_and_sum_ptr = pointers
    sequence, start, past, length, base, kv_head, member0, split_chunk = place
    q_batch, q_token, q_head, out_batch, out_token, out_head = strides

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LANES))
    member = member0 + row % HEADS
    token = base + row // HEADS
    at = sequence.to(gl.int64) * q_batch + (start + token).to(gl.int64) * q_token + (kv_head * G + member) * q_head
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, LANES))
    inside = (token < length) & (member < G)
    scratch = q_tiles.index(W)
    scratch.store(gl.load(q_ptr + at[:, None] + dim[None, :], mask=inside[:, None], other=0.0))
    q = scratch.load(gl.DotOperandLayout(0, S_L, 2))

    row = gl.arange(0, 64, layout=ROW)
    token = base + row // HEADS
    inside = (token < length) & (member0 + row % HEADS < G)
    pos = gl.where(inside, past + token, -1)
    # Every row sees blocks lower..whole completely.
    whole = (past + base + 1) // KEYS * KEYS
    lower = 0
    if WINDOWED:
        lower = (past + base + BQ - window + KEYS - 1) // KEYS * KEYS
        whole = gl.maximum(whole, lower)

    M = gl.full([64], -float("inf"), gl.float32, ROW)
    L = gl.zeros([64], gl.float32, ROW)
    m = M
    l = gl.zeros([64, SUMS], gl.float32, L_L)
    o = gl.zeros([64, D], gl.float32, O_L)
    total = totals.index(W)
    if WINDOWED:
        M, L, m, l, o = _attend_blocks(
            first, gl.minimum(last, lower), first, shift, ring, q, scratch, total, ones, M, L, m, l, o, pos, window, c,
            D, CHUNK, STAGES, WINDOWED, SPLIT, S_L, O_L, L_L,
        )  # fmt: skip
    M, L, m, l, o = _attend_whole_blocks(
        gl.maximum(first, lower), gl.minimum(last, whole), first, shift, ring, q, total, ones, M, L, m, l, o, c,
        D, CHUNK, STAGES, SPLIT, S_L, O_L, L_L,
    )  # fmt: skip
    M, L, m, l, o = _attend_blocks(
        gl.maximum(first, whole), last, first, shift, ring, q, scratch, total, ones, M, L, m, l, o, pos, window, c,
        D, CHUNK, STAGES, WINDOWED, SPLIT, S_L, O_L, L_L,
    )  # fmt: skip
    l_row = gl.convert_layout(gl.max(l, 1), ROW)  # all columns are equal

    row = gl.arange(0, 64, layout=O_ROW)
    member = member0 + row % HEADS
    token = base + row // HEADS
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, O_L))
    t = (start + token).to(gl.int64)
    out_ok = (token < length) & (member < G)
    if SPLIT:
        partial = (t * H + kv_head * G + member) * chunks + split_chunk
        max_and_sum = max_and_sum_ptr + gl.convert_layout(partial, ROW) * 2
        gl.store(max_and_sum, m, mask=inside & (last > first))
        gl.store(max_and_sum + 1, l_row, mask=inside & (last > first))
        gl.store(out_ptr + partial[:, None] * D + dim[None, :], o, mask=(out_ok & (last > first))[:, None])
    else:
        O = o
        if (last - 1) // CHUNK > first // CHUNK:
            M, L, O = _merge(M, L, total.load(O_L), m, l_row, o, c, O_ROW)
        else:
            L = l_row  # of one chunk
        # merge.quotient. Padding (no sequence, length 0) gets zeros; a token whose weights are all zero does not.
        inverse = gl.where(pos < 0, 0.0, gl.div_rn(gl.full([64], 1.0, gl.float32, ROW), L))
        y = O * gl.convert_layout(inverse, O_ROW)[:, None] + 0.0
        narrow = y.to(out_ptr.dtype.element_ty)
        narrow = gl.where(gl.abs(y) < float("inf"), narrow, gl.full([64, D], float("nan"), narrow.dtype, O_L))
        at = sequence.to(gl.int64) * out_batch + t * out_token + (kv_head * G + member) * out_head
        gl.store(out_ptr + at[:, None] + dim[None, :], narrow, mask=out_ok[:, None])


@gluon.jit
def _merge(M, L, O, m, l, o, c, O_ROWS: gl.constexpr):
    """merge.merged."""
    top = gl.maximum(M, m)
    safe = gl.where(top == -float("inf"), 0.0, top)
    old = gl.exp2((M - safe) * c)
    new = gl.exp2((m - safe) * c)
    O = O * gl.convert_layout(old, O_ROWS)[:, None] + o * gl.convert_layout(new, O_ROWS)[:, None]
    return top, L * old + l * new, O


@gluon.jit
def _add_values(p, visible, o, v_tile, scratch, D: gl.constexpr, O_L: gl.constexpr):
    """o + p @ v. Values that a row does not see add nothing; nonfinite values that it sees give NaN."""
    finite = gl.abs(v_tile.load(LANES).to(gl.float32)) < float("inf")
    if gl.max(gl.max(gl.where(finite, 0, 1), 1), 0) > 0:
        v = v_tile.load(LANES)  # loaded again: this is rare, so no registers are held for it
        finite = gl.abs(v.to(gl.float32)) < float("inf")
        scratch.store(gl.where(finite, 0.0, 1.0).to(v.dtype))
        fence_async_shared()
        sees = gl.convert_layout(gl.where(visible, 1.0, 0.0).to(v.dtype), gl.DotOperandLayout(0, O_L, 2))
        seen = warpgroup_mma(sees, scratch, gl.zeros([64, D], gl.float32, O_L), is_async=True)
        seen = warpgroup_mma_wait(0, deps=(seen,))
        scratch.store(gl.where(finite, v, 0.0).to(v.dtype))
        fence_async_shared()
        o = gl.where(seen > 0.0, float("nan"), o)
        o = warpgroup_mma(p, scratch, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    else:
        o = warpgroup_mma(p, v_tile, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    fence_async_shared()  # v was read by ordinary loads; the copy engine writes the next block
    return o


@gluon.jit
def _scores(q, k_tile, S_L: gl.constexpr):
    """Start the product for one block's scores, [64, 64]."""
    s = gl.zeros([64, 64], gl.float32, S_L)
    return warpgroup_mma(q, k_tile.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _weights(s, m, c):
    """Weights of a block, the new maximum, and the scale of the sums under m."""
    top = gl.maximum(m, gl.max(s, 1))
    safe = gl.where(top == -float("inf"), 0.0, top)
    return gl.exp2((s - safe[:, None]) * c), top, gl.exp2((m - safe) * c)


@gluon.jit
def _scaled(o, l, alpha, O_L: gl.constexpr, L_L: gl.constexpr):
    """Rescale the sums from the previous maximum to the new one."""
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_L))[:, None]
    return o, l * gl.convert_layout(alpha, gl.SliceLayout(1, L_L))[:, None]


@gluon.jit
def _close_chunk(
    n, first, total, M, L, m, l, o, c, D: gl.constexpr, CHUNK: gl.constexpr, O_L: gl.constexpr, L_L: gl.constexpr,
):  # fmt: skip
    """kernels._close_chunk, with the merged chunks' o in shared memory; the first chunk is stored unmerged."""
    if (n % CHUNK == 0) & (n > first):
        l_row = gl.convert_layout(gl.max(l, 1), m.type.layout)
        if n - CHUNK > first:
            M, L, o = _merge(M, L, total.load(O_L), m, l_row, o, c, gl.SliceLayout(1, O_L))
        else:
            M = m
            L = l_row
        total.store(o)
        m = gl.full([64], -float("inf"), gl.float32, m.type.layout)
        l = gl.zeros([64, SUMS], gl.float32, L_L)
        o = gl.zeros([64, D], gl.float32, O_L)
    return M, L, m, l, o


@gluon.jit
def _attend_whole_blocks(
    begin, end, first, shift, ring, q, total, ones, M, L, m, l, o, c,
    D: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, S_L: gl.constexpr,
    O_L: gl.constexpr, L_L: gl.constexpr,
):  # fmt: skip
    """_attend_blocks for blocks that every row sees completely: the tensor cores compute the next block's scores
    together with this block's values, while the next block's weights are computed."""
    k_tiles, v_tiles, k_full, v_full, k_free, v_free = ring
    P_O: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    P_L: gl.constexpr = gl.DotOperandLayout(0, L_L, 2)
    if begin < end:
        i = begin // KEYS + shift
        mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=(_scores(q, k_tiles.index(i % STAGES), S_L),))
        mbarrier.arrive(k_free.index(i % STAGES), count=1)
        if not SPLIT:
            M, L, m, l, o = _close_chunk(begin, first, total, M, L, m, l, o, c, D, CHUNK, O_L, L_L)
        p, m, alpha = _weights(s, m, c)
        o, l = _scaled(o, l, alpha, O_L, L_L)
        p = p.to(q.dtype)
        mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=begin + KEYS < end)
        for n in range(begin + KEYS, end, KEYS):
            stage = i % STAGES
            phase = (i // STAGES) & 1
            i += 1
            s = _scores(q, k_tiles.index(i % STAGES), S_L)
            mbarrier.wait(v_full.index(stage), phase)
            o = warpgroup_mma(gl.convert_layout(p, P_O), v_tiles.index(stage), o, is_async=True)
            l = warpgroup_mma(gl.convert_layout(p, P_L), ones, l, is_async=True)
            s = warpgroup_mma_wait(2, deps=(s,))
            mbarrier.arrive(k_free.index(i % STAGES), count=1)
            m_chunk = m
            if not SPLIT:
                m_chunk = gl.where(n % CHUNK == 0, -float("inf"), m)
            p, top, alpha = _weights(s, m_chunk, c)
            # This wait is here because it is a branch: without one, ptxas moves the wait for the values' product
            # below up to the wait for the scores, and the tensor cores idle while the weights are computed.
            mbarrier.wait(k_full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=n + KEYS < end)
            o, l = warpgroup_mma_wait(0, deps=(o, l))
            mbarrier.arrive(v_free.index(stage), count=1)
            if not SPLIT:
                M, L, m, l, o = _close_chunk(n, first, total, M, L, m, l, o, c, D, CHUNK, O_L, L_L)
            m = top
            o, l = _scaled(o, l, alpha, O_L, L_L)
            p = p.to(q.dtype)
        mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
        o = warpgroup_mma(gl.convert_layout(p, P_O), v_tiles.index(i % STAGES), o, is_async=True)
        l = warpgroup_mma(gl.convert_layout(p, P_L), ones, l, is_async=True)
        o, l = warpgroup_mma_wait(0, deps=(o, l))
        mbarrier.arrive(v_free.index(i % STAGES), count=1)
    return M, L, m, l, o


@gluon.jit
def _attend_blocks(
    begin, end, first, shift, ring, q, scratch, total, ones, M, L, m, l, o, pos, window, c,
    D: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, SPLIT: gl.constexpr,
    S_L: gl.constexpr, O_L: gl.constexpr, L_L: gl.constexpr,
):  # fmt: skip
    """kernels._attend_block over the blocks begin..end: block n is the (n // 64 + shift)th in the ring."""
    k_tiles, v_tiles, k_full, v_full, k_free, v_free = ring
    for n in range(begin, end, KEYS):
        if not SPLIT:
            M, L, m, l, o = _close_chunk(n, first, total, M, L, m, l, o, c, D, CHUNK, O_L, L_L)
        i = n // KEYS + shift
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma_wait(0, deps=(_scores(q, k_tiles.index(stage), S_L),))
        mbarrier.arrive(k_free.index(stage), count=1)
        key = n + gl.arange(0, 64, layout=gl.SliceLayout(0, S_L))
        visible = key[None, :] <= pos[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] > pos[:, None] - window)
        s = gl.where(visible, s, -float("inf"))
        p, m, alpha = _weights(s, m, c)
        o, l = _scaled(o, l, alpha, O_L, L_L)
        p = p.to(q.dtype)
        p_o = gl.convert_layout(p, gl.DotOperandLayout(0, O_L, 2))
        p_l = gl.convert_layout(p, gl.DotOperandLayout(0, L_L, 2))
        mbarrier.wait(v_full.index(stage), phase)
        o = _add_values(p_o, visible, o, v_tiles.index(stage), scratch, D, O_L)
        l = warpgroup_mma(p_l, ones, l, is_async=True)
        l = warpgroup_mma_wait(0, deps=(l,))
        mbarrier.arrive(v_free.index(stage), count=1)
    return M, L, m, l, o
