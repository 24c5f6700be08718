"""The kernel of kernels.py for few tokens a sequence, on Hopper GPUs: keys are the rows of the products.

Legend: as in hopper.py; a program's BM columns are query heads of one KV head, of one token: scores
[64 keys, BM], output [D, BM].

A product of a warpgroup has 64 rows. With one token a sequence there are as many rows as query heads share a KV head,
four, say; turned over, the 64 keys of a block fill them, and a program holds so little that several of them share a
multiprocessor and wait for memory in turns. Every sum is taken as in kernels.py, so the bits are the same.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from detcompile.templates.attention.hopper import descriptor, row_steps, sequence_of
from detcompile.templates.attention.hopper_decode_tile import attend_columns, copy_block, merge_columns, rows_of
from detcompile.templates.attention.hopper_tile import KEYS
from detcompile.templates.device.barrier import barrier
from detcompile.templates.device.dependent_launch import gluon_let_next_start, gluon_wait_for_earlier, launch_options
from detcompile.templates.device.launcher import launcher

__all__ = ["launch", "registers", "turned_attention_kernel"]

_BLOCKS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_TILES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
COLUMNS = 8  # the least that a warpgroup MMA takes


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
    launcher(turned_attention_kernel)[(groups * q.shape[0], numbers["chunks"] if constants["SPLIT"] else 1)](
        q, describe(k), describe(v), target, stat, *metadata, **numbers, width=metadata[2].shape[1],
        q_token=q.stride(0), q_head=q.stride(1), page_rows=batch_rows, head_rows=head_rows, head_columns=head_columns,
        out_token=strides[0], out_head=strides[1], table_row=metadata[2].stride(0),
        **constants, KV_HEADS=k.shape[2], num_warps=4, enable_fp_fusion=False,
        maxnreg=registers(constants["STAGES"], constants["D"]), **launch_options(q.device),
    )  # fmt: skip


def registers(stages: int, d: int) -> int:
    """Of a thread, for as many programs a multiprocessor as shared memory has room for: five, three or two at most."""
    return 96 if stages * d <= 128 else 168 if stages * d <= 256 else 255


def _whole_blocks(t: Tensor) -> TensorDescriptor:
    """Of t, [pages, page, KV heads, D]: blocks of 64 of the rows that `row_steps` counts, D columns each.

    They come in one copy, 64 columns after 64 columns as in a tile: a kernel's warps meet before each copy.
    """
    of_rows = descriptor(t, 64)
    rows, columns = of_rows.shape
    return TensorDescriptor(t, [columns // 64, rows, 64], [64, t.stride(1), 1], [t.shape[3] // 64, 64, 64], _BLOCKS)


@gluon.jit
def _place_of(sequence, first, cu_ptr, lens_ptr, table_ptr, table_row, width, S, PAGE: gl.constexpr):
    """Where a sequence's tokens begin and end in the step, its length, and the pages of the five blocks from key
    `first` on; zeros for S, which is padding. All is asked for together, or the waits would add up."""
    listed = sequence < S
    start = gl.load(cu_ptr + sequence, mask=listed, other=0)
    end = gl.load(cu_ptr + sequence + 1, mask=listed, other=0)
    length = gl.load(lens_ptr + sequence, mask=listed, other=0)
    row_ptr = table_ptr + sequence.to(gl.int64) * table_row
    pages = (
        _page(row_ptr, first, width, listed, PAGE),
        _page(row_ptr, first + KEYS, width, listed, PAGE),
        _page(row_ptr, first + 2 * KEYS, width, listed, PAGE),
        _page(row_ptr, first + 3 * KEYS, width, listed, PAGE),
        _page(row_ptr, first + 4 * KEYS, width, listed, PAGE),
    )
    return start, end, length, pages


@gluon.jit
def _page(table_ptr, n, width, listed, PAGE: gl.constexpr):
    """That of key n, or the last one that the table has room for."""
    return gl.load(table_ptr + gl.minimum(n // PAGE, width - 1), mask=listed, other=0)


@gluon.jit
def _last_of(listed, visible, first, CHUNK: gl.constexpr, SPLIT: gl.constexpr):
    """Where a program's keys end, of a token that sees so many; at `first`, where they begin, if it is not listed."""
    last = visible
    if SPLIT:
        last = gl.minimum(last, (gl.program_id(1) + 1) * CHUNK)
    return gl.where(listed, last, first)


