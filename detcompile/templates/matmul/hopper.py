"""The GEMM of kernels.py for Hopper GPUs: one warp fetches, one or two warpgroups multiply. Same bits.

Legend: M tokens, N output features, K summed features. A is the operand of 64 rows a warpgroup (tokens, or features if
SWAP), B the other one, with BB rows. A program has CONSUMERS warpgroups, that share the tile of B it fetches. A width
that is no power of two, and then fills a wave of multiprocessors better, is BB rows of B and BC more.

The fetching warp runs ahead through a ring of STAGES k-groups, over the leaves of the tree and from one output tile
to the next, so that neither a leaf's end nor an epilogue stops the loads. Two warpgroups finish a tile one after the
other: from then on one is ahead, by less than the ring holds, and each multiplies while the other one writes.

The node that is being summed is in registers, those that wait for a sibling in shared memory: a tree costs a chain of
additions, and no second launch.

GATED: B is a gate's features and behind them as many of what it lets through. A program takes BB of either, sums both
and writes silu(gate) * up alone.
"""

import functools

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
from triton.language.extra import libdevice

from detcompile.templates.device.dependent_launch import (
    fetch_ahead,
    gluon_let_next_start,
    gluon_wait_for_earlier,
    launch_options,
)
from detcompile.templates.device.exponential import LOG2_E
from detcompile.templates.device.launcher import launcher
from detcompile.templates.device.widening import widened

__all__ = ["hopper_matmul_kernel", "launch", "supports"]

ROWS = 64
_AHEAD_BYTES = 16 << 20  # of weights, brought into the L2 cache while the kernel before ends
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

TOTALS = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))


@functools.cache
def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this kernel runs there; operands must also suit tensor descriptors, contiguous along K."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and dtype.itemsize == 2


