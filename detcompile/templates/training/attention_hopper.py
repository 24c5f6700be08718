"""Gradients of packed attention for Hopper GPUs: one warp fetches, two warpgroups multiply. The bits of
attention_kernels.py.

Legend: T tokens, H query heads, G query heads of one KV head, D head dim (64 or 128), c = scale * log2(e). A program
has 128 queries (dq) or 128 keys (dk and dv), 64 for each warpgroup.

The fetching warp fills a ring of STAGES through tensor descriptors. `full` signals that a stage holds its tiles, `free`
that both warpgroups are done with them. Tiles are read past a sequence's end; rows there are set to zero before they
are multiplied. dk and dv compute scores as keys x queries: the weights are then in the registers from which a warpgroup
multiplies them by g and q.
"""

from collections.abc import Sequence

import torch
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

from detcompile.templates.attention.hopper import TOTALS
from detcompile.templates.attention.hopper_blocks import descriptor, has_rows, row_steps, sequence_of
from detcompile.templates.attention.hopper_tile import LANES
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.gate import is_hopper
from detcompile.templates.device.launcher import launcher
from detcompile.templates.device.primitives import LOG2_E
from detcompile.templates.training.attention_kernels import add_head
from detcompile.templates.training.attention_schedules import GradientTiles
from detcompile.templates.training.token_hopper import REGISTERS, clear_rows

TILE = gl.constexpr(128)  # queries or keys of a program; keys of a stage of dq
_HALF = gl.constexpr(64)  # queries or keys of a warpgroup; queries of a stage of dk and dv
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))


