"""The GEMM of kernels.py for Hopper GPUs: one warp fetches, one or two warpgroups multiply. Same bits.

Legend: M tokens, N output features, K summed features. A is the operand with 64 rows per warpgroup (tokens, or features
if SWAP), B the other one, with BB rows. A program has CONSUMERS warpgroups, which share the tile of B it fetches. A
width that is not a power of two, chosen to fill a wave of multiprocessors better, is BB rows of B plus BC more.

The fetching warp runs ahead through a ring of STAGES k-groups, across the leaves of the tree and from one output tile
to the next, so neither the end of a leaf nor an epilogue stalls the loads. Two warpgroups finish a tile one after the
other. From then on one is ahead by less than the ring's size, and each multiplies while the other writes.

The current node is in registers. With two NODES, so is the lowest node that waits for a sibling; the other waiting
nodes are in shared memory. A tree costs a chain of additions, and no second launch.

GATED: B has a gate's features followed by up's. A program takes BB of each, sums both and writes silu(gate) * up only.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from detcompile.templates.device.dependent_launch import launch_options
from detcompile.templates.device.gate import is_hopper, multiprocessors
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.matmul.hopper_tile import fetch, multiply
from detcompile.templates.matmul.operands import Operands
from detcompile.templates.matmul.schedules import HopperTiles
from detcompile.templates.matmul.tree import tree_options

ROWS = 64
_AHEAD_BYTES = 16 << 20  # of weights, prefetched into L2 while the previous kernel is finishing
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

TOTALS = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if this kernel runs there; operands must also suit tensor descriptors, contiguous along K."""
    return is_hopper(device) and dtype.itemsize == 2


def launch(schedule: HopperTiles, o: Operands) -> None:
    """Run the kernel; if gated, w is [2 N, K]. Leaves are whole k-groups, or there is a single leaf."""
    swapped, gated = schedule.swapped, schedule.gated
    a, b = (o.w, o.x) if swapped else (o.x, o.w)
    block_a, block_b = (schedule.block_n, schedule.block_m) if swapped else (schedule.block_m, schedule.block_n)
    (M, K), (N, leaf_k) = o.x.shape, (o.out.shape[1], o.leaf_k)
    tiles = cdiv(M, schedule.block_m) * cdiv(len(o.w), schedule.block_n)
    programs = min(tiles, multiprocessors(o.x.device) * schedule.ctas)
    consumers, block_k = block_a // ROWS, schedule.block_k
    stored = not swapped and o.out.element_size() == 2 and N % 8 == 0
    block_c = block_b // 2 if gated else block_b - (1 << block_b.bit_length() - 1)
    block_b -= block_c
    b_desc = c_desc = _descriptor(b, [block_b, block_k])
    out_desc = rest_desc = _descriptor(o.out, [ROWS, block_b]) if stored else o.out
    ahead = min(K, _AHEAD_BYTES // (programs * block_a * 2)) // 64 * 64 if swapped else 0  # k of each row
    if block_c:
        c_desc = _descriptor(b, [block_c, block_k])
        rest_desc = _descriptor(o.out, [ROWS, block_c]) if stored and not gated else o.out
    launcher(hopper_matmul_kernel)[(programs,)](
        _descriptor(a, [ROWS, block_k]), b_desc, c_desc, out_desc, rest_desc, *o.epilogue, a, a.stride(0), ahead * 2,
        M, N, leaf_k, K // leaf_k, o.residual_stride,
        HAS_BIAS=o.bias is not None, HAS_RESIDUAL=o.residual is not None, STORED=stored, **tree_options(o.radices),
        NODES=schedule.nodes, BB=block_b, BC=block_c, BK=block_k, GROUP=schedule.group, SWAP=swapped, GATED=gated,
        CONSUMERS=consumers, STAGES=schedule.stages, num_warps=4, maxnreg=_registers(consumers, block_b + block_c),
        enable_fp_fusion=False, **launch_options(o.x.device),
    )  # fmt: skip


def _registers(consumers: int, width: int) -> int:
    """Registers per thread; the warpgroups take more at the fetching warp's expense. Few are left to other kernels."""
    if consumers == 2:
        return 168
    return 168 if width > 128 else 128 if width > 64 else 80


def _descriptor(rows: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, block, _layout(tuple(block), rows.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _TYPES[dtype])


@gluon.jit(do_not_specialize=["M", "ahead"])
def hopper_matmul_kernel(
    a_desc, b_desc, c_desc, out_desc, rest_desc, out_ptr, bias_ptr, residual_ptr, a_ptr, a_pitch, ahead,
    M, N, leaf_k, leaves, residual_stride,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, STORED: gl.constexpr,
    R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, R3: gl.constexpr, NODES: gl.constexpr,
    BB: gl.constexpr, BC: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, SWAP: gl.constexpr,
    GATED: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Persistent programs loop over the output tiles."""
    BM: gl.constexpr = BB if SWAP else 64 * CONSUMERS
    BN: gl.constexpr = 64 * CONSUMERS if SWAP else BB if GATED else BB + BC
    LEVELS: gl.constexpr = (1 if R2 > 1 else 0) + (1 if R1 > 1 else 0) + (1 if R0 > 1 else 0) + 1 - NODES
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
    if STORED and LEVELS > 0:  # reuses the nodes' memory: when a tile is finished, no node waits
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
            (multiply, (gl.constexpr(0), ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
                         HAS_BIAS, HAS_RESIDUAL, STORED, R0, R1, R2, R3, NODES, LEVELS, BB, BC,
                         BK, GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
            (fetch, (a_desc, b_desc, c_desc, ring, weights, tiles_m, tiles_n, leaf_k, leaves,
                      BB, BC, BK, GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply, (gl.constexpr(0), ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
                         HAS_BIAS, HAS_RESIDUAL, STORED, R0, R1, R2, R3, NODES, LEVELS, BB, BC,
                         BK, GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
            (multiply, (gl.constexpr(1), ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
                         HAS_BIAS, HAS_RESIDUAL, STORED, R0, R1, R2, R3, NODES, LEVELS, BB, BC,
                         BK, GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
            (fetch, (a_desc, b_desc, c_desc, ring, weights, tiles_m, tiles_n, leaf_k, leaves,
                      BB, BC, BK, GROUP, SWAP, GATED, CONSUMERS, STAGES, PDL)),
        ], [4, 1], [240, 24])  # fmt: skip
