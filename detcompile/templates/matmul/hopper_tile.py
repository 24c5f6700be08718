"""The roles of warps in hopper.py's GEMM: one fetches k-groups; warpgroups multiply them, close leaves and write tiles.

Legend: as in hopper.py: A is the operand with 64 rows per warpgroup, B the other one, with BB rows plus BC more.
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
from triton.language.extra import libdevice

from detcompile.templates.device.dependent_launch import fetch_ahead, gluon_let_next_start, gluon_wait_for_earlier
from detcompile.templates.device.primitives import LOG2_E, widened


@gluon.jit
def tile_of(work, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile of a task: GROUP tiles of M share their weights in L2 before N advances."""
    width = GROUP * tiles_n
    first = work // width * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    return first + work % width % height, work % width // height


@gluon.jit
def fetch(
    a_desc, b_desc, c_desc, ring, weights, tiles_m, tiles_n, leaf_k, leaves, BB: gl.constexpr, BC: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, SWAP: gl.constexpr, GATED: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The fetching warp: copies all k-groups of all leaves of this program's output tiles into the ring."""
    a_tiles, b_tiles, c_tiles, full, free = ring
    a_ptr, a_pitch, ahead, N = weights
    if PDL and SWAP:
        _, tile_n = tile_of(gl.program_id(0), tiles_m, tiles_n, GROUP)
        row = tile_n * (64 * CONSUMERS) + gl.arange(0, 64 * CONSUMERS, layout=gl.BlockedLayout([1], [32], [1], [0]))
        fetch_ahead(a_ptr + row.to(gl.int64) * a_pitch, ahead, (row < N) & (ahead > 0))
    gluon_wait_for_earlier(PDL)
    groups = (leaf_k + BK - 1) // BK * leaves
    i = 0
    for work in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(work, tiles_m, tiles_n, GROUP)
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
                tma.async_copy_global_to_shared(c_desc, [c_row, group * BK], full.index(stage), c_tiles.index(stage))
            for consumer in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    a_desc, [a_row + consumer * 64, group * BK], full.index(stage),
                    a_tiles.index(stage * CONSUMERS + consumer),
                )  # fmt: skip
            i += 1
    gluon_let_next_start(PDL)  # not earlier: the next kernel's prefetches would be evicted before their use


@gluon.jit
def _close_leaf(
    acc, leaf, node, upper, held, R0: gl.constexpr, R1: gl.constexpr, R2: gl.constexpr, R3: gl.constexpr,
    NODES: gl.constexpr, NODE: gl.constexpr,
):  # fmt: skip
    """tree.close_leaf for one leaf. held: the nodes waiting for a sibling, by level, from `NODE` on; with two NODES the
    lowest of them is `upper` instead.

    Returns the current node, which is the total after the last leaf, and `upper`. Registers of a node stored in `held`
    are not read again.
    """
    HELD: gl.constexpr = NODE - (NODES - 1)  # index of the level above the leaves' node
    if leaf % R3 != 0:
        acc = node + acc
    if R2 * R1 * R0 > 1:
        if leaf % R3 == R3 - 1:
            done = leaf // R3
            if done % R2 != 0:
                acc = (upper if NODES > 1 else held.index(HELD).load(acc.type.layout)) + acc
            if done % R2 != R2 - 1:
                if NODES > 1:
                    upper = acc
                else:
                    held.index(HELD).store(acc)
            else:
                if R1 * R0 > 1:
                    done = done // R2
                    if done % R1 != 0:
                        acc = held.index(HELD + 1).load(acc.type.layout) + acc
                    if done % R1 != R1 - 1:
                        held.index(HELD + 1).store(acc)
                    else:
                        if R0 > 1:
                            if done // R1 != 0:
                                acc = held.index(HELD + 2).load(acc.type.layout) + acc
                            if done // R1 != R0 - 1:
                                held.index(HELD + 2).store(acc)
    return acc, upper


@gluon.jit
def multiply(
    W: gl.constexpr, ring, held, outs, pointers, sizes, tiles_m, tiles_n, leaf_k, leaves,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, STORED: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr,
    R2: gl.constexpr, R3: gl.constexpr, NODES: gl.constexpr, LEVELS: gl.constexpr, BB: gl.constexpr, BC: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, SWAP: gl.constexpr, GATED: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: multiplies 64 rows of A by the tile of B, for each output tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BB, 16])
    REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BC if BC > 0 else 8, 16])
    a_tiles, b_tiles, c_tiles, full, free = ring
    out_tiles, out_desc, rest_tiles, rest_desc, turn = outs
    gluon_wait_for_earlier(PDL)
    groups = (leaf_k + BK - 1) // BK
    i = 0
    for work in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        node = gl.zeros([64, BB], gl.float32, LAYOUT)
        upper = node
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
                node, upper = _close_leaf(acc, leaf, node, upper, held, R0, R1, R2, R3, NODES, W * LEVELS)
            else:
                node = acc
        tile_m, tile_n = tile_of(work, tiles_m, tiles_n, GROUP)
        if SWAP:
            m = tile_m * BB
            n = tile_n * (64 * CONSUMERS) + W * 64
        else:
            m = tile_m * (64 * CONSUMERS) + W * 64
            n = tile_n * (BB if GATED else BB + BC)
        if W == 1:
            # With so few k-groups the other could be a tile ahead, and this would wait for its next turn.
            turns = (tiles_m * tiles_n > gl.num_programs(0)) & (groups * leaves > STAGES)
            mbarrier.wait(turn, work // gl.num_programs(0) & 1, pred=turns)
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
    """kernels.store_tile: out = round(residual + round(acc + bias)), from row first_m and column first_n on.

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
