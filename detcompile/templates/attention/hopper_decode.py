"""The kernel of kernels.py for few tokens per sequence, on Hopper GPUs: keys are the rows of the products.

Legend: as in hopper.py. A program's BM columns are query heads of one KV head for one token: scores [64 keys, BM],
output [D, BM].

A warpgroup product has 64 rows. With one token per sequence only the query heads that share a KV head (four, for
example) would fill them. With swapped operands the 64 keys of a block fill them, and a program needs so little state
that several share a multiprocessor and hide each other's memory latency. Sums are as in kernels.py, so the bits are
the same.
"""

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from detcompile.templates.attention.hopper_blocks import descriptor, row_steps, sequence_of
from detcompile.templates.attention.hopper_decode_tile import attend_columns, copy_block, merge_columns, piece_rows
from detcompile.templates.attention.hopper_tile import KEYS
from detcompile.templates.attention.operands import AttentionLaunch
from detcompile.templates.device.dependent_launch import (
    fetch_line_ahead,
    gluon_let_next_start,
    gluon_wait_for_earlier,
    launch_options,
)
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.device.primitives import barrier

_BLOCKS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_TILES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def launch(given: AttentionLaunch) -> None:
    """Run the kernel; `problem.fits_hopper_decode` holds."""
    schedule, problem, rule, q, k, v, out, target, max_and_sum, step, _, S, chunks, split = given
    assert problem.descriptors and problem.block_size, f"{schedule} reads blocks through descriptors"
    block_size, (_, T, _, _) = problem.block_size, q.shape
    describe = _whole_blocks if block_size >= 64 else functools.partial(descriptor, piece=block_size)
    groups = problem.kv_heads * cdiv(problem.group, schedule.block_m)
    batch_rows, head_rows, head_columns = row_steps(k)
    launcher(hopper_decode_kernel)[(groups * T, chunks if split else 1)](
        q[0], describe(k), describe(v), target, max_and_sum, *step, rule.log2e_scale, rule.window, S, problem.heads,
        chunks, step.block_table.shape[1], *q.stride()[1:3], batch_rows, head_rows, head_columns, *out.stride()[1:3],
        step.block_table.stride(0), G=problem.group, D=problem.d, BLOCK_SIZE=block_size, CHUNK=problem.chunk,
        WINDOWED=problem.windowed, SPLIT=split, BM=schedule.block_m, STAGES=schedule.stages, KV_HEADS=problem.kv_heads,
        num_warps=4, enable_fp_fusion=False, maxnreg=registers(schedule.stages, problem.d),
        **launch_options(q.device),
    )  # fmt: skip


def registers(stages: int, d: int) -> int:
    """Return the registers per thread that let as many programs share a multiprocessor as shared memory allows: at most
    five, three or two."""
    return 96 if stages * d <= 128 else 168 if stages * d <= 256 else 255


