"""What a program of hopper_decode.py does with its columns: the order of kernels.py, block by block.

Legend: as in hopper_decode.py. S_L is the register layout of scores, outputs and sums.

A block is a chain of waits: scores, their maximum over four warps, weights, outputs. The tensor cores compute the next
block's scores together with this block's values, while the next block's weights are computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from detcompile.templates.attention.hopper_blocks import copy_tile, row_of
from detcompile.templates.attention.hopper_tile import KEYS, LANES
from detcompile.templates.device.primitives import barrier

# [4 warps, 8 columns], a column's four values in one thread: one exchange through shared memory gives their maximum.
_ALL_WARPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [2, 0]],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[4, 8],
    )
)


@gluon.jit
def attend_columns(
    ring, q_tile, p_tiles, table, following, column, pos, first, last, lower, c, window,
    D: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK: gl.constexpr, WINDOWED: gl.constexpr, SPLIT: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """Attend keys first..last of a token at pos, which sees all keys of blocks >= lower up to pos.

    The copies of the first STAGES blocks are in flight; following: rows of the next block. A block's keys are replaced
    as soon as its scores are done, so keys run ahead of values, and for the last block only the values' product is left
    when they arrive.

    Returns the operands of merge.merged: (M, L, O) of all chunks but the last and (m, l, o) of the last, with l
    repeated in 64 rows.
    """
    ROW: gl.constexpr = gl.SliceLayout(0, S_L)
    BYTES: gl.constexpr = 64 * D * 2
    k_desc, v_desc, k_tiles, v_tiles, k_full, v_full = ring
    M = gl.full([BM], -float("inf"), gl.float32, ROW)
    L = gl.zeros([BM], gl.float32, ROW)
    O = gl.zeros([D, BM], gl.float32, S_L)
    l = gl.zeros([64, BM], gl.float32, S_L)
    o = O
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_scores(k_tiles.index(0), q_tile, BM, S_L),))
    more = first + STAGES * KEYS < last
    mbarrier.expect(k_full.index(0), BYTES, pred=more)
    barrier()
    copy_block(k_desc, following, column, k_full.index(0), k_tiles.index(0), more, BLOCK_SIZE, D)
    p, m, _ = _weights(s, M, first, pos, window, c, WINDOWED, S_L)
    p_tiles.index(0).permute((1, 0)).store(p.to(k_desc.dtype))
    fence_async_shared()
    barrier()
    for n in range(first, last - KEYS, KEYS):
        block = (n - first) // KEYS
        stage = block % STAGES
        ahead = (block + 1) % STAGES
        v_rows = following
        following = piece_rows(table, n + (STAGES + 1) * KEYS, last, BLOCK_SIZE)
        more_k = n + (STAGES + 1) * KEYS < last
        more_v = n + STAGES * KEYS < last
        mbarrier.wait(k_full.index(ahead), ((block + 1) // STAGES) & 1)
        s = _scores(k_tiles.index(ahead), q_tile, BM, S_L)
        p_tile = p_tiles.index(block % 2).permute((1, 0))
        l = _sums(p_tile, l, k_desc.dtype, S_L)
        mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
        nonfinite = gl.zeros([D, BM], gl.float32, S_L)
        if WINDOWED:
            if n < lower:
                visible = _visible(n, pos, window, WINDOWED, S_L)
                nonfinite = _zero_nonfinite(v_tiles.index(stage), p_tiles.index((block + 1) % 2), visible, D, BM, S_L)
        o = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), p_tile, o, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s,))
        # The phases that begin here end with copies, which come after barriers: no warp can still be waiting for the
        # previous phases above.
        mbarrier.expect(k_full.index(ahead), BYTES, pred=more_k)
        mbarrier.expect(v_full.index(stage), BYTES, pred=more_v)
        barrier()
        copy_block(k_desc, following, column, k_full.index(ahead), k_tiles.index(ahead), more_k, BLOCK_SIZE, D)
        m_chunk = m
        if not SPLIT:
            m_chunk = gl.where((n + KEYS) % CHUNK == 0, -float("inf"), m)
        p, top, alpha = _weights(s, m_chunk, n + KEYS, pos, window, c, WINDOWED, S_L)
        p_tiles.index((block + 1) % 2).permute((1, 0)).store(p.to(k_desc.dtype))
        o, l = warpgroup_mma_wait(0, deps=(o, l))
        fence_async_shared()  # not before the wait, which crashes ptxas 12.8
        barrier()
        copy_block(v_desc, v_rows, column, v_full.index(stage), v_tiles.index(stage), more_v, BLOCK_SIZE, D)
        if WINDOWED:
            o = gl.where(nonfinite > 0.0, float("nan"), o)
        if not SPLIT:
            if (n + KEYS) % CHUNK == 0:
                M, L, O = merge_columns(M, L, O, m, gl.max(l, 0), o, c)
                l = gl.zeros([64, BM], gl.float32, S_L)
                o = gl.zeros([D, BM], gl.float32, S_L)
        m = top
        o = o * alpha[None, :]
        l = l * alpha[None, :]
    block = (last - first - 1) // KEYS
    n = first + block * KEYS
    stage = block % STAGES
    p_tile = p_tiles.index(block % 2).permute((1, 0))
    l = _sums(p_tile, l, k_desc.dtype, S_L)
    mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
    nonfinite = gl.zeros([D, BM], gl.float32, S_L)
    if (n + KEYS > pos + 1) | (n < lower):
        visible = _visible(n, pos, window, WINDOWED, S_L)
        nonfinite = _zero_nonfinite(v_tiles.index(stage), p_tiles.index((block + 1) % 2), visible, D, BM, S_L)
    o = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), p_tile, o, is_async=True)
    o, l = warpgroup_mma_wait(0, deps=(o, l))
    o = gl.where(nonfinite > 0.0, float("nan"), o)
    return M, L, O, m, l, o


@gluon.jit
def piece_rows(table, n, last, BLOCK_SIZE: gl.constexpr):
    """Rows where the pieces of the block at key n start, as many as copy_tile takes.

    table: the sequence's row of the block table and its width, the rows before the KV head in a cache block, and the
    rows per cache block. For keys past the last one any rows are returned.
    """
    PIECES: gl.constexpr = 4 if BLOCK_SIZE == 16 else 2 if BLOCK_SIZE == 32 else 1
    table_ptr, width, line, block_rows = table
    if PIECES == 1:
        r0 = line + gl.load(table_ptr + gl.minimum(n // BLOCK_SIZE, width - 1)) * block_rows + n % BLOCK_SIZE
    else:
        r0 = line + row_of(table_ptr, n, last, block_rows, BLOCK_SIZE, 0)
    r1 = r0
    r2 = r0
    r3 = r0
    if PIECES > 1:
        r1 = line + row_of(table_ptr, n, last, block_rows, BLOCK_SIZE, 1)
    if PIECES > 2:
        r2 = line + row_of(table_ptr, n, last, block_rows, BLOCK_SIZE, 2)
        r3 = line + row_of(table_ptr, n, last, block_rows, BLOCK_SIZE, 3)
    return r0, r1, r2, r3


@gluon.jit
def copy_block(desc, rows, column, full, tile, wanted, BLOCK_SIZE: gl.constexpr, D: gl.constexpr):
    """Copy a block into tile if wanted; `full` already expects the bytes.

    Cache blocks of 64 keys or more take one copy, with a descriptor of hopper_decode._whole_blocks. `wanted` is a
    predicate instead of a branch: the compiler would move the lookups of later keys behind a branch.
    """
    r0, r1, r2, r3 = rows
    if BLOCK_SIZE >= 64:
        block = tile._reinterpret(desc.dtype, [D // 64, 64, 64], desc.layout)
        tma.async_copy_global_to_shared(desc, [column // 64, r0, 0], full, block, pred=wanted)
    else:
        copy_tile(desc, r0, r1, r2, r3, column, full, tile, wanted, D, 4 if BLOCK_SIZE == 16 else 2)


@gluon.jit
def _scores(k_tile, q_tile, BM: gl.constexpr, S_L: gl.constexpr):
    """Start the product for one block's scores, [64, BM]."""
    s = gl.zeros([64, BM], gl.float32, S_L)
    return warpgroup_mma(k_tile, q_tile.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _sums(p_tile, l, dtype: gl.constexpr, S_L: gl.constexpr):
    """Start adding the sums of a block's weights to l."""
    ones = gl.full([64, 64], 1.0, dtype, gl.DotOperandLayout(0, S_L, 2))
    return warpgroup_mma(ones, p_tile, l, is_async=True)


@gluon.jit
def _visible(n, pos, window, WINDOWED: gl.constexpr, S_L: gl.constexpr):
    """Which of the 64 keys from n on the token at pos sees."""
    key = n + gl.arange(0, 64, layout=gl.SliceLayout(1, S_L))
    visible = key <= pos
    if WINDOWED:
        visible = visible & (key > pos - window)
    return visible


@gluon.jit
def _weights(s, m, n, pos, window, c, WINDOWED: gl.constexpr, S_L: gl.constexpr):
    """Weights of the block at key n, the new maximum, and the scale of the sums under m."""
    s = gl.where(_visible(n, pos, window, WINDOWED, S_L)[:, None], s, -float("inf"))
    of_warps = gl.convert_layout(gl.max(s.reshape([4, 16, s.shape[1]]), 1), _ALL_WARPS)
    top = gl.maximum(m, gl.convert_layout(gl.max(of_warps, 0), m.type.layout))
    safe = gl.where(top == -float("inf"), 0.0, top)
    return gl.exp2((s - safe[None, :]) * c), top, gl.exp2((m - safe) * c)


@gluon.jit
def merge_columns(M, L, O, m, l, o, c):
    """merge.merged."""
    top = gl.maximum(M, m)
    safe = gl.where(top == -float("inf"), 0.0, top)
    old = gl.exp2((M - safe) * c)
    new = gl.exp2((m - safe) * c)
    return top, L * old + l * new, O * old[None, :] + o * new[None, :]


@gluon.jit
def _zero_nonfinite(v_tile, scratch, visible, D: gl.constexpr, BM: gl.constexpr, S_L: gl.constexpr):
    """Replace nonfinite values of the tile by zeros; return [D, BM], > 0 where a visible key [64] had one."""
    seen = gl.zeros([D, BM], gl.float32, S_L)
    finite = gl.abs(v_tile.load(LANES).to(gl.float32)) < float("inf")
    if gl.max(gl.max(gl.where(finite, 0, 1), 1), 0) > 0:
        v = v_tile.load(LANES)  # loaded again: this is rare, so no registers are held for it
        finite = gl.abs(v.to(gl.float32)) < float("inf")
        v_tile.store(gl.where(finite, 0.0, 1.0).to(v.dtype))
        seen_by_all = gl.where(visible, 1.0, 0.0)[:, None] + gl.zeros([64, BM], gl.float32, S_L)
        scratch.permute((1, 0)).store(seen_by_all.to(v.dtype))
        fence_async_shared()
        seen = warpgroup_mma(v_tile.permute((1, 0)), scratch.permute((1, 0)), seen, is_async=True)
        seen = warpgroup_mma_wait(0, deps=(seen,))
        barrier()
        v_tile.store(gl.where(finite, v, 0.0).to(v.dtype))
        fence_async_shared()
        barrier()
    return seen