def launch(
    x: Tensor,  # [M, K]
    w: Tensor,  # [N, K], or [2 N, K] if gated
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,  # [M, N]
    radices: dict[str, int],  # R0..R3, root first
    leaf_k: int,
    programs: int,
    block_a: int,  # 64 or 128
    block_b: int,  # a power of two, or the sum of two; rows of B, of gate and up together
    block_k: int,
    stages: int,
    group: int,
    swapped: bool,
    gated: bool,
) -> None:
    """Run the kernel. leaf_k is a multiple of block_k, or there is one leaf alone."""
    a, b = (w, x) if swapped else (x, w)
    (M, K), N = x.shape, out.shape[1]
    consumers = block_a // ROWS
    stored = not swapped and out.element_size() == 2 and N % 8 == 0
    block_c = block_b // 2 if gated else block_b - (1 << block_b.bit_length() - 1)
    block_b -= block_c
    b_desc = c_desc = _descriptor(b, [block_b, block_k])
    out_desc = rest_desc = _descriptor(out, [ROWS, block_b]) if stored else out
    ahead = min(K, _AHEAD_BYTES // (programs * block_a * 2)) // 64 * 64 if swapped else 0  # of each row
    if block_c:
        c_desc = _descriptor(b, [block_c, block_k])
        rest_desc = _descriptor(out, [ROWS, block_c]) if stored and not gated else out
    launcher(hopper_matmul_kernel)[(programs,)](
        _descriptor(a, [ROWS, block_k]), b_desc, c_desc, out_desc, rest_desc, out,
        out if bias is None else bias, out if residual is None else residual, a, a.stride(0), ahead * 2,
        M, N, leaf_k, K // leaf_k, 0 if residual is None else residual.stride(0),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, STORED=stored, **radices,
        BB=block_b, BC=block_c, BK=block_k, GROUP=group, SWAP=swapped, GATED=gated, CONSUMERS=consumers,
        STAGES=stages, num_warps=4, maxnreg=_registers(consumers, block_b + block_c), enable_fp_fusion=False,
        **launch_options(x.device),
    )  # fmt: skip


def _registers(consumers: int, width: int) -> int:
    """A thread's share, which the warpgroups exceed at the fetching warp's cost. Little is left to kernels beside."""
    if consumers == 2:
        return 168
    return 168 if width > 128 else 128 if width > 64 else 80


def _descriptor(rows: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, block, _layout(tuple(block), rows.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _TYPES[dtype])


@gluon.jit
def _tile_of(work, tiles_m, tiles_n, GROUP: gl.constexpr):
    """GROUP tiles of M share their weights in L2 before N moves on."""
    width = GROUP * tiles_n
    first = work // width * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + work % width % height, work % width // height


@gluon.jit
def _fetch(
    a_desc, b_desc, c_desc, ring, weights, tiles_m, tiles_n, leaf_k, leaves, BB: gl.constexpr, BC: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, SWAP: gl.constexpr, GATED: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    a_tiles, b_tiles, c_tiles, full, free = ring
    a_ptr, a_pitch, ahead, N = weights
    if PDL and SWAP:
        _, tile_n = _tile_of(gl.program_id(0), tiles_m, tiles_n, GROUP)
        row = tile_n * (64 * CONSUMERS) + gl.arange(0, 64 * CONSUMERS, layout=gl.BlockedLayout([1], [32], [1], [0]))
        fetch_ahead(a_ptr + row.to(gl.int64) * a_pitch, ahead, (row < N) & (ahead > 0))
    gluon_wait_for_earlier(PDL)
    groups = (leaf_k + BK - 1) // BK * leaves
    i = 0
    for work in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_of(work, tiles_m, tiles_n, GROUP)
        if SWAP:
            a_row = tile_n * (64 * CONSUMERS)
            b_row = tile_m * BB
        else:
            a_row = tile_m * (64 * CONSUMERS)
            b_row = tile_n * (BB if GATED else BB + BC)
        c_row = b_row + (N if GATED else BB)
        for group in range(groups):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (64 * CONSUMERS + BB + BC) * BK * 2)
            tma.async_copy_global_to_shared(b_desc, [b_row, group * BK], full.index(stage), b_tiles.index(stage))
            if BC > 0:
                tma.async_copy_global_to_shared(
                    c_desc, [c_row, group * BK], full.index(stage), c_tiles.index(stage)
                )
            for consumer in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    a_desc, [a_row + consumer * 64, group * BK], full.index(stage),
                    a_tiles.index(stage * CONSUMERS + consumer),
                )  # fmt: skip
            i += 1
    gluon_let_next_start(PDL)  # not before: what the next kernel fetches ahead would be gone when it is wanted


@gluon.jit
def _close_leaf(
    acc, leaf, node, held, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, R3: gl.constexpr, NODE: gl.constexpr
):
    """matmul_kernels.close_leaf: one leaf more. held: the nodes that wait for a sibling, by level, from `NODE` on.

    The node returned is the whole sum after the last leaf; a node put into `held` is not looked at again in registers.
    """
    if leaf % R3 != 0:
        acc = node + acc
    if R2 * R1 * R0 > 1:
        if leaf % R3 == R3 - 1:
            done = leaf // R3
            if done % R2 != 0:
                acc = held.index(NODE).load(acc.type.layout) + acc
            if done % R2 != R2 - 1:
                held.index(NODE).store(acc)
            else:
                if R1 * R0 > 1:
                    done = done // R2
                    if done % R1 != 0:
                        acc = held.index(NODE + 1).load(acc.type.layout) + acc
                    if done % R1 != R1 - 1:
                        held.index(NODE + 1).store(acc)
                    else:
                        if R0 > 1:
                            if done // R1 != 0:
                                acc = held.index(NODE + 2).load(acc.type.layout) + acc
                            if done // R1 != R0 - 1:
                                held.index(NODE + 2).store(acc)
    return acc


@gluon.jit
def _multiply(
    W: gl.constexpr, ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, STORED: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr,
    R2: gl.constexpr, R3: gl.constexpr, LEVELS: gl.constexpr, BB: gl.constexpr, BC: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, SWAP: gl.constexpr, GATED: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: 64 rows of A times the tile of B, for each output tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BB, 16])
    REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BC if BC > 0 else 8, 16])
    a_tiles, b_tiles, c_tiles, full, free = ring
    out_tiles, out_desc, rest_tiles, rest_desc, turn = outs
    gluon_wait_for_earlier(PDL)
    groups = (leaf_k + BK - 1) // BK
    i = 0
    for work in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        node = gl.zeros([64, BB], gl.float32, LAYOUT)
        rest = gl.zeros([64, BC if BC > 0 else 8], gl.float32, REST)
        for leaf in range(leaves):
            acc = gl.zeros([64, BB], gl.float32, LAYOUT)
            rest = gl.zeros([64, BC if BC > 0 else 8], gl.float32, REST)
            for group in range(groups):
                stage = i % STAGES
                mbarrier.wait(full.index(stage), (i // STAGES) & 1)
                a = a_tiles.index(stage * CONSUMERS + W)
                acc = warpgroup_mma(a, b_tiles.index(stage).permute((1, 0)), acc, is_async=True)
                if BC > 0:
                    rest = warpgroup_mma(a, c_tiles.index(stage).permute((1, 0)), rest, is_async=True)
                    acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
                else:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=group > 0)
                i += 1
            acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
            mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1)
            if R0 * R1 * R2 * R3 > 1:
                node = _close_leaf(acc, leaf, node, held, R0, R1, R2, R3, W * LEVELS)
            else:
                node = acc
        tile_m, tile_n = _tile_of(work, tiles_m, tiles_n, GROUP)
        if SWAP:
            m = tile_m * BB
            n = tile_n * (64 * CONSUMERS) + W * 64
        else:
            m = tile_m * (64 * CONSUMERS) + W * 64
            n = tile_n * (BB if GATED else BB + BC)
        if W == 1:
            mbarrier.wait(turn, work // gl.num_programs(0) & 1, pred=tiles_m * tiles_n > gl.num_programs(0))
        _finish(
            node, rest if GATED else node, out_tiles.index(W * LEVELS * 2 if LEVELS > 0 else W), out_desc, pointers,
            sizes, m, n, LAYOUT, HAS_BIAS, HAS_RESIDUAL, STORED, LEVELS, BB, SWAP, GATED,
        )  # fmt: skip
        if BC > 0 and not GATED:
            _finish(
                rest, rest, rest_tiles.index(W), rest_desc, pointers, sizes, m, n + BB, REST,
                HAS_BIAS, HAS_RESIDUAL, STORED, LEVELS, BC, SWAP, GATED,
            )  # fmt: skip
        if W == 0 and CONSUMERS == 2:
            mbarrier.arrive(turn, count=1)
    if STORED:
        tma.store_wait(0)


@gluon.jit
def _finish(
    acc, up, tile, out_desc, pointers, sizes, first_m, first_n, LAYOUT: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, STORED: gl.constexpr, LEVELS: gl.constexpr, WIDTH: gl.constexpr, SWAP: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """matmul_kernels.store_tile: out = round(residual + round(acc + bias)), from row first_m, column first_n on.

    Gated: out = silu_mul(round(acc), round(up)), gate_gpu's.
    """
    out_ptr, bias_ptr, residual_ptr = pointers
    M, N, residual_stride = sizes
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if SWAP:
        m = first_m + column
        n = first_n + row
    else:
        m = first_m + row
        n = first_n + column
    if HAS_BIAS:
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    y = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        gate = y.to(gl.float32)
        silu = libdevice.fast_dividef(gate, 1.0 + gl.exp2(gate * -LOG2_E)).to(y.dtype).to(gl.float32)
        y = (silu * up.to(y.dtype).to(gl.float32)).to(y.dtype)
    inside = (m < M) & (n < N)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + m.to(gl.int64) * residual_stride + n, mask=inside, other=0.0)
        y = (widened(residual, y.dtype) + y.to(gl.float32)).to(y.dtype)
    if STORED:
        tma.store_wait(0)
        tile.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [first_m, first_n], tile)
        if LEVELS > 0:
            tma.store_wait(0)
    else:
        gl.store(out_ptr + m.to(gl.int64) * N + n, y, mask=inside)


