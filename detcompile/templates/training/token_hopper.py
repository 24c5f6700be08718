"""token_matmul for Hopper GPUs: one warp fetches, two warpgroups multiply. The bits of token_kernels.py.

Legend: T rows, N K features, L leaves, BT rows of a step. A program's tile has 128 features of g and 128 of x; each
warpgroup has 64 of g's.

The fetching warp runs ahead through a ring of STAGES steps, across the ends of leaves and from one output tile to the
next. The warpgroups finish a leaf one after the other. From then on one is ahead by less than the ring's size, and each
multiplies while the other adds its leaf.
"""

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from detcompile.templates.device.gate import is_hopper, multiprocessors
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.matmul.hopper_tile import tile_of
from detcompile.templates.training.token_kernels import add_leaf, carried, greater_or_nan, largest_of_rows, total_of
from detcompile.templates.training.token_schedules import TokenTiles

REGISTERS = 168  # per thread; the warpgroups take more at the fetching warp's expense
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_WIDTH = gl.constexpr(128)
_LANES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if this kernel runs there; rows of both operands must also be aligned to 16 bytes."""
    return is_hopper(device) and dtype.itemsize == 2


def launch(
    schedule: TokenTiles, g: Tensor, x: Tensor, leaves: Tensor, out: Tensor, rows_a_token: int, kinds: dict[str, int]
) -> None:
    """Run the kernel.

    Args:
        kinds: GRID, UPPER_BITS and LOWER_BITS, as in token_kernels.py.
    """
    (N, K), width, step = out.shape, _WIDTH.value, schedule.block_t
    programs = min(cdiv(N, width) * cdiv(K, width), multiprocessors(g.device))
    launcher(hopper_token_matmul_kernel)[(programs,)](
        TensorDescriptor.from_tensor(g, [step, 64], SHARED), TensorDescriptor.from_tensor(x, [step, width], SHARED),
        leaves, out, len(leaves) - 1, rows_a_token, N, K, **kinds, BT=step, GROUP=schedule.group,
        STAGES=schedule.stages, num_warps=4, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip


@gluon.jit
def _fetch(
    g_desc, x_desc, ring, leaves_ptr, L, rows_a_token, tiles_n, tiles_k, BT: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    g_tiles, x_tiles, full, free, _ = ring
    i = 0
    for work in range(gl.program_id(0), tiles_n * tiles_k, gl.num_programs(0)):
        tile_n, tile_k = tile_of(work, tiles_n, tiles_k, GROUP)
        for leaf in range(L):
            # Loaded, because Triton 3.6 takes a value that only bounds the inner loop for unchanged by the outer one.
            start = gl.load(leaves_ptr + leaf) * rows_a_token
            end = gl.load(leaves_ptr + leaf + 1) * rows_a_token
            for t in range(start, end, BT):
                stage = i % STAGES
                mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * _WIDTH * BT * 2)
                tma.async_copy_global_to_shared(x_desc, [t, tile_k * _WIDTH], full.index(stage), x_tiles.index(stage))
                for w in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        g_desc, [t, tile_n * _WIDTH + w * 64], full.index(stage), g_tiles.index(stage * 2 + w)
                    )
                i += 1


@gluon.jit
def clear_rows(tile, rows, BT: gl.constexpr):
    """Zero the rows of a tile from `rows` on; both warpgroups may do this to one tile."""
    inside = gl.arange(0, BT, layout=gl.SliceLayout(1, _LANES)) < rows
    tile.store(gl.where(inside[:, None], tile.load(_LANES), 0.0))


@gluon.jit
def _multiply(
    W: gl.constexpr, ring, leaves_ptr, out_ptr, L, rows_a_token, N, K, tiles_n, tiles_k, GRID: gl.constexpr,
    UPPER_BITS: gl.constexpr, LOWER_BITS: gl.constexpr, BT: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: 64 rows of each output tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    g_tiles, x_tiles, full, free, turn = ring
    i = 0
    turns = 0
    for work in range(gl.program_id(0), tiles_n * tiles_k, gl.num_programs(0)):
        upper = gl.zeros([64, _WIDTH], gl.int32, LAYOUT)
        lower = gl.zeros([64, _WIDTH], gl.int32, LAYOUT)
        worst = gl.zeros([64], gl.float32, gl.SliceLayout(1, LAYOUT))
        start = gl.load(leaves_ptr) * rows_a_token
        for leaf in range(L):
            end = gl.load(leaves_ptr + leaf + 1) * rows_a_token
            acc = gl.zeros([64, _WIDTH], gl.float32, LAYOUT)
            whole = start + (end - start) // BT * BT
            for t in range(start, whole, BT):
                stage = i % STAGES
                mbarrier.wait(full.index(stage), (i // STAGES) & 1)
                g = g_tiles.index(stage * 2 + W).permute((1, 0))
                acc = warpgroup_mma(g, x_tiles.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=t > start)
                i += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=whole > start)
            if whole < end:
                stage = i % STAGES
                mbarrier.wait(full.index(stage), (i // STAGES) & 1)
                clear_rows(g_tiles.index(stage * 2 + W), end - whole, BT)
                clear_rows(x_tiles.index(stage), end - whole, BT)
                fence_async_shared()
                g = g_tiles.index(stage * 2 + W).permute((1, 0))
                acc = warpgroup_mma(g, x_tiles.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(free.index(stage), count=1)
                i += 1
            # In a leaf of few steps the other could be a leaf ahead, and this would wait for its next turn.
            long = end - start > STAGES * BT
            if W == 1:  # the other warpgroup multiplies meanwhile
                mbarrier.wait(turn, turns & 1, pred=long)
            upper, lower = add_leaf(upper, lower, acc, GRID)
            worst = greater_or_nan(worst, largest_of_rows(acc, True))
            if W == 0:
                mbarrier.arrive(turn, count=1, pred=long)
            turns += long.to(gl.int32)
            if (leaf + 1) % 256 == 0:
                upper, lower = carried(upper, lower, gl.to_tensor(256), LOWER_BITS)
            start = end
        total = total_of(upper, lower, worst, L, GRID, UPPER_BITS, LOWER_BITS)
        tile_n, tile_k = tile_of(work, tiles_n, tiles_k, GROUP)
        n = tile_n * _WIDTH + W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        k = tile_k * _WIDTH + gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        gl.store(out_ptr + n[:, None].to(gl.int64) * K + k[None, :], total, mask=(n < N)[:, None] & (k < K)[None, :])


@gluon.jit(do_not_specialize=["L", "rows_a_token"])
def hopper_token_matmul_kernel(
    g_desc, x_desc, leaves_ptr, out_ptr, L, rows_a_token, N, K, GRID: gl.constexpr, UPPER_BITS: gl.constexpr,
    LOWER_BITS: gl.constexpr, BT: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """token_matmul_kernel by persistent programs, which loop over the tiles of out [N, K] float64."""
    tiles_n = (N + _WIDTH - 1) // _WIDTH
    tiles_k = (K + _WIDTH - 1) // _WIDTH
    g_tiles = gl.allocate_shared_memory(g_desc.dtype, [STAGES * 2, BT, 64], g_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BT, _WIDTH], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    ring = (g_tiles, x_tiles, full, free, turn)
    gl.warp_specialize([
        (_multiply, (gl.constexpr(0), ring, leaves_ptr, out_ptr, L, rows_a_token, N, K, tiles_n, tiles_k, GRID,
                     UPPER_BITS, LOWER_BITS, BT, GROUP, STAGES)),
        (_multiply, (gl.constexpr(1), ring, leaves_ptr, out_ptr, L, rows_a_token, N, K, tiles_n, tiles_k, GRID,
                     UPPER_BITS, LOWER_BITS, BT, GROUP, STAGES)),
        (_fetch, (g_desc, x_desc, ring, leaves_ptr, L, rows_a_token, tiles_n, tiles_k, BT, GROUP, STAGES)),
    ], [4, 1], [232, 24])  # fmt: skip
