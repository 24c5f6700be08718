"""The merge of a split's chunks in ascending order: a general kernel, and one for hopper_decode's marked chunks.

Legend: T tokens, H query heads, D head dim, (m, l, o) a chunk's maximum, sum and output, (M, L, O) those of all chunks
so far, c: the factor of a score inside exp2.

The general kernel derives the visible chunks from sequence lengths. hopper_decode marks chunks without visible keys by
a sum of -1; the kernel for marked chunks, on Hopper GPUs, gives the same bits. It copies the outputs of a batch of
chunks into shared memory while it merges the previous batch. Everything else is computed first, one chunk per lane: the
running maximum, and the scales of the previous sums and of the chunk's sums. A step of the chain is then only
multiplications and additions.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from detcompile.templates.attention.operands import AttentionLaunch, padded
from detcompile.templates.attention.scores import first_seen, join_sink, sequence_of
from detcompile.templates.device.dependent_launch import (
    gluon_let_next_start,
    gluon_wait_for_earlier,
    launch_options,
    let_next_start,
    wait_for_earlier,
)
from detcompile.templates.device.gate import multiprocessors
from detcompile.templates.device.launcher import launcher, next_power_of_2
from detcompile.templates.device.primitives import barrier

_AHEAD = 16  # chunk partials that are loaded before the first is merged
_EAGER_BYTES = 1 << 22  # up to this size all chunks are copied, visible or not, without waiting for the marks
_ROWS = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
_TILES = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))


def launch(given: AttentionLaunch) -> None:
    """Merge the partial results of a launch with a split schedule."""
    schedule, problem, rule, _, _, _, out, target, max_and_sum, step, T, S, chunks, _ = given
    if schedule.kernel == "hopper_decode":
        merge_by_marks(target, max_and_sum, out[0], rule.log2e_scale)
        return
    launcher(merge_kernel)[(T, problem.heads)](
        target, max_and_sum, out, step.cu_seqlens, step.seq_lens,
        out if rule.sinks is None else rule.sinks.contiguous(), rule.log2e_scale, rule.pre_scale, rule.window, S,
        chunks, *out.stride()[1:3], DV=problem.dv, DVP=padded(problem.dv), CHUNK=problem.chunk,
        WINDOWED=problem.windowed, CHUNKED=problem.chunked, NEEDS_SCORES=problem.needs_scores, SINKS=problem.sinks,
        AHEAD=min(_AHEAD, next_power_of_2(chunks)), num_warps=1, enable_fp_fusion=False, **launch_options(out.device),
    )  # fmt: skip


def merge_by_marks(part: Tensor, max_and_sum: Tensor, out: Tensor, c: float) -> None:
    """Merge part [T, H, chunks, D] and max_and_sum [T, H, chunks, 2] into out [T, H, D].

    part and max_and_sum are hopper_decode's, contiguous fp32. out has 16 bits and unit stride along D = 64 or 128. The
    kernel's variant depends on T, H and chunks, so the gate does not cover all of them: tests compare each variant with
    merge_kernel.
    """
    T, heads, chunks, d = part.shape
    assert d in (64, 128) and part.is_contiguous() and max_and_sum.is_contiguous() and out.stride(2) == 1
    # One warp per head and 32 chunks at a time; with few heads 64 chunks, and with many chunks one warp per 32 columns.
    few = T * heads <= multiprocessors(part.device)
    longest, width = (64 if few else 32), (32 if few and chunks > 4 else d)
    batch = min(longest, next_power_of_2(chunks))
    launcher(marked_merge_kernel)[(T, heads, d // width)](
        part, max_and_sum, out, c, chunks, out.stride(0), out.stride(1), D=d, W=width, BATCH=batch,
        BUFFERS=1 if chunks <= batch else 2, EAGER=part.numel() * part.element_size() <= _EAGER_BYTES,
        num_warps=1, enable_fp_fusion=False, **launch_options(part.device),
    )  # fmt: skip


@triton.jit
def merged(M_R, L_R, O_RD, m_R, l_R, o_RD, c):
    """Merge the running (M, L, O) with a chunk's (m, l, o). The neutral value is m = -inf, l = 0, o = 0."""
    top = tl.maximum(M_R, m_R)
    safe = tl.where(top == -float("inf"), 0.0, top)
    old = tl.exp2((M_R - safe) * c)
    new = tl.exp2((m_R - safe) * c)
    return top, L_R * old + l_R * new, O_RD * old[:, None] + o_RD * new[:, None]