def _whole_blocks(t: Tensor) -> TensorDescriptor:
    """Return a descriptor of t's rows (see `row_steps`), 64 rows x D columns at a time.

    t is [num_blocks, block_size, KV heads, D]. One copy fetches a block as halves of 64 columns, as a tile stores it:
    a kernel's warps synchronize before each copy.
    """
    of_rows = descriptor(t, 64)
    rows, columns = of_rows.shape
    return TensorDescriptor(t, [columns // 64, rows, 64], [64, t.stride(1), 1], [t.shape[3] // 64, 64, 64], _BLOCKS)


@gluon.jit
def _look_up(sequence, first, cu_ptr, lens_ptr, table_ptr, table_row, width, S, BLOCK_SIZE: gl.constexpr):
    """Return a sequence's first and last token in the step, its length, and the cache blocks of keys first, first + 64,
    … first + 256; zeros for sequence S (padding). All loads are issued together, or their latencies would add up."""
    listed = sequence < S
    start = gl.load(cu_ptr + sequence, mask=listed, other=0)
    end = gl.load(cu_ptr + sequence + 1, mask=listed, other=0)
    length = gl.load(lens_ptr + sequence, mask=listed, other=0)
    row_ptr = table_ptr + sequence.to(gl.int64) * table_row
    held_by = (
        _block_of(row_ptr, first, width, listed, BLOCK_SIZE),
        _block_of(row_ptr, first + KEYS, width, listed, BLOCK_SIZE),
        _block_of(row_ptr, first + 2 * KEYS, width, listed, BLOCK_SIZE),
        _block_of(row_ptr, first + 3 * KEYS, width, listed, BLOCK_SIZE),
        _block_of(row_ptr, first + 4 * KEYS, width, listed, BLOCK_SIZE),
    )
    return start, end, length, held_by


@gluon.jit
def _block_of(table_ptr, n, width, listed, BLOCK_SIZE: gl.constexpr):
    """The cache block that holds key n, clamped to the width of the table."""
    return gl.load(table_ptr + gl.minimum(n // BLOCK_SIZE, width - 1), mask=listed, other=0)


@gluon.jit
def _end_of_keys(listed, visible, first, CHUNK: gl.constexpr, SPLIT: gl.constexpr):
    """End of a program's keys, for a token that sees `visible` keys; `first` (no keys) if it is not listed."""
    last = visible
    if SPLIT:
        last = gl.minimum(last, (gl.program_id(1) + 1) * CHUNK)
    return gl.where(listed, last, first)


@gluon.jit
def _early_piece_rows(
    table, held_by, i: gl.constexpr, first, last, BLOCK_SIZE: gl.constexpr, AT_ONCE: gl.constexpr
):  # fmt: skip
    """piece_rows of the i-th 64 keys from `first` on; AT_ONCE: their block is already in `held_by`."""
    n = first + i * KEYS
    if AT_ONCE:
        _, _, line, block_rows = table
        row = line + held_by[i] * block_rows + n % BLOCK_SIZE
        rows = (row, row, row, row)
    else:
        rows = piece_rows(table, n, last, BLOCK_SIZE)
    return rows


@gluon.jit
def _fetch(
    ring, table, held_by, column, first, last,
    D: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first STAGES blocks of keys first..last."""
    k_desc, v_desc, k_tiles, v_tiles, k_full, v_full = ring
    for i in gl.static_range(STAGES):
        rows = _early_piece_rows(table, held_by, i, first, last, BLOCK_SIZE, AT_ONCE)
        wanted = first + i * KEYS < last
        mbarrier.expect(k_full.index(i), 64 * D * 2, pred=wanted)
        mbarrier.expect(v_full.index(i), 64 * D * 2, pred=wanted)
        copy_block(k_desc, rows, column, k_full.index(i), k_tiles.index(i), wanted, BLOCK_SIZE, D)
        copy_block(v_desc, rows, column, v_full.index(i), v_tiles.index(i), wanted, BLOCK_SIZE, D)


@gluon.jit
def _store_partial(out_ptr, max_and_sum_ptr, part, m, l, o, d, ok, D: gl.constexpr, S_L: gl.constexpr):
    """Store a chunk's (m, l, o) for the merge."""
    gl.store(max_and_sum_ptr + part * 2, m, mask=ok)
    # Stores one row of l; all rows are equal, and a maximum over them would synchronize the warps.
    of_64 = gl.arange(0, 64, layout=gl.SliceLayout(1, S_L))
    sums = (max_and_sum_ptr + part * 2 + 1)[None, :] + 0 * of_64[:, None]
    gl.store(sums, l, mask=(of_64 == 0)[:, None] & ok[None, :])
    gl.store(out_ptr + part[None, :] * D + d[:, None], o, mask=ok[None, :])


@gluon.jit
def _quotient(O, L, dtype: gl.constexpr):
    """merge.quotient by columns."""
    inverse = gl.div_rn(gl.full(L.shape, 1.0, gl.float32, L.type.layout), L)
    y = O * inverse[None, :] + 0.0
    narrow = y.to(dtype)
    return gl.where(gl.abs(y) < float("inf"), narrow, gl.full(y.shape, float("nan"), dtype, y.type.layout))


@gluon.jit(do_not_specialize=["window", "S", "H", "chunks", "width"])
def hopper_decode_kernel(
    q_ptr, k_desc, v_desc, out_ptr, max_and_sum_ptr, cu_ptr, lens_ptr, table_ptr, c, window, S, H, chunks, width,
    q_token, q_head, block_rows, head_rows, head_columns, out_token, out_head, table_row,
    G: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK: gl.constexpr, WINDOWED: gl.constexpr,
    SPLIT: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, KV_HEADS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Axis 0: tokens, then KV heads x groups of BM heads, the fastest; axis 1: chunks if SPLIT. Results as in
    kernels.attention_kernel; if SPLIT also a sum of -1 for a chunk in which the token sees no key."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_L)
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    GROUPS: gl.constexpr = (G + BM - 1) // BM
    AT_ONCE: gl.constexpr = BLOCK_SIZE >= 64 and not WINDOWED  # one copy per block, and `first` needs no length
    gl.static_assert(STAGES <= 4, "the blocks of five times 64 keys are looked up together")
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
    t = gl.program_id(0) // (KV_HEADS * GROUPS)
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    listed_t = gl.maximum(gl.minimum(t, S - 1), 0)
    fetch_line_ahead(cu_ptr + listed_t + 0 * lane, PDL)
    fetch_line_ahead(lens_ptr + listed_t + 0 * lane, PDL)
    fetch_line_ahead(table_ptr + listed_t.to(gl.int64) * table_row + gl.minimum(lane // 32 * 32, width - 1), PDL)
    gluon_wait_for_earlier(PDL)
    group = gl.program_id(0) % (KV_HEADS * GROUPS)
    kv_head = group // GROUPS
    column = kv_head * head_columns
    first = 0
    if SPLIT:
        first = gl.program_id(1) * CHUNK
    # Loads that need no length are issued early; the query before the keys, or it would arrive last.
    q_member = group % GROUPS * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, Q_L))
    q_at = t.to(gl.int64) * q_token + (kv_head * G + q_member) * q_head
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, Q_L))
    q = gl.load(q_ptr + q_at[:, None] + dim[None, :], mask=(q_member < G)[:, None], other=0.0)
    # If every sequence has one token, token t belongs to sequence t, and no search is needed.
    start, end, length, held_by = _look_up(t, first, cu_ptr, lens_ptr, table_ptr, table_row, width, S, BLOCK_SIZE)
    direct = (start <= t) & (t < end)
    last = _end_of_keys(direct, length - end + t + 1, first, CHUNK, SPLIT)
    table = (table_ptr + t.to(gl.int64) * table_row, width, kv_head * head_rows, block_rows)
    if AT_ONCE:  # outside any branch, so that copies are prepared while the metadata are loading
        _fetch(ring, table, held_by, column, first, last, D, BLOCK_SIZE, STAGES, AT_ONCE)
    if not direct:
        sequence = sequence_of(t, cu_ptr, S, 1, 0, 4)
        start, end, length, held_by = _look_up(
            sequence, first, cu_ptr, lens_ptr, table_ptr, table_row, width, S, BLOCK_SIZE
        )  # fmt: skip
        last = _end_of_keys(sequence < S, length - end + t + 1, first, CHUNK, SPLIT)
        table = (table_ptr + sequence.to(gl.int64) * table_row, width, kv_head * head_rows, block_rows)
        if AT_ONCE:
            _fetch(ring, table, held_by, column, first, last, D, BLOCK_SIZE, STAGES, AT_ONCE)
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
            _fetch(ring, table, held_by, column, first, last, D, BLOCK_SIZE, STAGES, AT_ONCE)
        following = _early_piece_rows(table, held_by, STAGES, first, last, BLOCK_SIZE, AT_ONCE)
        q_tile.store(q)
        fence_async_shared()
        barrier()
        M, L, O, m, l, o = attend_columns(
            ring, q_tile, p_tiles, table, following, column, pos, first, last, lower, c, window,
            D, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, BM, STAGES, S_L,
        )  # fmt: skip
        if SPLIT:
            _store_partial(out_ptr, max_and_sum_ptr, part, m, l, o, d, member < G, D, S_L)
        else:
            M, L, O = merge_columns(M, L, O, m, gl.max(l, 0), o, c)
            narrow = _quotient(O, L, out_ptr.dtype.element_ty)
            gl.store(out_ptr + place, narrow, mask=(member < G)[None, :])
    else:  # the token sees none of the chunk's keys, or is padding
        if SPLIT:
            gl.store(max_and_sum_ptr + part * 2 + 1, gl.full([BM], -1.0, gl.float32, ROW), mask=member < G)
        else:
            gl.store(out_ptr + place, gl.zeros([D, BM], out_ptr.dtype.element_ty, S_L), mask=(member < G)[None, :])
