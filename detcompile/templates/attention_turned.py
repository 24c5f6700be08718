"""The kernel of attention_kernels.py for few tokens a sequence, on Hopper GPUs: keys are the rows of the products.

Legend: as in attention_hopper.py; a tile's BM rows (BQ = BM // HEADS tokens x HEADS query heads of one KV head) are the
columns here: scores [64 keys, BM], output [D, BM].

A product of a warpgroup has 64 rows. With one token a sequence a tile has as many rows as query heads share a KV
head, four, say; turned over, the 64 keys of a block fill them, and a program holds so little that several of them share
a multiprocessor and wait for memory in turns. Every sum is taken as in attention_kernels.py, so the bits are the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from detcompile.templates.attention_hopper import descriptor, fetch_tile, row_of, row_steps, sequence_of
from detcompile.templates.attention_hopper_tile import KEYS, LANES
from detcompile.templates.dependent_launch import gluon_let_next_start, gluon_wait_for_earlier, launch_options

__all__ = ["launch", "turned_attention_kernel"]

COLUMNS = 8  # the least that a warpgroup MMA takes
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and later, 3.6


def launch(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [pages, page, KV heads, D]
    v: Tensor,
    target: Tensor,  # out, or its chunks' partials
    stat: Tensor,
    metadata: tuple[Tensor, Tensor, Tensor],  # cu_seqlens, seq_lens, block_table
    numbers: Mapping[str, Any],  # c, window, T, S, H, chunks
    tiles: int,
    strides: Sequence[int],  # of out: token, head
    constants: Mapping[str, Any],  # G, HEADS, D, PAGE, CHUNK, WINDOWED, SPLIT, BM, STAGES
) -> None:
    """Run the kernel; `attention_hopper.supports(k, v)` holds."""
    piece = min(constants["PAGE"], 64)
    batch_rows, head_rows, head_columns = row_steps(k)
    groups = k.shape[2] * -(-constants["G"] // constants["HEADS"])
    # A thread's: for as many programs a multiprocessor as shared memory leaves room for, five, three, or two at most.
    held = constants["STAGES"] * constants["D"]
    registers = 96 if held <= 128 else 168 if held <= 256 else 255
    turned_attention_kernel[(groups * tiles, numbers["chunks"] if constants["SPLIT"] else 1)](
        q, descriptor(k, piece), descriptor(v, piece), target, stat, *metadata, **numbers,
        q_token=q.stride(0), q_head=q.stride(1), page_rows=batch_rows, head_rows=head_rows, head_columns=head_columns,
        out_token=strides[0], out_head=strides[1], table_row=metadata[2].stride(0),
        **constants, KV_HEADS=k.shape[2], num_warps=4, maxnreg=registers, enable_fp_fusion=False,
        **launch_options(q.device),
    )  # fmt: skip


@gluon.jit
def _fetch(desc, table_ptr, n, last, line, page_rows, column, full, tile, PAGE: gl.constexpr, D: gl.constexpr):
    """The block at key n into tile; `line`: the rows before those of its pages."""
    PIECES: gl.constexpr = 4 if PAGE == 16 else 2 if PAGE == 32 else 1
    r0 = line + row_of(table_ptr, n, last, page_rows, PAGE, 0)
    r1 = r0
    r2 = r0
    r3 = r0
    if PIECES > 1:
        r1 = line + row_of(table_ptr, n, last, page_rows, PAGE, 1)
    if PIECES > 2:
        r2 = line + row_of(table_ptr, n, last, page_rows, PAGE, 2)
        r3 = line + row_of(table_ptr, n, last, page_rows, PAGE, 3)
    fetch_tile(desc, r0, r1, r2, r3, column, full, tile, D, PIECES)


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
    """Values that are not finite are taken out of the tile, and put into the rows that see them."""
    finite = gl.abs(v_tile.load(LANES).to(gl.float32)) < float("inf")
    if gl.max(gl.max(gl.where(finite, 0, 1), 1), 0) > 0:
        v = v_tile.load(LANES)  # again: this is rare, and registers are not to be held for it
        finite = gl.abs(v.to(gl.float32)) < float("inf")
        v_tile.store(gl.where(finite, 0.0, 1.0).to(v.dtype))
        p_tile.permute((1, 0)).store(gl.where(visible, 1.0, 0.0).to(v.dtype))
        fence_async_shared()
        seen = gl.zeros([D, BM], gl.float32, S_L)
        seen = warpgroup_mma(v_tile.permute((1, 0)), p_tile.permute((1, 0)), seen, is_async=True)
        seen = warpgroup_mma_wait(0, deps=(seen,))
        barrier()
        v_tile.store(gl.where(finite, v, 0.0).to(v.dtype))
        o = gl.where(seen > 0.0, float("nan"), o)
    return o


@gluon.jit(do_not_specialize=["window", "T", "S", "H", "chunks"])
def turned_attention_kernel(
    q_ptr, k_desc, v_desc, out_ptr, stat_ptr, cu_ptr, lens_ptr, table_ptr, c, window, T, S, H, chunks,
    q_token, q_head, page_rows, head_rows, head_columns, out_token, out_head, table_row,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    WINDOWED: gl.constexpr, SPLIT: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, KV_HEADS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of tokens, then KV heads x groups of HEADS, the fastest; axis 1: chunks if SPLIT. Results as in
    attention_kernels.attention_kernel."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_L)
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    BQ: gl.constexpr = BM // HEADS
    GROUPS: gl.constexpr = (G + HEADS - 1) // HEADS
    gluon_let_next_start(PDL)
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, D], k_desc.layout)
    q_tile = gl.allocate_shared_memory(dtype, [BM, D], k_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [BM, 64], k_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    barrier()
    gluon_wait_for_earlier(PDL)
    tile = gl.program_id(0) // (KV_HEADS * GROUPS)
    group = gl.program_id(0) % (KV_HEADS * GROUPS)
    sequence = sequence_of(tile, cu_ptr, S, BQ, 4)
    start = gl.load(cu_ptr + sequence)
    local = (tile - (start // BQ + sequence)) * BQ
    length = gl.load(cu_ptr + sequence + 1, mask=sequence < S, other=T) - start
    past = gl.load(lens_ptr + sequence, mask=sequence < S, other=0) - length
    kv_head = group // GROUPS
    member0 = group % GROUPS * HEADS
    first = 0
    last = past + gl.minimum(local + BQ, length)
    lower = 0
    if WINDOWED:
        first = gl.maximum(past + local - window + 1, 0) // KEYS * KEYS
        lower = (past + local + BQ - window + KEYS - 1) // KEYS * KEYS
    if SPLIT:
        first = gl.maximum(first, gl.program_id(1) * CHUNK)
        last = gl.minimum(last, (gl.program_id(1) + 1) * CHUNK)
    if sequence == S:
        last = first
    if local < length:
        if (not SPLIT) | (first < last):
            line = kv_head * head_rows
            column = kv_head * head_columns
            table_ptr += sequence.to(gl.int64) * table_row
            for i in gl.static_range(STAGES):
                n = first + i * KEYS
                if n < last:
                    _fetch(
                        k_desc, table_ptr, n, last, line, page_rows, column, k_full.index(i), k_tiles.index(i), PAGE, D
                    )
                    _fetch(
                        v_desc, table_ptr, n, last, line, page_rows, column, v_full.index(i), v_tiles.index(i), PAGE, D
                    )

            row = gl.arange(0, BM, layout=gl.SliceLayout(1, Q_L))
            member = member0 + row % HEADS
            token = local + row // HEADS
            at = (start + token).to(gl.int64) * q_token + (kv_head * G + member) * q_head
            dim = gl.arange(0, D, layout=gl.SliceLayout(0, Q_L))
            inside = (token < length) & (member < G)
            q_tile.store(gl.load(q_ptr + at[:, None] + dim[None, :], mask=inside[:, None], other=0.0))
            fence_async_shared()

            row = gl.arange(0, BM, layout=ROW)
            member = member0 + row % HEADS
            token = local + row // HEADS
            inside = (token < length) & (member < G)
            pos = gl.where(inside, past + token, -1)
            whole = (past + local + 1) // KEYS * KEYS  # blocks lower..whole are seen whole by every row
            M = gl.full([BM], -float("inf"), gl.float32, ROW)
            L = gl.zeros([BM], gl.float32, ROW)
            O = gl.zeros([D, BM], gl.float32, S_L)
            m = M
            l = gl.zeros([64, BM], gl.float32, S_L)
            o = O
            for n in range(first, last, KEYS):
                if not SPLIT:
                    if n % CHUNK == 0:
                        M, L, O = _merge(M, L, O, m, gl.max(l, 0), o, c)
                        m = gl.full([BM], -float("inf"), gl.float32, ROW)
                        l = gl.zeros([64, BM], gl.float32, S_L)
                        o = gl.zeros([D, BM], gl.float32, S_L)
                block = (n - first) // KEYS
                stage = block % STAGES
                phase = (block // STAGES) & 1
                following = n + STAGES * KEYS
                mbarrier.wait(k_full.index(stage), phase)
                s = gl.zeros([64, BM], gl.float32, S_L)
                s = warpgroup_mma(k_tiles.index(stage), q_tile.permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                barrier()
                if following < last:
                    _fetch(
                        k_desc, table_ptr, following, last, line, page_rows, column, k_full.index(stage),
                        k_tiles.index(stage), PAGE, D,
                    )  # fmt: skip
                key = n + gl.arange(0, 64, layout=gl.SliceLayout(1, S_L))
                visible = key[:, None] <= pos[None, :]
                if WINDOWED:
                    visible = visible & (key[:, None] > pos[None, :] - window)
                s = gl.where(visible, s, -float("inf"))
                top = gl.maximum(m, gl.max(s, 0))
                safe = gl.where(top == -float("inf"), 0.0, top)
                alpha = gl.exp2((m - safe) * c)
                m = top
                o = o * alpha[None, :]
                l = l * alpha[None, :]
                mbarrier.wait(v_full.index(stage), phase)
                if (n + KEYS > whole) | (n < lower):
                    o = _without_strange(v_tiles.index(stage), p_tile, visible, o, D, BM, S_L)
                p_tile.permute((1, 0)).store(gl.exp2((s - safe[None, :]) * c).to(dtype))
                fence_async_shared()
                o = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), p_tile.permute((1, 0)), o, is_async=True)
                ones = gl.full([64, 64], 1.0, dtype, gl.DotOperandLayout(0, S_L, 2))
                l = warpgroup_mma(ones, p_tile.permute((1, 0)), l, is_async=True)
                o, l = warpgroup_mma_wait(0, deps=(o, l))
                barrier()
                if following < last:
                    _fetch(
                        v_desc, table_ptr, following, last, line, page_rows, column, v_full.index(stage),
                        v_tiles.index(stage), PAGE, D,
                    )  # fmt: skip
            l_row = gl.max(l, 0)  # its rows are equal

            t = (start + token).to(gl.int64)
            d = gl.arange(0, D, layout=gl.SliceLayout(1, S_L))
            if SPLIT:
                part = (t * H + kv_head * G + member) * chunks + gl.program_id(1)
                gl.store(stat_ptr + part * 2, m, mask=inside)
                gl.store(stat_ptr + part * 2 + 1, l_row, mask=inside)
                gl.store(out_ptr + part[None, :] * D + d[:, None], o, mask=inside[None, :])
            else:
                M, L, O = _merge(M, L, O, m, l_row, o, c)
                # attention_kernels._quotient. Rows of the padding have seen no key: they get zeros.
                inverse = gl.where(L == 0.0, 0.0, gl.div_rn(gl.full([BM], 1.0, gl.float32, ROW), L))
                y = O * inverse[None, :] + 0.0
                narrow = y.to(out_ptr.dtype.element_ty)
                narrow = gl.where(gl.abs(y) < float("inf"), narrow, gl.full([D, BM], float("nan"), narrow.dtype, S_L))
                place = t * out_token + (kv_head * G + member) * out_head
                gl.store(out_ptr + place[None, :] + d[:, None], narrow, mask=inside[None, :])
