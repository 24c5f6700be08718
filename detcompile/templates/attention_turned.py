"""The kernel of attention_kernels.py for few tokens a sequence, on Hopper GPUs: keys are the rows of the products.

Legend: as in attention_hopper.py; a program's BM columns are query heads of one KV head, of one token: scores
[64 keys, BM], output [D, BM].

A product of a warpgroup has 64 rows. With one token a sequence there are as many rows as query heads share a KV head,
four, say; turned over, the 64 keys of a block fill them, and a program holds so little that several of them share a
multiprocessor and wait for memory in turns. Every sum is taken as in attention_kernels.py, so the bits are the same.

A block is a chain of waits, for scores, their maximum over four warps, weights and outputs: the next block's scores are
taken while the weights of this one are made.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from detcompile.templates.attention_hopper import descriptor, fetch_tile, row_of, row_steps, sequence_of
from detcompile.templates.attention_hopper_tile import KEYS, LANES
from detcompile.templates.dependent_launch import gluon_let_next_start, gluon_wait_for_earlier, launch_options
from detcompile.templates.launching import launcher

__all__ = ["barrier", "launch", "turned_attention_kernel"]

_BLOCKS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_TILES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
COLUMNS = 8  # the least that a warpgroup MMA takes
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and later, 3.6


def launch(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [pages, page, KV heads, D]
    v: Tensor,
    target: Tensor,  # out, or its chunks' partials
    stat: Tensor,
    metadata: tuple[Tensor, Tensor, Tensor],  # cu_seqlens, seq_lens, block_table
    numbers: Mapping[str, Any],  # c, window, S, H, chunks
    strides: Sequence[int],  # of out: token, head
    constants: Mapping[str, Any],  # G, D, PAGE, CHUNK, WINDOWED, SPLIT, BM, STAGES
) -> None:
    """Run the kernel; `attention_hopper.supports(k, v)` holds."""
    describe = _whole_blocks if constants["PAGE"] >= 64 else functools.partial(descriptor, piece=constants["PAGE"])
    batch_rows, head_rows, head_columns = row_steps(k)
    groups = k.shape[2] * -(-constants["G"] // constants["BM"])
    # A thread's: for as many programs a multiprocessor as shared memory leaves room for, five, three, or two at most.
    held = constants["STAGES"] * constants["D"]
    registers = 96 if held <= 128 else 168 if held <= 256 else 255
    launcher(turned_attention_kernel)[(groups * q.shape[0], numbers["chunks"] if constants["SPLIT"] else 1)](
        q, describe(k), describe(v), target, stat, *metadata, **numbers, width=metadata[2].shape[1],
        q_token=q.stride(0), q_head=q.stride(1), page_rows=batch_rows, head_rows=head_rows, head_columns=head_columns,
        out_token=strides[0], out_head=strides[1], table_row=metadata[2].stride(0),
        **constants, KV_HEADS=k.shape[2], num_warps=4, maxnreg=registers, enable_fp_fusion=False,
        **launch_options(q.device),
    )  # fmt: skip


def _whole_blocks(t: Tensor) -> TensorDescriptor:
    """Of t, [pages, page, KV heads, D]: blocks of 64 of the rows that `row_steps` counts, D columns each.

    They come in one copy, 64 columns after 64 columns as in a tile: a kernel's warps meet before each copy.
    """
    of_rows = descriptor(t, 64)
    rows, columns = of_rows.shape
    return TensorDescriptor(t, [columns // 64, rows, 64], [64, t.stride(1), 1], [t.shape[3] // 64, 64, 64], _BLOCKS)


@gluon.jit
def _place_of(t, first, cu_ptr, lens_ptr, table_ptr, table_row, S, PAGE: gl.constexpr):
    """Sequence of token t (S: padding), the end of its tokens in the step, its length, and the page of key `first`."""
    # Where every sequence has one token, token t is sequence t's, and nobody has to search.
    sequence = t
    start = gl.load(cu_ptr + t, mask=t < S, other=0)
    end = gl.load(cu_ptr + t + 1, mask=t < S, other=0)
    length = gl.load(lens_ptr + t, mask=t < S, other=0)
    page = gl.load(table_ptr + t.to(gl.int64) * table_row + first // PAGE, mask=t < S, other=0)
    if (t < start) | (t >= end):
        sequence = sequence_of(t, cu_ptr, S, 1, 0, 4)
        listed = sequence < S
        end = gl.load(cu_ptr + sequence + 1, mask=listed, other=0)
        length = gl.load(lens_ptr + sequence, mask=listed, other=0)
        page = gl.load(table_ptr + sequence.to(gl.int64) * table_row + first // PAGE, mask=listed, other=0)
    return sequence, end, length, page


@gluon.jit
def _rows_of(pages, n, last, PAGE: gl.constexpr):
    """Rows where the pieces of the block at key n start, as many as fetch_tile takes.

    pages: the sequence's row of the block table and its width; rows before those of the KV head in a page, and rows of
    a page. Whoever asks for keys past the last one gets any rows.
    """
    PIECES: gl.constexpr = 4 if PAGE == 16 else 2 if PAGE == 32 else 1
    table_ptr, width, line, page_rows = pages
    if PIECES == 1:
        r0 = line + gl.load(table_ptr + gl.minimum(n // PAGE, width - 1)) * page_rows + n % PAGE
    else:
        r0 = line + row_of(table_ptr, n, last, page_rows, PAGE, 0)
    r1 = r0
    r2 = r0
    r3 = r0
    if PIECES > 1:
        r1 = line + row_of(table_ptr, n, last, page_rows, PAGE, 1)
    if PIECES > 2:
        r2 = line + row_of(table_ptr, n, last, page_rows, PAGE, 2)
        r3 = line + row_of(table_ptr, n, last, page_rows, PAGE, 3)
    return r0, r1, r2, r3


@gluon.jit
def _fetch(ring, stage, rows, column, PAGE: gl.constexpr, D: gl.constexpr):
    """A block of keys and its values into a stage of the ring."""
    PIECES: gl.constexpr = 4 if PAGE == 16 else 2 if PAGE == 32 else 1
    k_desc, v_desc, k_tiles, v_tiles, k_full, v_full = ring
    r0, r1, r2, r3 = rows
    if PIECES == 1:
        _fetch_whole(k_desc, r0, column, k_full.index(stage), k_tiles.index(stage), D)
        _fetch_whole(v_desc, r0, column, v_full.index(stage), v_tiles.index(stage), D)
    else:
        fetch_tile(k_desc, r0, r1, r2, r3, column, k_full.index(stage), k_tiles.index(stage), D, PIECES)
        fetch_tile(v_desc, r0, r1, r2, r3, column, v_full.index(stage), v_tiles.index(stage), D, PIECES)


@gluon.jit
def _fetch_whole(desc, row, column, full, tile, D: gl.constexpr):
    """attention_hopper.fetch_tile of a block in one page, by a descriptor of `_whole_blocks`."""
    mbarrier.expect(full, 64 * D * 2)
    block = tile._reinterpret(desc.dtype, [D // 64, 64, 64], desc.layout)
    tma.async_copy_global_to_shared(desc, [column // 64, row, 0], full, block)


@gluon.jit
def _scores(k_tile, q_tile, BM: gl.constexpr, S_L: gl.constexpr):
    """Of one block, [64, BM], to be waited for."""
    s = gl.zeros([64, BM], gl.float32, S_L)
    return warpgroup_mma(k_tile, q_tile.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _merge(M, L, O, m, l, o, c):
    """attention_kernels._merge."""
    top = gl.maximum(M, m)
    safe = gl.where(top == -float("inf"), 0.0, top)
    old = gl.exp2((M - safe) * c)
    new = gl.exp2((m - safe) * c)
    return top, L * old + l * new, O * old[None, :] + o * new[None, :]


@gluon.jit
def _without_strange(v_tile, p_tile, visible, o, D: gl.constexpr, BM: gl.constexpr, S_L: gl.constexpr):
    """Values that are not finite are taken out of the tile, and put into the outputs if their keys [64] are visible."""
    finite = gl.abs(v_tile.load(LANES).to(gl.float32)) < float("inf")
    if gl.max(gl.max(gl.where(finite, 0, 1), 1), 0) > 0:
        v = v_tile.load(LANES)  # again: this is rare, and registers are not to be held for it
        finite = gl.abs(v.to(gl.float32)) < float("inf")
        v_tile.store(gl.where(finite, 0.0, 1.0).to(v.dtype))
        seen_by_all = gl.where(visible, 1.0, 0.0)[:, None] + gl.zeros([64, BM], gl.float32, S_L)
        p_tile.permute((1, 0)).store(seen_by_all.to(v.dtype))
        fence_async_shared()
        seen = gl.zeros([D, BM], gl.float32, S_L)
        seen = warpgroup_mma(v_tile.permute((1, 0)), p_tile.permute((1, 0)), seen, is_async=True)
        seen = warpgroup_mma_wait(0, deps=(seen,))
        barrier()
        v_tile.store(gl.where(finite, v, 0.0).to(v.dtype))
        o = gl.where(seen > 0.0, float("nan"), o)
    return o


@gluon.jit
def _attend(
    ring, q_tile, p_tile, pages, column, pos, first, last, lower, c, window,
    D: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr, WINDOWED: gl.constexpr, SPLIT: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, S_L: gl.constexpr,
):  # fmt: skip
    """Keys first..last of a token at pos, which sees the blocks from lower on whole, but for its own: what
    attention_kernels and attention_merge merge, (M, L, O) of all chunks but the last and (m, l, o) of that one, l in
    each of 64 rows."""
    ROW: gl.constexpr = gl.SliceLayout(0, S_L)
    k_desc, _, k_tiles, v_tiles, k_full, v_full = ring
    M = gl.full([BM], -float("inf"), gl.float32, ROW)
    L = gl.zeros([BM], gl.float32, ROW)
    O = gl.zeros([D, BM], gl.float32, S_L)
    m = M
    l = gl.zeros([64, BM], gl.float32, S_L)
    o = O
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_scores(k_tiles.index(0), q_tile, BM, S_L),))
    for n in range(first, last, KEYS):
        if not SPLIT:
            if n % CHUNK == 0:
                M, L, O = _merge(M, L, O, m, gl.max(l, 0), o, c)
                m = gl.full([BM], -float("inf"), gl.float32, ROW)
                l = gl.zeros([64, BM], gl.float32, S_L)
                o = gl.zeros([D, BM], gl.float32, S_L)
        block = (n - first) // KEYS
        stage = block % STAGES
        following = n + STAGES * KEYS
        rows = _rows_of(pages, following, last, PAGE)
        key = n + gl.arange(0, 64, layout=gl.SliceLayout(1, S_L))
        visible = key <= pos
        if WINDOWED:
            visible = visible & (key > pos - window)
        s = gl.where(visible[:, None], s, -float("inf"))
        top = gl.maximum(m, gl.max(s, 0))
        safe = gl.where(top == -float("inf"), 0.0, top)
        alpha = gl.exp2((m - safe) * c)
        m = top
        o = o * alpha[None, :]
        l = l * alpha[None, :]
        mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
        if (n + KEYS > pos + 1) | (n < lower):
            o = _without_strange(v_tiles.index(stage), p_tile, visible, o, D, BM, S_L)
        # The next scores, while weights are made. After the last block they are of old keys, and nobody looks.
        ahead = (block + 1) % STAGES
        mbarrier.wait(k_full.index(ahead), ((block + 1) // STAGES) & 1, pred=n + KEYS < last)
        s_next = _scores(k_tiles.index(ahead), q_tile, BM, S_L)
        p_tile.permute((1, 0)).store(gl.exp2((s - safe[None, :]) * c).to(k_desc.dtype))
        fence_async_shared()
        o = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), p_tile.permute((1, 0)), o, is_async=True)
        ones = gl.full([64, 64], 1.0, k_desc.dtype, gl.DotOperandLayout(0, S_L, 2))
        l = warpgroup_mma(ones, p_tile.permute((1, 0)), l, is_async=True)
        o, l, s = warpgroup_mma_wait(0, deps=(o, l, s_next))
        barrier()
        if following < last:
            _fetch(ring, stage, rows, column, PAGE, D)
    return M, L, O, m, l, o


@gluon.jit(do_not_specialize=["window", "S", "H", "chunks", "width"])
def turned_attention_kernel(
    q_ptr, k_desc, v_desc, out_ptr, stat_ptr, cu_ptr, lens_ptr, table_ptr, c, window, S, H, chunks, width,
    q_token, q_head, page_rows, head_rows, head_columns, out_token, out_head, table_row,
    G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr, WINDOWED: gl.constexpr,
    SPLIT: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, KV_HEADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Axis 0: tokens, then KV heads x groups of BM heads, the fastest; axis 1: chunks if SPLIT. Results as in
    attention_kernels.attention_kernel; if SPLIT also a sum of -1 for a chunk of which the token sees no key."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_L)
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    GROUPS: gl.constexpr = (G + BM - 1) // BM
    gl.static_assert(STAGES > 1, "the next block's keys are waited for before this one's stage is free")
    gluon_let_next_start(PDL)
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, D], _TILES)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, D], _TILES)
    q_tile = gl.allocate_shared_memory(dtype, [BM, D], _TILES)
    p_tile = gl.allocate_shared_memory(dtype, [BM, 64], _TILES)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (k_desc, v_desc, k_tiles, v_tiles, k_full, v_full)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    barrier()
    gluon_wait_for_earlier(PDL)
    t = gl.program_id(0) // (KV_HEADS * GROUPS)
    group = gl.program_id(0) % (KV_HEADS * GROUPS)
    kv_head = group // GROUPS
    column = kv_head * head_columns
    first = 0
    if SPLIT:
        first = gl.program_id(1) * CHUNK
    # What needs no length is asked for before it is used, and the query before the keys: behind them it would be last.
    q_member = group % GROUPS * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, Q_L))
    q_at = t.to(gl.int64) * q_token + (kv_head * G + q_member) * q_head
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, Q_L))
    q = gl.load(q_ptr + q_at[:, None] + dim[None, :], mask=(q_member < G)[:, None], other=0.0)
    sequence, end, length, page = _place_of(t, first, cu_ptr, lens_ptr, table_ptr, table_row, S, PAGE)
    pages = (table_ptr + sequence.to(gl.int64) * table_row, width, kv_head * head_rows, page_rows)
    pos = length - end + t
    last = pos + 1
    lower = 0
    if WINDOWED:
        first = gl.maximum(first, gl.maximum(pos - window + 1, 0) // KEYS * KEYS)
        lower = (pos - window + KEYS) // KEYS * KEYS
    if SPLIT:
        last = gl.minimum(last, (gl.program_id(1) + 1) * CHUNK)
    if sequence == S:
        last = first

    member = group % GROUPS * BM + gl.arange(0, BM, layout=ROW)
    head = kv_head * G + member
    part = (t.to(gl.int64) * H + head) * chunks + gl.program_id(1)
    d = gl.arange(0, D, layout=gl.SliceLayout(1, S_L))
    place = (t.to(gl.int64) * out_token + head * out_head)[None, :] + d[:, None]
    if first < last:
        for i in gl.static_range(STAGES):
            rows = _rows_of(pages, first + i * KEYS, last, PAGE)
            if i == 0 and PAGE >= 64 and not WINDOWED:
                row = kv_head * head_rows + page * page_rows + first % PAGE
                rows = (row, row, row, row)
            if first + i * KEYS < last:
                _fetch(ring, i, rows, column, PAGE, D)
        q_tile.store(q)
        fence_async_shared()
        barrier()
        M, L, O, m, l, o = _attend(
            ring, q_tile, p_tile, pages, column, pos, first, last, lower, c, window,
            D, PAGE, CHUNK, WINDOWED, SPLIT, BM, STAGES, S_L,
        )  # fmt: skip
        if SPLIT:
            gl.store(stat_ptr + part * 2, m, mask=member < G)
            # One row of l, which are equal: a maximum of them would have the warps wait for each other.
            of_64 = gl.arange(0, 64, layout=gl.SliceLayout(1, S_L))
            sums = (stat_ptr + part * 2 + 1)[None, :] + 0 * of_64[:, None]
            gl.store(sums, l, mask=(of_64 == 0)[:, None] & (member < G)[None, :])
            gl.store(out_ptr + part[None, :] * D + d[:, None], o, mask=(member < G)[None, :])
        else:
            M, L, O = _merge(M, L, O, m, gl.max(l, 0), o, c)
            inverse = gl.div_rn(gl.full([BM], 1.0, gl.float32, ROW), L)  # as in attention_kernels._quotient
            y = O * inverse[None, :] + 0.0
            narrow = y.to(out_ptr.dtype.element_ty)
            narrow = gl.where(gl.abs(y) < float("inf"), narrow, gl.full([D, BM], float("nan"), narrow.dtype, S_L))
            gl.store(out_ptr + place, narrow, mask=(member < G)[None, :])
    else:  # the token sees none of the chunk's keys, or is padding
        if SPLIT:
            gl.store(stat_ptr + part * 2 + 1, gl.full([BM], -1.0, gl.float32, ROW), mask=member < G)
        else:
            gl.store(out_ptr + place, gl.zeros([D, BM], out_ptr.dtype.element_ty, S_L), mask=(member < G)[None, :])
