"""The GEMM of kernels.py for up to eight tokens on Hopper GPUs: weights are prefetched into a ring buffer. Same bits.

Legend: M tokens, N output features, K summed features. A program loops over tiles of ROWS rows of the weights and BM
tokens. A k-group is SUB blocks of 64 columns.

With so few tokens, loading the weights takes most of the time. One warp copies k-groups into a ring buffer of STAGES,
and a warpgroup multiplies them by x. Weights that no kernel of the CUDA graph writes (`cuda_graphs.is_constant`) fill
the ring while earlier kernels still run; only x waits for these kernels.

A warpgroup product reads 64 rows. With tiles of 32 rows, the other 32 belong to the next block of the ring or lie past
its end; their results are not stored. GATED: w has the gate's features, then up's. A tile alternates eight rows of gate
and eight of up, so a thread holds both values of a feature and writes silu(gate) * up.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import libdevice

from detcompile.templates.device.cuda_graphs import is_constant
from detcompile.templates.device.dependent_launch import gluon_let_next_start, gluon_wait_for_earlier, launch_options
from detcompile.templates.device.gate import multiprocessors
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.device.primitives import LOG2_E, widened
from detcompile.templates.matmul.operands import Operands
from detcompile.templates.matmul.schedules import RingTiles

BLOCK = 64  # columns of a block: the 128 bytes of a swizzled row
_EARLY = 8  # k-groups before the end at which the next kernel may start
_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_GROUP = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
_GATED_GROUP = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5))


def launch(schedule: RingTiles, o: Operands) -> None:
    """Run the kernel. K is a multiple of BLOCK. If gated, w is [2 N, K] and N a multiple of eight."""
    (M, K), N, pitch = o.x.shape, o.out.shape[1], o.w.stride(0)
    rows, sub = schedule.block_n, schedule.block_k // BLOCK
    if schedule.gated:
        shape, strides = [K // BLOCK, N // 8, 2, 8, BLOCK], [BLOCK, 8 * pitch, N * pitch, pitch, 1]
        w_desc = TensorDescriptor(o.w, shape, strides, [sub, rows // 16, 2, 8, BLOCK], _GATED_GROUP.value)
    else:
        w_desc = TensorDescriptor(o.w, [K // BLOCK, N, BLOCK], [BLOCK, pitch, 1], [sub, rows, BLOCK], _GROUP.value)
    x_shape, x_block = [K // BLOCK, M, BLOCK], [sub, schedule.block_m, BLOCK]
    tiles = cdiv(N, rows // 2 if schedule.gated else rows)
    programs = min(tiles, multiprocessors(o.x.device))
    launcher(ring_matmul_kernel)[programs, cdiv(M, schedule.block_m)](
        w_desc, TensorDescriptor(o.x, x_shape, [BLOCK, o.x.stride(0), 1], x_block, _GROUP.value), *o.epilogue,
        schedule.stages if is_constant(o.w) else 0, _EARLY, M, N, K, o.residual_stride,
        HAS_BIAS=o.bias is not None, HAS_RESIDUAL=o.residual is not None, SUB=sub, ROWS=rows, GATED=schedule.gated,
        BM=schedule.block_m, STAGES=schedule.stages, num_warps=4, maxnreg=80, enable_fp_fusion=False,
        **launch_options(o.x.device),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["filled", "early", "M"])
def ring_matmul_kernel(
    w_desc, x_desc, out_ptr, bias_ptr, residual_ptr, filled, early, M, N, K, residual_stride,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SUB: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Axis 0: persistent programs, which loop over the tiles of N; axis 1: tiles of M. filled: stages whose weights are
    copied before the wait for earlier kernels."""
    OUT: gl.constexpr = ROWS // 2 if GATED else ROWS
    tiles = (N + OUT - 1) // OUT
    groups = (K + SUB * 64 - 1) // (SUB * 64)
    # A product reads 64 rows; with smaller tiles it also reads past the last block.
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * SUB + (1 if ROWS < 64 else 0), ROWS, 64], _TILE)
    x_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * SUB, BM, 64], _TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    ring = (w_tiles, x_tiles, full, free)
    pointers = (out_ptr, bias_ptr, residual_ptr)
    gl.warp_specialize([
        (_multiply, (ring, pointers, (M, N, residual_stride), tiles, groups,
                     HAS_BIAS, HAS_RESIDUAL, SUB, ROWS, GATED, BM, STAGES, PDL)),
        (_fetch, (w_desc, x_desc, ring, filled, early, tiles, groups, SUB, ROWS, GATED, BM, STAGES, PDL)),
    ], [1], [24])  # fmt: skip