@gluon.jit(do_not_specialize=["M", "ahead"])
def hopper_matmul_kernel(
    a_desc, b_desc, c_desc, out_desc, rest_desc, out_ptr, bias_ptr, residual_ptr, a_ptr, a_pitch, ahead,
    M, N, leaf_k, leaves, residual_stride,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, STORED: gl.constexpr,
    R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, R3: gl.constexpr,
    BB: gl.constexpr, BC: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, SWAP: gl.constexpr,
    GATED: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Persistent programs walk the output tiles."""
    BM: gl.constexpr = BB if SWAP else 64 * CONSUMERS
    BN: gl.constexpr = 64 * CONSUMERS if SWAP else BB if GATED else BB + BC
    LEVELS: gl.constexpr = (1 if R2 > 1 else 0) + (1 if R1 > 1 else 0) + (1 if R0 > 1 else 0)
    tiles_m = (M + BM - 1) // BM
    tiles_n = (N + BN - 1) // BN
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES * CONSUMERS, 64, BK], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BB, BK], b_desc.layout)
    c_tiles = b_tiles
    if BC > 0:
        c_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BC, BK], c_desc.layout)
    held = a_tiles
    if LEVELS > 0:
        held = gl.allocate_shared_memory(gl.float32, [CONSUMERS * LEVELS, 64, BB], TOTALS)
    out_tiles = a_tiles
    if STORED and LEVELS > 0:  # where the nodes were: when a tile is finished, none waits
        out_tiles = held._reinterpret(out_desc.dtype, [CONSUMERS * LEVELS * 2, 64, BB], out_desc.layout)
    elif STORED:
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 64, BB], out_desc.layout)
    rest_tiles = a_tiles
    if STORED and BC > 0 and not GATED:
        rest_tiles = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, 64, BC], rest_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    fence_async_shared()
    ring = (a_tiles, b_tiles, c_tiles, full, free)
    outs = (out_tiles, out_desc, rest_tiles, rest_desc, turn)
    pointers = (out_ptr, bias_ptr, residual_ptr)
    sizes = (M, N, residual_stride)
    weights = (a_ptr, a_pitch, ahead, N)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_multiply, (gl.constexpr(0), ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
                         HAS_BIAS, HAS_RESIDUAL, STORED, R0, R1, R2, R3, LEVELS, BB, BC, BK,
                         GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
            (_fetch, (a_desc, b_desc, c_desc, ring, weights, tiles_m, tiles_n, leaf_k, leaves,
                      BB, BC, BK, GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (gl.constexpr(0), ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
                         HAS_BIAS, HAS_RESIDUAL, STORED, R0, R1, R2, R3, LEVELS, BB, BC, BK,
                         GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
            (_multiply, (gl.constexpr(1), ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
                         HAS_BIAS, HAS_RESIDUAL, STORED, R0, R1, R2, R3, LEVELS, BB, BC, BK,
                         GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
            (_fetch, (a_desc, b_desc, c_desc, ring, weights, tiles_m, tiles_n, leaf_k, leaves,
                      BB, BC, BK, GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
        ], [4, 1], [240, 24])  # fmt: skip