@gluon.jit
def _block_rows(pages, looked_up, i: gl.constexpr, first, last, PAGE: gl.constexpr, AT_ONCE: gl.constexpr):
    """rows_of the i-th block from `first` on; AT_ONCE: its page is looked up already."""
    n = first + i * KEYS
    if AT_ONCE:
        _, _, line, page_rows = pages
        row = line + looked_up[i] * page_rows + n % PAGE
        rows = (row, row, row, row)
    else:
        rows = rows_of(pages, n, last, PAGE)
    return rows


@gluon.jit
def _fetch(
    ring, pages, looked_up, column, first, last,
    D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """The first STAGES blocks of keys first..last."""
    k_desc, v_desc, k_tiles, v_tiles, k_full, v_full = ring
    for i in gl.static_range(STAGES):
        rows = _block_rows(pages, looked_up, i, first, last, PAGE, AT_ONCE)
        wanted = first + i * KEYS < last
        mbarrier.expect(k_full.index(i), 64 * D * 2, pred=wanted)
        mbarrier.expect(v_full.index(i), 64 * D * 2, pred=wanted)
        copy_block(k_desc, rows, column, k_full.index(i), k_tiles.index(i), wanted, PAGE, D)
        copy_block(v_desc, rows, column, v_full.index(i), v_tiles.index(i), wanted, PAGE, D)


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
    AT_ONCE: gl.constexpr = PAGE >= 64 and not WINDOWED  # a block is one copy, and which is first needs no length
    gl.static_assert(STAGES <= 4, "the pages of five blocks are looked up together")
    gl.static_assert(BM == 8, "the exchange between warps is laid out for eight columns")
    gluon_let_next_start(PDL)
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, D], _TILES)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, D], _TILES)
    q_tile = gl.allocate_shared_memory(dtype, [BM, D], _TILES)
    p_tiles = gl.allocate_shared_memory(dtype, [2, BM, 64], _TILES)
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
    # Where every sequence has one token, token t is sequence t's, and nobody has to search.
    start, end, length, looked_up = _place_of(t, first, cu_ptr, lens_ptr, table_ptr, table_row, width, S, PAGE)
    own = (start <= t) & (t < end)
    last = _last_of(own, length - end + t + 1, first, CHUNK, SPLIT)
    pages = (table_ptr + t.to(gl.int64) * table_row, width, kv_head * head_rows, page_rows)
    if AT_ONCE:  # in no branch: whatever else copies need is then made ready while metadata are on their way
        _fetch(ring, pages, looked_up, column, first, last, D, PAGE, STAGES, AT_ONCE)
    if not own:
        sequence = sequence_of(t, cu_ptr, S, 1, 0, 4)
        start, end, length, looked_up = _place_of(
            sequence, first, cu_ptr, lens_ptr, table_ptr, table_row, width, S, PAGE
        )  # fmt: skip
        last = _last_of(sequence < S, length - end + t + 1, first, CHUNK, SPLIT)
        pages = (table_ptr + sequence.to(gl.int64) * table_row, width, kv_head * head_rows, page_rows)
        if AT_ONCE:
            _fetch(ring, pages, looked_up, column, first, last, D, PAGE, STAGES, AT_ONCE)
    pos = length - end + t
    lower = 0
    if WINDOWED:
        first = gl.maximum(first, gl.maximum(pos - window + 1, 0) // KEYS * KEYS)
        lower = (pos - window + KEYS) // KEYS * KEYS

    member = group % GROUPS * BM + gl.arange(0, BM, layout=ROW)
    head = kv_head * G + member
    part = (t.to(gl.int64) * H + head) * chunks + gl.program_id(1)
    d = gl.arange(0, D, layout=gl.SliceLayout(1, S_L))
    place = (t.to(gl.int64) * out_token + head * out_head)[None, :] + d[:, None]
    if first < last:
        if not AT_ONCE:
            _fetch(ring, pages, looked_up, column, first, last, D, PAGE, STAGES, AT_ONCE)
        following = _block_rows(pages, looked_up, STAGES, first, last, PAGE, AT_ONCE)
        q_tile.store(q)
        fence_async_shared()
        barrier()
        M, L, O, m, l, o = attend_columns(
            ring, q_tile, p_tiles, pages, following, column, pos, first, last, lower, c, window,
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
            M, L, O = merge_columns(M, L, O, m, gl.max(l, 0), o, c)
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