@triton.jit
def quotient(O, L_R, dtype: tl.constexpr):
    """O * (1 / L) + 0.0, rounded: no negative zero, and one canonical NaN of the narrow type for nonfinite values,
    because conversions of NaN differ between kernels."""
    inverse = tl.div_rn(tl.full(L_R.shape, 1.0, tl.float32), L_R)
    y = O * inverse[:, None] + 0.0
    return tl.where(tl.abs(y) < float("inf"), y.to(dtype), tl.full(y.shape, float("nan"), dtype))


@triton.jit
def _partial(part_ptr, max_and_sum_ptr, partial, chunk, last, dv, DV: tl.constexpr):
    """(m, l, o) of a chunk; neutral values past the last chunk."""
    ok = chunk <= last + tl.zeros((1,), tl.int32)
    m = tl.load(max_and_sum_ptr + (partial + chunk) * 2 + tl.arange(0, 1), mask=ok, other=-float("inf"))
    l = tl.load(max_and_sum_ptr + (partial + chunk) * 2 + 1 + tl.arange(0, 1), mask=ok, other=0.0)
    o = tl.load(part_ptr + (partial + chunk) * DV + dv[None, :], mask=ok[:, None] & (dv < DV)[None, :], other=0.0)
    return m, l, o


@triton.jit(do_not_specialize=["S", "chunks"])
def merge_kernel(
    part_ptr, max_and_sum_ptr, out_ptr, cu_ptr, lens_ptr, sinks_ptr, c, pre_scale, window, S, chunks, out_token,
    out_head,
    DV: tl.constexpr, DVP: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
    NEEDS_SCORES: tl.constexpr, SINKS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one token (axis 0) and head (axis 1), ascending. Only chunks that the row sees were
    written."""
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
        first = tl.maximum(first_seen(pos, window, CHUNKED), 0) // CHUNK
    partial = (t.to(tl.int64) * tl.num_programs(1) + head) * chunks
    M = tl.full((1,), -float("inf"), tl.float32)
    L = tl.zeros((1,), tl.float32)
    O = tl.zeros((1, DVP), tl.float32)
    one = tl.arange(0, 1)
    last = pos // CHUNK
    for chunk in range(first, last + 1, AHEAD):  # several at a time, so that their loads overlap
        for i in tl.static_range(AHEAD):
            m, l, o = _partial(part_ptr, max_and_sum_ptr, partial, chunk + i, last, dv, DV)
            M, L, O = merged(M, L, O, m, l, o, c)
    if SINKS:
        sink = tl.load(sinks_ptr + head + one).to(tl.float32)
        L = join_sink(M, L, sink, pre_scale, NEEDS_SCORES)
    tl.store(out_row + dv[None, :], quotient(O, L, out_ptr.dtype.element_ty), mask=(dv < DV)[None, :])


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _stats(max_and_sum_ptr, first, chunk, chunks):
    """(m, l) of chunks; `first` is the row of chunk 0. Past the last chunk, the values of a chunk without visible
    keys."""
    at = max_and_sum_ptr + (first + chunk) * 2
    m = gl.load(at, mask=chunk < chunks, other=-float("inf"))
    l = gl.load(at + 1, mask=chunk < chunks, other=-1.0)
    return m, l


@gluon.jit
def _copy(
    tile, part_ptr, max_and_sum_ptr, first, chunk, chunks,
    D: gl.constexpr, W: gl.constexpr, BATCH: gl.constexpr, EAGER: gl.constexpr,
):  # fmt: skip
    """Copy the program's columns of chunks chunk..chunk + BATCH - 1 into tile [BATCH, W]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // W, W // 4], [1, 1], [1, 0])
    place = chunk + gl.arange(0, BATCH, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.program_id(2) * W + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
    wanted = place < chunks
    if not EAGER:  # loaded again, in the layout of the copies
        _, l = _stats(max_and_sum_ptr, first, place, chunks)
        wanted = l != -1.0
    pointers = part_ptr + (first + place)[:, None] * D + column[None, :]
    async_copy.async_copy_global_to_shared(tile, pointers, mask=wanted[:, None])
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["chunks"])
def marked_merge_kernel(
    part_ptr, max_and_sum_ptr, out_ptr, c, chunks, out_token, out_head,
    D: gl.constexpr, W: gl.constexpr, BATCH: gl.constexpr, BUFFERS: gl.constexpr, EAGER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Axis 0: tokens, axis 1: heads, axis 2: W columns of the output, one warp each. A chunk without keys visible to
    the token has the sum -1; a token without visible keys is padding. BUFFERS: 1 if one batch holds all chunks, else 2.
    EAGER: copy without waiting for the marks."""
    BY_COLUMN: gl.constexpr = gl.BlockedLayout([W // 32], [32], [1], [0])
    BY_CHUNK: gl.constexpr = gl.BlockedLayout([(BATCH + 31) // 32], [32], [1], [0])
    gluon_let_next_start(PDL)
    tiles = gl.allocate_shared_memory(gl.float32, [BUFFERS, BATCH, W], _TILES)
    old_scales = gl.allocate_shared_memory(gl.float32, [BATCH, 1], _ROWS)
    new_scales = gl.allocate_shared_memory(gl.float32, [BATCH, 1], _ROWS)
    sums = gl.allocate_shared_memory(gl.float32, [BATCH, 1], _ROWS)
    gluon_wait_for_earlier(PDL)
    t = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1)
    first = (t * gl.num_programs(1) + head) * chunks
    lane = gl.arange(0, BATCH, layout=BY_CHUNK)
    m, l = _stats(max_and_sum_ptr, first, lane, chunks)
    _copy(tiles.index(0), part_ptr, max_and_sum_ptr, first, 0, chunks, D, W, BATCH, EAGER)
    M = -float("inf")
    L = gl.zeros([W], gl.float32, BY_COLUMN)
    O = gl.zeros([W], gl.float32, BY_COLUMN)
    seen = 0
    for chunk in range(0, chunks, BATCH):
        m_next, l_next = _stats(max_and_sum_ptr, first, chunk + BATCH + lane, chunks)
        if BUFFERS == 2:
            following = tiles.index((chunk // BATCH + 1) % 2)
            _copy(following, part_ptr, max_and_sum_ptr, first, chunk + BATCH, chunks, D, W, BATCH, EAGER)
        unseen = l == -1.0
        seen += gl.sum(gl.where(unseen, 0, 1), 0)
        # As in merged: the maximum before and including each chunk, and the two scales.
        m = gl.where(unseen, -float("inf"), m)
        top = gl.maximum(M, gl.associative_scan(m, 0, _larger))
        before = gl.where(lane == 0, M, gl.gather(top, gl.maximum(lane - 1, 0), 0))
        safe = gl.where(top == -float("inf"), 0.0, top)
        new = gl.exp2((m - safe) * c)
        old_scales._reinterpret(gl.float32, [BATCH], _ROWS).store(gl.exp2((before - safe) * c))
        new_scales._reinterpret(gl.float32, [BATCH], _ROWS).store(new)
        sums._reinterpret(gl.float32, [BATCH], _ROWS).store(gl.where(unseen, -1.0, l * new))
        M = gl.max(top, 0)
        async_copy.wait_group(BUFFERS - 1)
        barrier()
        outputs = tiles.index(chunk // BATCH % BUFFERS)._reinterpret(gl.float32, [BATCH, W], _ROWS)
        for i in gl.static_range(BATCH):
            old = old_scales.index(i).load(BY_COLUMN)
            of_chunk = sums.index(i).load(BY_COLUMN)
            hidden = of_chunk == -1.0  # sums of visible chunks are >= 0; hidden chunks may hold anything
            L = L * old + gl.where(hidden, 0.0, of_chunk)
            O = O * old + gl.where(hidden, 0.0, outputs.index(i).load(BY_COLUMN)) * new_scales.index(i).load(BY_COLUMN)
        barrier()
        m = m_next
        l = l_next
    inverse = gl.div_rn(gl.full([W], 1.0, gl.float32, BY_COLUMN), L)  # as in quotient
    y = O * inverse + 0.0
    narrow = y.to(out_ptr.dtype.element_ty)
    narrow = gl.where(gl.abs(y) < float("inf"), narrow, gl.full([W], float("nan"), narrow.dtype, BY_COLUMN))
    narrow = gl.where(seen == 0, gl.zeros([W], narrow.dtype, BY_COLUMN), narrow)
    column = gl.program_id(2) * W + gl.arange(0, W, layout=BY_COLUMN)
    gl.store(out_ptr + t * out_token + head * out_head + column, narrow)
