"""The kernel of kernels.py for Hopper GPUs: one warp fetches, one or two warpgroups attend. Same bits.

Legend: H query heads, G query heads of one KV head, D head dim (64 or 128), c = scale * log2(e). A warpgroup's tile has
64 rows: BQ = 64 // HEADS tokens x HEADS query heads of one KV head. A program has CONSUMERS such tiles of neighboring
tokens, which share the keys it fetches.

The fetching warp fills a ring of STAGES blocks of 64 keys through tensor descriptors. k_full and v_full signal that a
stage holds a block; k_free and v_free signal that every warpgroup is done with it. Slots without a key may contain NaN:
a block in which some row does not see every key is checked for nonfinite values before it is multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from detcompile.templates.attention.hopper_blocks import copy_tile, descriptor, row_of, row_steps, sequence_of
from detcompile.templates.attention.hopper_tile import KEYS, LANES, SUMS, attend_tile
from detcompile.templates.attention.operands import AttentionLaunch
from detcompile.templates.attention.schedules import HOPPER_ROWS
from detcompile.templates.device.dependent_launch import gluon_let_next_start, gluon_wait_for_earlier, launch_options
from detcompile.templates.device.gate import multiprocessors
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2

REGISTERS = {1: 128, 2: 168}  # per thread, by CONSUMERS; the attending warpgroups then get 232 or 240

TOTALS = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))


def launch(given: AttentionLaunch) -> None:
    """Run the kernel; `hopper_blocks.supports(k, v)` holds."""
    schedule, problem, rule, q, k, v, out, target, max_and_sum, step, T, S, chunks, split = given
    heads = min(next_power_of_2(problem.group), HOPPER_ROWS)
    consumers = schedule.block_m // HOPPER_ROWS
    paged = problem.block_size > 0
    piece = min(problem.block_size, 64) if paged else 64
    batch_rows, head_rows, head_columns = row_steps(k)
    tiles = given.tiles(heads)
    # Programs with one warpgroup loop over many tasks, two programs per multiprocessor. Programs with two attend one
    # tile each: the hardware scheduler balances their unequal lengths better.
    programs = tiles * problem.kv_heads * cdiv(problem.group, heads) * (chunks if split else 1)
    if consumers == 1:
        programs = min(programs, 2 * multiprocessors(q.device))
    launcher(hopper_attention_kernel)[(programs,)](
        q, descriptor(k, piece), descriptor(v, piece), target, max_and_sum, *step, rule.log2e_scale, rule.window, T, S,
        tiles, problem.heads, chunks,
        0 if paged else q.stride(0), *q.stride()[1:3], batch_rows, head_rows, head_columns,
        0 if paged else out.stride(0), *out.stride()[1:3], step.block_table.stride(0) if paged else 0,
        G=problem.group, HEADS=heads, D=problem.d, BLOCK_SIZE=problem.block_size, CHUNK=problem.chunk,
        WINDOWED=problem.windowed, SPLIT=split, CONSUMERS=consumers, STAGES=schedule.stages, KV_HEADS=problem.kv_heads,
        num_warps=4, maxnreg=REGISTERS[consumers], enable_fp_fusion=False, **launch_options(q.device),
    )  # fmt: skip


@gluon.jit
def _task(
    work, cu_ptr, lens_ptr, window, T, S, tiles, G: gl.constexpr, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    CHUNK: gl.constexpr, WINDOWED: gl.constexpr, SPLIT: gl.constexpr, CONSUMERS: gl.constexpr, KV_HEADS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Locate a task. KV heads vary fastest, then tiles (the longest causal rows first), then chunks.

    Returns (first, last): its keys, empty if last <= first; (sequence, start, past, length, local): its sequence, the
    sequence's first token in the step, its earlier tokens, its tokens in the step, and the tile's first token in it;
    (kv_head, member, chunk).
    """
    BQ: gl.constexpr = 64 * CONSUMERS // HEADS
    GROUPS: gl.constexpr = (G + HEADS - 1) // HEADS
    head = work % (KV_HEADS * GROUPS)
    work = work // (KV_HEADS * GROUPS)
    tile = tiles - 1 - work % tiles
    chunk = work // tiles
    if BLOCK_SIZE == 0:
        per_sequence = (T + BQ - 1) // BQ
        sequence = tile // per_sequence
        local = tile % per_sequence * BQ
        start = T * 0
        length = T
        past = T * 0
    else:
        sequence = sequence_of(tile, cu_ptr, S, BQ, 1, WARPS)
        start = gl.load(cu_ptr + sequence)
        local = (tile - (start // BQ + sequence)) * BQ
        length = gl.load(cu_ptr + sequence + 1, mask=sequence < S, other=T) - start
        past = gl.load(lens_ptr + sequence, mask=sequence < S, other=0) - length
    first = past * 0
    last = past + gl.minimum(local + BQ, length)
    if WINDOWED:
        first = gl.maximum(past + local - window + 1, 0) // KEYS * KEYS
    if SPLIT:
        first = gl.maximum(first, chunk * CHUNK)
        last = gl.minimum(last, (chunk + 1) * CHUNK)
    if BLOCK_SIZE != 0:
        last = gl.where(sequence < S, last, first)
    last = gl.where(local < length, last, first)
    return first, last, sequence, start, past, length, local, head // GROUPS, head % GROUPS * HEADS, chunk


@gluon.jit
def _fetch_tile(desc, r0, r1, r2, r3, column, full, tile, D: gl.constexpr, PIECES: gl.constexpr):
    """Copy a block of 64 rows x D into tile; `full` completes with the last piece."""
    mbarrier.expect(full, 64 * D * 2)
    copy_tile(desc, r0, r1, r2, r3, column, full, tile, True, D, PIECES)


@gluon.jit
def _fetch(
    k_desc, v_desc, ring, plan, metadata, rows, G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, CHUNK: gl.constexpr, WINDOWED: gl.constexpr, SPLIT: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Fetch every task's keys and values into the ring; look up the rows of the next 64 keys meanwhile."""
    PIECES: gl.constexpr = 4 if BLOCK_SIZE == 16 else 2 if BLOCK_SIZE == 32 else 1
    k_tiles, v_tiles, k_full, v_full, k_free, v_free = ring
    works, tiles, window, T, S = plan
    cu_ptr, lens_ptr, tables_ptr, table_row = metadata
    batch_rows, head_rows, head_columns = rows
    filled = 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        first, last, sequence, _, _, _, _, kv_head, _, _ = _task(
            work, cu_ptr, lens_ptr, window, T, S, tiles,
            G, HEADS, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, CONSUMERS, KV_HEADS, 1,
        )  # fmt: skip
        row = kv_head * head_rows
        table_ptr = tables_ptr
        if BLOCK_SIZE == 0:
            row += sequence * batch_rows
        else:
            table_ptr += sequence.to(gl.int64) * table_row
        if last > first:
            r0 = row_of(table_ptr, first, last, batch_rows, BLOCK_SIZE, 0)
            r1 = r0
            r2 = r0
            r3 = r0
            if PIECES > 1:
                r1 = row_of(table_ptr, first, last, batch_rows, BLOCK_SIZE, 1)
            if PIECES > 2:
                r2 = row_of(table_ptr, first, last, batch_rows, BLOCK_SIZE, 2)
                r3 = row_of(table_ptr, first, last, batch_rows, BLOCK_SIZE, 3)
            for n in range(first, last, KEYS):
                stage = filled % STAGES
                phase = (filled // STAGES) & 1
                a0 = row + r0
                a1 = row + r1
                a2 = row + r2
                a3 = row + r3
                following = gl.minimum(n + KEYS, (last - 1) // KEYS * KEYS)
                r0 = row_of(table_ptr, following, last, batch_rows, BLOCK_SIZE, 0)
                if PIECES > 1:
                    r1 = row_of(table_ptr, following, last, batch_rows, BLOCK_SIZE, 1)
                if PIECES > 2:
                    r2 = row_of(table_ptr, following, last, batch_rows, BLOCK_SIZE, 2)
                    r3 = row_of(table_ptr, following, last, batch_rows, BLOCK_SIZE, 3)
                column = kv_head * head_columns
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                _fetch_tile(k_desc, a0, a1, a2, a3, column, k_full.index(stage), k_tiles.index(stage), D, PIECES)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                _fetch_tile(v_desc, a0, a1, a2, a3, column, v_full.index(stage), v_tiles.index(stage), D, PIECES)
                filled += 1


@gluon.jit
def _attend(
    W: gl.constexpr, ring, q_tiles, totals, ones, pointers, plan, metadata, c, H, chunks, strides, G: gl.constexpr,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK: gl.constexpr, WINDOWED: gl.constexpr,
    SPLIT: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Attend warpgroup W's 64 rows of every task."""
    works, tiles, window, T, S = plan
    cu_ptr, lens_ptr, _, _ = metadata
    taken = 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        first, last, sequence, start, past, length, local, kv_head, member0, chunk = _task(
            work, cu_ptr, lens_ptr, window, T, S, tiles,
            G, HEADS, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, CONSUMERS, KV_HEADS, 4,
        )  # fmt: skip
        if (last > first) | ((not SPLIT) & (local < length)):
            base = local + W * (64 // HEADS)
            place = (sequence, start, past, length, base, kv_head, member0, chunk)
            attend_tile(
                W, ring, q_tiles, totals, ones, pointers, first, last, taken - first // KEYS, place, c, window, H,
                chunks, strides, G, HEADS, D, CHUNK, WINDOWED, SPLIT, STAGES,
            )  # fmt: skip
        taken += (gl.maximum(last - first, 0) + KEYS - 1) // KEYS


@gluon.jit
def _longest(lens_ptr, S):
    """The largest of seq_lens [S]."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    longest = 0
    for s in range(0, S, 128):
        longest = gl.maximum(longest, gl.max(gl.load(lens_ptr + s + lane, mask=s + lane < S, other=0), 0))
    return longest


@gluon.jit(do_not_specialize=["window", "T", "S", "tiles", "H", "chunks"])
def hopper_attention_kernel(
    q_ptr, k_desc, v_desc, out_ptr, max_and_sum_ptr, cu_ptr, lens_ptr, table_ptr, c, window, T, S, tiles, H, chunks,
    q_batch, q_token, q_head, batch_rows, head_rows, head_columns, out_batch, out_token, out_head, table_row,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK: gl.constexpr,
    WINDOWED: gl.constexpr, SPLIT: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, KV_HEADS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Persistent programs. Arguments, tiles and results as in kernels.attention_kernel; padding rows get
    zeros (SPLIT: nothing)."""
    gl.static_assert(STAGES > 1, "the next block's keys are awaited before this block's values free their stage")
    gluon_let_next_start(PDL)
    gluon_wait_for_earlier(PDL)
    works = tiles * (KV_HEADS * ((G + HEADS - 1) // HEADS))
    if SPLIT:
        works = works * ((_longest(lens_ptr, S) + CHUNK - 1) // CHUNK)
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [CONSUMERS, 64, D], k_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 64, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 64, D], k_desc.layout)
    # The merged chunks' o is kept here, not in registers, until the next chunk.
    totals = q_tiles
    if not SPLIT:
        totals = gl.allocate_shared_memory(gl.float32, [CONSUMERS, 64, D], TOTALS)
    ones = gl.full([SUMS, 64], 1.0, k_desc.dtype, LANES)
    ones = gl.allocate_shared_memory(k_desc.dtype, [SUMS, 64], k_desc.layout, ones).permute((1, 0))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    fence_async_shared()

    ring = (k_tiles, v_tiles, k_full, v_full, k_free, v_free)
    plan = (works, tiles, window, T, S)
    metadata = (cu_ptr, lens_ptr, table_ptr, table_row)
    rows = (batch_rows, head_rows, head_columns)
    pointers = (q_ptr, out_ptr, max_and_sum_ptr)
    strides = (q_batch, q_token, q_head, out_batch, out_token, out_head)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_attend, (gl.constexpr(0), ring, q_tiles, totals, ones, pointers, plan, metadata, c, H, chunks, strides,
                       G, HEADS, D, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, CONSUMERS, STAGES, KV_HEADS)),
            (_fetch, (k_desc, v_desc, ring, plan, metadata, rows,
                      G, HEADS, D, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, CONSUMERS, STAGES, KV_HEADS)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (gl.constexpr(0), ring, q_tiles, totals, ones, pointers, plan, metadata, c, H, chunks, strides,
                       G, HEADS, D, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, CONSUMERS, STAGES, KV_HEADS)),
            (_attend, (gl.constexpr(1), ring, q_tiles, totals, ones, pointers, plan, metadata, c, H, chunks, strides,
                       G, HEADS, D, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, CONSUMERS, STAGES, KV_HEADS)),
            (_fetch, (k_desc, v_desc, ring, plan, metadata, rows,
                      G, HEADS, D, BLOCK_SIZE, CHUNK, WINDOWED, SPLIT, CONSUMERS, STAGES, KV_HEADS)),
        ], [4, 1], [240, 24])  # fmt: skip