@gluon.jit
def _fetch(
    w_desc, x_desc, ring, filled, early, tiles, groups,
    SUB: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The fetching warp: copy all k-groups of this program's tiles and of x into the ring."""
    w_tiles, x_tiles, full, free = ring
    OUT: gl.constexpr = ROWS // 2 if GATED else ROWS
    BYTES: gl.constexpr = (ROWS + BM) * SUB * 128
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    total = (tiles - pid + programs - 1) // programs * groups
    first = gl.minimum(total, filled)
    for i in range(first):
        mbarrier.expect(full.index(i), BYTES)
        _copy_w(w_desc, w_tiles, full, i, (pid + i // groups * programs) * OUT, i % groups, SUB, ROWS, GATED)
    gluon_wait_for_earlier(PDL)
    for i in range(first):
        _copy_x(x_desc, x_tiles, full, i, i % groups, SUB, BM)
    trigger = gl.maximum(total - early, 0)
    if first > trigger:
        gluon_let_next_start(PDL)
    for i in range(first, total):
        stage = i % STAGES
        group = i % groups
        if i == trigger:  # the next kernel loads weights while this one multiplies its last
            gluon_let_next_start(PDL)
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _copy_w(w_desc, w_tiles, full, stage, (pid + i // groups * programs) * OUT, group, SUB, ROWS, GATED)
        _copy_x(x_desc, x_tiles, full, stage, group, SUB, BM)


@gluon.jit
def _copy_w(w_desc, w_tiles, full, stage, n, group, SUB: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr):
    tile = w_tiles.index(stage * SUB)  # and the SUB - 1 after it
    if GATED:
        block = tile._reinterpret(w_desc.dtype, [SUB, ROWS // 16, 2, 8, 64], _GATED_GROUP)
        tma.async_copy_global_to_shared(w_desc, [group * SUB, n // 8, 0, 0, 0], full.index(stage), block)
    else:
        block = tile._reinterpret(w_desc.dtype, [SUB, ROWS, 64], _GROUP)
        tma.async_copy_global_to_shared(w_desc, [group * SUB, n, 0], full.index(stage), block)


@gluon.jit
def _copy_x(x_desc, x_tiles, full, stage, group, SUB: gl.constexpr, BM: gl.constexpr):
    block = x_tiles.index(stage * SUB)._reinterpret(x_desc.dtype, [SUB, BM, 64], _GROUP)
    tma.async_copy_global_to_shared(x_desc, [group * SUB, gl.program_id(1) * BM, 0], full.index(stage), block)


@gluon.jit
def _multiply(
    ring, pointers, sizes, tiles, groups,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SUB: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warpgroup: sum each tile's k-groups in ascending order and store the tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    OUT: gl.constexpr = ROWS // 2 if GATED else ROWS
    w_tiles, x_tiles, full, free = ring
    gluon_wait_for_earlier(PDL)
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([64, BM], gl.float32, LAYOUT)
        for group in range(groups):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            for s in gl.static_range(SUB):
                w = w_tiles.index(stage * SUB + s)._reinterpret(w_tiles.dtype, [64, 64], _TILE)
                acc = warpgroup_mma(w, x_tiles.index(stage * SUB + s).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(SUB, deps=(acc,))
            mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=group > 0)
            i += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1)
        _finish(acc, pointers, sizes, tile * OUT, HAS_BIAS, HAS_RESIDUAL, OUT, GATED, BM)


@gluon.jit
def _finish(
    acc, pointers, sizes, first_n,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, OUT: gl.constexpr, GATED: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    """Store OUT features as kernels.store_tile does: round(residual + round(acc + bias)); gated: gate_gpu.silu_mul."""
    out_ptr, bias_ptr, residual_ptr = pointers
    M, N, residual_stride = sizes
    if HAS_BIAS:
        of_row = first_n + gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))[:, None]
        acc = acc + gl.load(bias_ptr + of_row, mask=of_row < N, other=0.0).to(gl.float32)
    y = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        gate, up = y.reshape([4, 2, 8, BM]).permute((0, 2, 3, 1)).split()
        gate = gate.reshape([32, BM]).to(gl.float32)
        up = up.reshape([32, BM]).to(gl.float32)
        silu = libdevice.fast_dividef(gate, 1.0 + gl.exp2(gate * -LOG2_E)).to(y.dtype).to(gl.float32)
        y = (silu * up).to(y.dtype)
    row = gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout))[:, None]
    m = gl.program_id(1) * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, y.type.layout))[None, :]
    n = first_n + row
    inside = (m < M) & (n < N) & (row < OUT)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + m.to(gl.int64) * residual_stride + n, mask=inside, other=0.0)
        y = (widened(residual, y.dtype) + y.to(gl.float32)).to(y.dtype)
    gl.store(out_ptr + m.to(gl.int64) * N + n, y, mask=inside)
