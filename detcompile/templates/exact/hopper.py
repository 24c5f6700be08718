"""exact_linear for Hopper GPUs and many rows: one warp fetches, one or two warpgroups multiply. Same bits as gpu.py.

Legend: M rows, N output features, K input features; DX and DW planes of digits of x and w. A program's tile has 64 rows
for each of one or two warpgroups (CONSUMERS), and BN features. The fetching warp runs ahead through a ring of STAGES
k-groups, from one tile to the next.

Both digits of x are multiplied by the same tile of w, so a k-group of two digits moves as many bytes as a bfloat16 one.
If tiles are too few to fill the GPU, K is split, and a second kernel adds the parts' integers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
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

from detcompile.config import int8_tensor_cores
from detcompile.templates.device.dependent_launch import (
    gluon_let_next_start,
    gluon_wait_for_earlier,
    launch_options,
    let_next_start,
    wait_for_earlier,
)
from detcompile.templates.device.gate import is_hopper, multiprocessors
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.exact.functions import bf16
from detcompile.templates.matmul.hopper_tile import tile_of

FEWEST_ROWS = 17  # fewer are faster in plain Triton's smaller tiles
_ROWS, _BLOCK_K = 64, 128
_LONGEST = 65536  # terms of an int32 sum of products
_LEAST_SHARE = 512  # of K in a part
_FEATURES = 512  # of a program that adds parts
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def supports(x: Tensor, w: Tensor) -> bool:
    """Return True if the kernel can multiply digits x [DX, M, K] and w [DW, N, K], both contiguous."""
    _, M, K = x.shape
    aligned = K % 16 == 0 and x.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    return M >= FEWEST_ROWS and K <= _LONGEST and aligned and is_hopper(x.device) and int8_tensor_cores()


class Tiles(NamedTuple):
    """Tiles of a product: warpgroups that multiply, features of a tile, and whether K is split."""

    consumers: int
    block_n: int
    split: bool

    @property
    def rows(self) -> int:
        return self.consumers * _ROWS


def tiles_of(x: Tensor, w: Tensor) -> Tiles:
    """Return the tiles for x [DX, M, K] and w [DW, N, K], measured on an H200."""
    (DX, M, K), N = x.shape, w.shape[1]
    consumers = 1 if M <= _ROWS else 2
    programs = multiprocessors(x.device)
    wide = DX == 1 and cdiv(M, 2 * _ROWS) * cdiv(N, 256) >= programs
    tiles = Tiles(consumers, 256 if wide else 128, False)
    return tiles._replace(split=_share(tiles, M, N, K, programs) < K)


def launch(
    tiles: Tiles,
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    kinds: Mapping[str, int],
) -> None:
    """Run the kernel: scaled products [M, N], or the integers if out is int64.

    Args:
        kinds: HAS_BIAS and RESIDUAL, as in gpu.py.
    """
    (DX, M, K), (DW, N, _) = x.shape, w.shape
    consumers, block_n, _ = tiles
    programs = multiprocessors(x.device)
    stages = (226 << 10) // (3 - consumers) // ((tiles.rows * DX + block_n * DW) * _BLOCK_K + 512)
    share = _share(tiles, M, N, K, programs) if tiles.split else cdiv(K, _BLOCK_K) * _BLOCK_K
    splits = cdiv(K, share)
    parts = out if splits == 1 else torch.empty((splits, M, N), dtype=torch.int64, device=x.device)
    work = cdiv(M, tiles.rows) * cdiv(N, block_n) * splits
    launcher(hopper_exact_kernel)[(min(work, programs * (3 - consumers)),)](
        _descriptor(x, _ROWS), _descriptor(w, block_n), x_scale, w_scale, bias, residual, parts, M, N, K, share,
        splits, DX=DX, DW=DW, **kinds, BN=block_n, BK=_BLOCK_K, GROUP=16, CONSUMERS=consumers, STAGES=stages,
        num_warps=4, maxnreg=168 if consumers == 2 else 128, enable_fp_fusion=False, **launch_options(x.device),
    )  # fmt: skip
    if splits > 1:
        launcher(_add_kernel)[(M, cdiv(N, _FEATURES))](
            parts, x_scale, w_scale, bias, residual, out, N, M * N, splits, **kinds, BN=_FEATURES, num_warps=4,
            enable_fp_fusion=False, **launch_options(x.device),
        )  # fmt: skip


def _share(tiles: Tiles, M: int, N: int, K: int, programs: int) -> int:
    """Return how much of K a program multiplies: less than K if there are fewer tiles than multiprocessors."""
    count = cdiv(M, tiles.rows) * cdiv(N, tiles.block_n)
    return cdiv(cdiv(K, max(1, min(programs // count, K // _LEAST_SHARE))), _BLOCK_K) * _BLOCK_K


def _descriptor(planes: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(planes.flatten(0, 1), [rows, _BLOCK_K], _SHARED)


@triton.jit(do_not_specialize=["splits"])
def _add_kernel(
    parts_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, N, plane, splits, HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of out [M, N] of the integers [splits, M, N], added, and scaled unless out is int64."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.int64)
    for split in range(splits):
        total += tl.load(parts_ptr + tl.cast(split, tl.int64) * plane + m * N + n, mask=n < N, other=0)
    if out_ptr.dtype.element_ty == tl.int64:
        tl.store(out_ptr + m * N + n, total, mask=n < N)
    else:
        y = total.to(tl.float32) * tl.load(x_scale_ptr + m) * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + n, mask=n < N, other=0.0)
        if RESIDUAL:
            y = tl.load(residual_ptr + m * N + n, mask=n < N, other=0.0) + y
        if RESIDUAL == 2:
            y = bf16(y)
        tl.store(out_ptr + m * N + n, y, mask=n < N)


@gluon.jit
def _fetch(
    x_desc, w_desc, ring, sizes, DX: gl.constexpr, DW: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    gluon_wait_for_earlier(PDL)
    x_tiles, w_tiles, full, free, _ = ring
    M, N, K, share, splits, tiles_m, tiles_n = sizes
    i = 0
    tiles = tiles_m * tiles_n
    for work in range(gl.program_id(0), tiles * splits, gl.num_programs(0)):
        tile_m, tile_n = tile_of(work % tiles, tiles_m, tiles_n, GROUP)
        begin = work // tiles * share
        for k in range(begin, gl.minimum(begin + share, K), BK):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (DX * 64 * CONSUMERS + DW * BN) * BK)
            for digit in gl.static_range(DW):
                tma.async_copy_global_to_shared(
                    w_desc, [digit * N + tile_n * BN, k], full.index(stage), w_tiles.index(stage * DW + digit)
                )
            for digit in gl.static_range(DX):
                for consumer in gl.static_range(CONSUMERS):
                    tma.async_copy_global_to_shared(
                        x_desc, [digit * M + (tile_m * CONSUMERS + consumer) * 64, k], full.index(stage),
                        x_tiles.index((stage * CONSUMERS + consumer) * DX + digit),
                    )  # fmt: skip
            i += 1
    gluon_let_next_start(PDL)


@gluon.jit
def _multiply(
    W: gl.constexpr, ring, pointers, sizes, DX: gl.constexpr, DW: gl.constexpr,
    HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: multiply its 64 rows of each tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    gluon_wait_for_earlier(PDL)
    x_tiles, w_tiles, full, free, turn = ring
    M, N, K, share, splits, tiles_m, tiles_n = sizes
    x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr = pointers
    i = 0
    tiles = tiles_m * tiles_n
    for work in range(gl.program_id(0), tiles * splits, gl.num_programs(0)):
        begin = work // tiles * share
        high = gl.zeros([64, BN], gl.int32, LAYOUT)
        low = high
        for k in range(begin, gl.minimum(begin + share, K), BK):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            x = x_tiles.index((stage * CONSUMERS + W) * DX)
            w = w_tiles.index(stage * DW).permute((1, 0))
            high = warpgroup_mma(x, w, high, is_async=True)
            if DX == 2:
                low = warpgroup_mma(x_tiles.index((stage * CONSUMERS + W) * DX + 1), w, low, is_async=True)
                if DW == 2:
                    low = warpgroup_mma(x, w_tiles.index(stage * DW + 1).permute((1, 0)), low, is_async=True)
                high, low = warpgroup_mma_wait(DX + DW - 1, deps=(high, low))
            else:
                high = warpgroup_mma_wait(1, deps=(high,))
            mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=k > begin)
            i += 1
        if DX == 2:
            high, low = warpgroup_mma_wait(0, deps=(high, low))
        else:
            high = warpgroup_mma_wait(0, deps=(high,))
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1)
        tile_m, tile_n = tile_of(work % tiles, tiles_m, tiles_n, GROUP)
        m = (tile_m * CONSUMERS + W) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        n = tile_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))
        if W == 1:  # the other warpgroup multiplies meanwhile
            # With fewer k-groups, the other warpgroup may be a tile ahead: this one would wait for its next turn.
            turns = (tiles * splits > gl.num_programs(0)) & (K > STAGES * BK)
            mbarrier.wait(turn, work // gl.num_programs(0) & 1, pred=turns)
        total = high.to(gl.int64) * 256 + low if DX == 2 else high
        out_at = out_ptr + m[:, None].to(gl.int64) * N + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
        if out_ptr.dtype.element_ty == gl.int64:
            gl.store(out_at + (work // tiles).to(gl.int64) * M * N, total.to(gl.int64), mask=inside)
        else:
            x_scale = gl.load(x_scale_ptr + m, mask=m < M, other=0.0)
            w_scale = gl.load(w_scale_ptr + n, mask=n < N, other=0.0)
            y = total.to(gl.float32) * x_scale[:, None] * w_scale[None, :]
            if HAS_BIAS:
                y = y + gl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :]
            if RESIDUAL:
                y = gl.load(residual_ptr + m[:, None].to(gl.int64) * N + n[None, :], mask=inside, other=0.0) + y
            if RESIDUAL == 2:
                y = bf16(y)
            gl.store(out_at, y, mask=inside)
        if W == 0 and CONSUMERS == 2:
            mbarrier.arrive(turn, count=1)


@gluon.jit(do_not_specialize=["M", "splits"])
def hopper_exact_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, M, N, K, share, splits,
    DX: gl.constexpr, DW: gl.constexpr, HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Persistent programs loop over the tiles; rows past M and features past N are multiplied and not stored."""
    tiles_m = (M + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    tiles_n = (N + BN - 1) // BN
    x_tiles = gl.allocate_shared_memory(gl.int8, [STAGES * CONSUMERS * DX, 64, BK], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(gl.int8, [STAGES * DW, BN, BK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    fence_async_shared()
    ring = (x_tiles, w_tiles, full, free, turn)
    pointers = (x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_ptr)
    sizes = (M, N, K, share, splits, tiles_m, tiles_n)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_multiply, (gl.constexpr(0), ring, pointers, sizes, DX, DW, HAS_BIAS, RESIDUAL, BN, BK, GROUP,
                         CONSUMERS, STAGES, PDL)),
            (_fetch, (x_desc, w_desc, ring, sizes, DX, DW, BN, BK, GROUP, CONSUMERS, STAGES, PDL)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (gl.constexpr(0), ring, pointers, sizes, DX, DW, HAS_BIAS, RESIDUAL, BN, BK, GROUP,
                         CONSUMERS, STAGES, PDL)),
            (_multiply, (gl.constexpr(1), ring, pointers, sizes, DX, DW, HAS_BIAS, RESIDUAL, BN, BK, GROUP,
                         CONSUMERS, STAGES, PDL)),
            (_fetch, (x_desc, w_desc, ring, sizes, DX, DW, BN, BK, GROUP, CONSUMERS, STAGES, PDL)),
        ], [4, 1], [240, 24])  # fmt: skip