def supports(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    """Return True if these kernels can run; g must be contiguous and aligned to 16 bytes."""
    d = q.shape[2]
    if not is_hopper(q.device) or q.element_size() != 2 or d not in (64, 128) or v.shape[2] != d:
        return False
    if rule.window or rule.attention_chunk or rule.needs_scores:
        return False
    return all(has_rows(rows[None]) for rows in (q, k, v))


def query_gradient(
    schedule: GradientTiles, grid: tuple[int, int], operands: Sequence[Tensor], cu_seqlens: Tensor,
    rule: AttentionRule, dq: Tensor,
) -> None:  # fmt: skip
    """Write dq; the arguments are those of attention_gpu.query_gradient."""
    g, q, k, v, lse, delta = operands
    launcher(hopper_dq_kernel)[grid](
        *(descriptor(rows[None], _HALF.value) for rows in (g, q)),
        *(descriptor(rows[None], TILE.value) for rows in (k, v)), lse, delta, cu_seqlens, dq, rule.log2e_scale,
        rule.scale, len(q), len(cu_seqlens) - 1, q.shape[1], *_steps(q, k, v),
        G=q.shape[1] // k.shape[1], D=q.shape[2], STAGES=schedule.stages, num_warps=4, maxnreg=REGISTERS,
        enable_fp_fusion=False,
    )  # fmt: skip


def key_gradients(
    schedule: GradientTiles, grid: tuple[int, int], operands: Sequence[Tensor], cu_seqlens: Tensor,
    rule: AttentionRule, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Write dk and dv; the arguments are those of attention_gpu.key_gradients."""
    g, q, k, v, lse, delta = operands
    total = torch.empty_like(dv, dtype=torch.float32) if q.shape[1] > k.shape[1] else dv
    launcher(hopper_dkdv_kernel)[grid](
        *(descriptor(rows[None], _HALF.value) for rows in (g, q, k, v)), lse, delta, cu_seqlens, dk, dv,
        total, rule.log2e_scale, rule.scale, len(q), len(cu_seqlens) - 1, *_steps(q, k, v),
        G=q.shape[1] // k.shape[1], D=q.shape[2], KV_HEADS=k.shape[1], STAGES=schedule.stages, num_warps=4,
        maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip


def _steps(*operands: Tensor) -> tuple[int, ...]:
    """Return the rows and the columns of a descriptor from one head to the next, of each operand."""
    return tuple(step for rows in operands for step in row_steps(rows[None])[1:])


@gluon.jit
def _place(tile, cu_ptr, S, T):
    """Return the tile's sequence, the sequence's first token in the step, its length, and the tile's first token in the
    sequence. Sequence S is the padding."""
    sequence = sequence_of(tile, cu_ptr, S, TILE, 1, 4)
    start = gl.load(cu_ptr + sequence)
    length = gl.load(cu_ptr + sequence + 1, mask=sequence < S, other=T) - start
    return sequence, start, length, (tile - (start // TILE + sequence)) * TILE


@gluon.jit
def _write_zeros(out_ptr, start, length, first, heads, head, D: gl.constexpr):
    """Write zeros to the tile's rows of out [T, heads, D]."""
    row = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, LANES))
    at = ((start + row).to(gl.int64) * heads + head)[:, None] * D
    at += gl.arange(0, D, layout=gl.SliceLayout(0, LANES))[None, :]
    gl.store(out_ptr + at, gl.zeros([TILE, D], out_ptr.dtype.element_ty, LANES), mask=(row < length)[:, None])


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """Barriers of the program's fixed tiles, and of each stage of the ring."""
    fixed_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(fixed_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    return fixed_full, full, free


@gluon.jit
def _copy(desc, row, column, full, tile, ROWS: gl.constexpr, D: gl.constexpr):
    """Copy ROWS x D into tile; `full` already expects the bytes."""
    pieces = tile._reinterpret(desc.dtype, [D // 64, ROWS, 64], desc.layout)
    for half in gl.static_range(D // 64):
        tma.async_copy_global_to_shared(desc, [row, column + half * 64], full, pieces.index(half))


@gluon.jit
def _received(a_tiles, b_tiles, full, i, n, length, ROWS: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr):
    """Wait for the ring's i-th tiles, which begin at token n, and return them; PARTIAL: with zeros past the length."""
    stage = i % STAGES
    a = a_tiles.index(stage)
    b = b_tiles.index(stage)
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    if PARTIAL:
        if n + ROWS > length:
            clear_rows(a, length - n, ROWS)
            clear_rows(b, length - n, ROWS)
            fence_async_shared()
    return a, b


@gluon.jit
def _fetch_keys(
    k_desc, v_desc, g_desc, q_desc, fixed, ring, place, head, steps, G: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch the program's queries, then keys downwards from the diagonal."""
    g_tiles, q_tiles, fixed_full = fixed
    k_tiles, v_tiles, full, free = ring
    start, length, first = place
    q_rows, q_columns, k_rows, k_columns, v_rows, v_columns = steps
    kv_head = head // G
    if first < length:
        mbarrier.expect(fixed_full, 2 * TILE * D * 2)
        for w in gl.static_range(2):
            row = start + first + w * _HALF
            _copy(g_desc, row, head * D, fixed_full, g_tiles.index(w), _HALF, D)
            _copy(q_desc, head * q_rows + row, head * q_columns, fixed_full, q_tiles.index(w), _HALF, D)
        k_row = kv_head * k_rows + start + first
        v_row = kv_head * v_rows + start + first
        for i in range(first // TILE + 1):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * TILE * D * 2)
            row = k_row - i * TILE
            _copy(k_desc, row, kv_head * k_columns, full.index(stage), k_tiles.index(stage), TILE, D)
            row = v_row - i * TILE
            _copy(v_desc, row, kv_head * v_columns, full.index(stage), v_tiles.index(stage), TILE, D)


@gluon.jit
def _add_keys(
    dq, i, n, length, pos, g, q, lse, delta, ring, c, D: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr
):
    """Return dq plus the sum over keys n..n + 127, which has its own accumulator."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_L: gl.constexpr = dq.type.layout
    k_tiles, v_tiles, full, free = ring
    stage = i % STAGES
    k, v = _received(k_tiles, v_tiles, full, i, n, length, TILE, STAGES, PARTIAL)
    zeros = gl.zeros([_HALF, TILE], gl.float32, S_L)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(g, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * c - lse[:, None])
    if PARTIAL:
        p = gl.where((n + gl.arange(0, TILE, layout=gl.SliceLayout(0, S_L)))[None, :] <= pos[:, None], p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(k.dtype), gl.DotOperandLayout(0, O_L, 2))
    part = gl.zeros([_HALF, D], gl.float32, O_L)
    part = warpgroup_mma_wait(0, deps=(warpgroup_mma(ds, k, part, use_acc=False, is_async=True),))
    mbarrier.arrive(free.index(stage), count=1)
    return dq + part


@gluon.jit
def _sum_keys(
    W: gl.constexpr, fixed, ring, place, pointers, head, c, scale, T, H, D: gl.constexpr, STAGES: gl.constexpr
):
    """dq of warpgroup W's 64 queries."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16]))
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    g_tiles, q_tiles, fixed_full = fixed
    lse_ptr, delta_ptr, dq_ptr = pointers
    start, length, first = place
    if first < length:
        pos = first + W * _HALF + gl.arange(0, _HALF, layout=ROW)
        of_head = head.to(gl.int64) * T + start
        lse = gl.load(lse_ptr + of_head + pos, mask=pos < length, other=0.0) * LOG2_E
        delta = gl.load(delta_ptr + of_head + pos, mask=pos < length, other=0.0)
        dq = gl.zeros([_HALF, D], gl.float32, O_L)
        g = g_tiles.index(W)
        q = q_tiles.index(W)
        mbarrier.wait(fixed_full, 0)
        dq = _add_keys(dq, 0, first, length, pos, g, q, lse, delta, ring, c, D, STAGES, True)
        for i in range(1, first // TILE + 1):
            dq = _add_keys(dq, i, first - i * TILE, length, pos, g, q, lse, delta, ring, c, D, STAGES, False)
        pos = first + W * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, O_L))
        at = ((start + pos).to(gl.int64) * H + head)[:, None] * D
        at += gl.arange(0, D, layout=gl.SliceLayout(0, O_L))[None, :]
        gl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(pos < length)[:, None])


@gluon.jit(do_not_specialize=["T", "S"])
def hopper_dq_kernel(
    g_desc, q_desc, k_desc, v_desc, lse_ptr, delta_ptr, cu_ptr, dq_ptr, c, scale, T, S, H, q_rows, q_columns, k_rows,
    k_columns, v_rows, v_columns, G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of queries, axis 1: heads. Arguments and result as in attention_kernels.dq_kernel."""
    head = gl.program_id(1)
    # The longest first.
    sequence, start, length, first = _place(gl.num_programs(0) - 1 - gl.program_id(0), cu_ptr, S, T)
    if sequence == S:
        _write_zeros(dq_ptr, start, length, first, H, head, D)
    place = (start, gl.where(sequence == S, 0, length), first)
    g_tiles = gl.allocate_shared_memory(g_desc.dtype, [2, _HALF, D], g_desc.layout)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, _HALF, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, D], v_desc.layout)
    fixed_full, full, free = _barriers(STAGES)
    fixed = (g_tiles, q_tiles, fixed_full)
    ring = (k_tiles, v_tiles, full, free)
    pointers = (lse_ptr, delta_ptr, dq_ptr)
    steps = (q_rows, q_columns, k_rows, k_columns, v_rows, v_columns)
    gl.warp_specialize([
        (_sum_keys, (gl.constexpr(0), fixed, ring, place, pointers, head, c, scale, T, H, D, STAGES)),
        (_sum_keys, (gl.constexpr(1), fixed, ring, place, pointers, head, c, scale, T, H, D, STAGES)),
        (_fetch_keys, (k_desc, v_desc, g_desc, q_desc, fixed, ring, place, head, steps, G, D, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _fetch_queries(
    k_desc, v_desc, g_desc, q_desc, lse_ptr, delta_ptr, fixed, ring, place, kv_head, T, steps, G: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch the program's keys, then each head's queries upwards from the diagonal, with lse * log2(e) and delta."""
    k_tiles, v_tiles, fixed_full = fixed
    g_tiles, q_tiles, lse_rows, delta_rows, full, free = ring
    start, length, first = place
    q_rows, q_columns, k_rows, k_columns, v_rows, v_columns = steps
    PAIRS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    if first < length:
        mbarrier.expect(fixed_full, 2 * TILE * D * 2)
        for w in gl.static_range(2):
            row = start + first + w * _HALF
            _copy(k_desc, kv_head * k_rows + row, kv_head * k_columns, fixed_full, k_tiles.index(w), _HALF, D)
            _copy(v_desc, kv_head * v_rows + row, kv_head * v_columns, fixed_full, v_tiles.index(w), _HALF, D)
        i = 0
        for head in range(kv_head * G, kv_head * G + G):
            for n in range(first, length, _HALF):
                stage = i % STAGES
                row = start + n
                pos = n + gl.arange(0, _HALF, layout=PAIRS)
                at = gl.cast(head, gl.int64) * T + start + pos
                lse = gl.load(lse_ptr + at, mask=pos < length, other=0.0) * LOG2_E
                delta = gl.load(delta_ptr + at, mask=pos < length, other=0.0)
                mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
                lse_rows.index(stage).store(lse)
                delta_rows.index(stage).store(delta)
                mbarrier.expect(full.index(stage), 2 * _HALF * D * 2)
                _copy(q_desc, head * q_rows + row, head * q_columns, full.index(stage), q_tiles.index(stage), _HALF, D)
                _copy(g_desc, row, head * D, full.index(stage), g_tiles.index(stage), _HALF, D)
                i += 1


@gluon.jit
def _add_queries(dk, dv, i, n, length, key, k, v, ring, c, STAGES: gl.constexpr, PARTIAL: gl.constexpr):
    """Add queries n..n + 63 to dk and dv; queries past the sequence's end add zeros."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    g_tiles, q_tiles, lse_rows, delta_rows, full, free = ring
    stage = i % STAGES
    g, q = _received(g_tiles, q_tiles, full, i, n, length, _HALF, STAGES, PARTIAL)
    zeros = gl.zeros([_HALF, _HALF], gl.float32, S_L)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, g.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    lse = lse_rows.index(stage).load(COLUMN)
    p = gl.exp2(s * c - lse[None, :])
    if PARTIAL:
        pos = n + gl.arange(0, _HALF, layout=COLUMN)
        p = gl.where(key[:, None] <= pos[None, :], p, 0.0)
    dv = warpgroup_mma(gl.convert_layout(p.to(g.dtype), P_L), g, dv, is_async=True)
    # This wait returns at once. It is a branch that keeps ptxas from moving the loads of delta up to those of lse,
    # which would spill registers.
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    delta = delta_rows.index(stage).load(COLUMN)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - delta[None, :])
    dk = warpgroup_mma(gl.convert_layout(ds.to(q.dtype), P_L), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(free.index(stage), count=1)
    return dk, dv


@gluon.jit
def _sum_queries(
    W: gl.constexpr, fixed, ring, totals, place, pointers, kv_head, c, scale, G: gl.constexpr, D: gl.constexpr,
    KV_HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of warpgroup W's 64 keys."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_tiles, v_tiles, fixed_full = fixed
    dk_ptr, dv_ptr, dv_total_ptr = pointers
    start, length, first = place
    if first < length:
        key = first + W * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, S_L))
        k = k_tiles.index(W)
        v = v_tiles.index(W)
        # Queries in [begin, whole) see every key of the tile.
        begin = gl.minimum(first + TILE, length)
        whole = gl.maximum(begin, length // _HALF * _HALF)
        i = 0
        mbarrier.wait(fixed_full, 0)
        for member in range(G):
            dk = gl.zeros([_HALF, D], gl.float32, O_L)
            dv = gl.zeros([_HALF, D], gl.float32, O_L)
            for n in range(first, begin, _HALF):
                dk, dv = _add_queries(dk, dv, i, n, length, key, k, v, ring, c, STAGES, True)
                i += 1
            for n in range(begin, whole, _HALF):
                dk, dv = _add_queries(dk, dv, i, n, length, key, k, v, ring, c, STAGES, False)
                i += 1
            if whole < length:
                dk, dv = _add_queries(dk, dv, i, whole, length, key, k, v, ring, c, STAGES, True)
                i += 1
            row = first + W * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, O_L))
            at = ((start + row).to(gl.int64) * KV_HEADS + kv_head)[:, None] * D
            at += gl.arange(0, D, layout=gl.SliceLayout(0, O_L))[None, :]
            ok = (row < length)[:, None]
            if G > 1:
                if member > 0:
                    dk = totals.index(W).load(O_L) + dk
            if G == 1 or member == G - 1:
                gl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=ok)
            else:
                totals.index(W).store(dk)
            add_head(dv_total_ptr, dv_ptr, at, ok, dv, 1.0, member, G)


@gluon.jit(do_not_specialize=["T", "S"])
def hopper_dkdv_kernel(
    g_desc, q_desc, k_desc, v_desc, lse_ptr, delta_ptr, cu_ptr, dk_ptr, dv_ptr, dv_total_ptr, c, scale, T, S,
    q_rows, q_columns, k_rows, k_columns, v_rows, v_columns, G: gl.constexpr, D: gl.constexpr,
    KV_HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of keys, axis 1: KV heads. Arguments and results as in attention_kernels.dkdv_kernel."""
    kv_head = gl.program_id(1)
    sequence, start, length, first = _place(gl.program_id(0), cu_ptr, S, T)
    if sequence == S:
        _write_zeros(dk_ptr, start, length, first, KV_HEADS, kv_head, D)
        _write_zeros(dv_ptr, start, length, first, KV_HEADS, kv_head, D)
    place = (start, gl.where(sequence == S, 0, length), first)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, _HALF, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [2, _HALF, D], v_desc.layout)
    g_tiles = gl.allocate_shared_memory(g_desc.dtype, [STAGES, _HALF, D], g_desc.layout)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, _HALF, D], q_desc.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, _HALF], _VECTOR)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, _HALF], _VECTOR)
    fixed_full, full, free = _barriers(STAGES)
    totals = k_tiles  # not used
    if G > 1:  # of dk over heads; those of dv do not fit and are in global memory
        totals = gl.allocate_shared_memory(gl.float32, [2, _HALF, D], TOTALS)
    fixed = (k_tiles, v_tiles, fixed_full)
    ring = (g_tiles, q_tiles, lse_rows, delta_rows, full, free)
    pointers = (dk_ptr, dv_ptr, dv_total_ptr)
    steps = (q_rows, q_columns, k_rows, k_columns, v_rows, v_columns)
    gl.warp_specialize([
        (_sum_queries, (gl.constexpr(0), fixed, ring, totals, place, pointers, kv_head, c, scale,
                        G, D, KV_HEADS, STAGES)),
        (_sum_queries, (gl.constexpr(1), fixed, ring, totals, place, pointers, kv_head, c, scale,
                        G, D, KV_HEADS, STAGES)),
        (_fetch_queries, (k_desc, v_desc, g_desc, q_desc, lse_ptr, delta_ptr, fixed, ring, place, kv_head, T, steps,
                          G, D, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
