"""Launches of the GEMM kernels: from a schedule and operands to a kernel's arguments.

Legend: M tokens, N output features, K summed features.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from detcompile.errors import ScheduleError
from detcompile.templates.device.dependent_launch import launch_options
from detcompile.templates.device.gate import multiprocessors
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.matmul import batched_leaves, hopper, ring
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.matmul.operands import Operands, operands_of
from detcompile.templates.matmul.schedules import (
    BatchedLeaves,
    GemmSchedule,
    HopperTiles,
    PointerTiles,
    RingTiles,
    TmaTiles,
)
from detcompile.templates.matmul.tree import LEVELS, tree_options


def run_schedule(
    schedule: GemmSchedule,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    radices: Sequence[int] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run the op under one schedule without asking the gate: for tests, the gate itself and benchmarks."""
    operands = operands_of(x, w, bias, residual, tuple(radices), out_dtype or x.dtype)
    launch(schedule, operands)
    return operands.out


def launch(schedule: GemmSchedule, o: Operands) -> None:
    """Run the op into ``o.out``; a gated schedule runs the gated op, whose out is [M, N / 2].

    Raises:
        ScheduleError: the schedule cannot sum in this order.
    """
    if isinstance(schedule, BatchedLeaves):
        _launch_batched_leaves(schedule, o)
    elif isinstance(schedule, HopperTiles):
        _launch_hopper(schedule, o)
    elif isinstance(schedule, RingTiles):
        _launch_ring(schedule, o)
    elif schedule.split and o.radices:
        partial = o.out.new_empty((math.prod(o.radices), *o.out.shape), dtype=torch.float32)
        _launch_tiles(schedule, replace(o, bias=None, residual=None, out=partial), split=True)
        _combine(partial, o)
    else:
        _require_levels(schedule, o)
        _launch_tiles(schedule, o, split=False)


def _require_levels(schedule: GemmSchedule, o: Operands) -> None:
    if len(o.radices) > LEVELS:
        raise ScheduleError(f"matmul: {schedule} supports {LEVELS} levels of a tree, not {o.radices}; split the leaves")


def _launch_hopper(schedule: HopperTiles, o: Operands) -> None:
    assert not schedule.gated or o.are_gated
    _require_levels(schedule, o)
    width = schedule.block_m if schedule.swapped else schedule.block_n
    if o.radices and width & (width - 1):
        raise ScheduleError(f"matmul: {schedule} cannot sum a tree over {width} columns")
    if o.radices and o.leaf_k % schedule.block_k:
        raise ScheduleError(f"matmul: {schedule} needs whole k-groups, not leaves of {o.leaf_k}")
    hopper.launch(schedule, o)


def _launch_ring(schedule: RingTiles, o: Operands) -> None:
    assert not schedule.gated or o.are_gated
    if o.radices or o.x.shape[1] % ring.BLOCK or (schedule.gated and o.out.shape[1] % 8):
        raise ScheduleError(
            f"matmul: {schedule} sums no tree, but K in blocks of {ring.BLOCK} and a gate of features in eights, not"
            f" {o.radices}, K={o.x.shape[1]} and {o.out.shape[1]} features"
        )
    ring.launch(schedule, o)


def _launch_batched_leaves(schedule: BatchedLeaves, o: Operands) -> None:
    if not o.radices or set(o.radices) != {2}:
        raise ScheduleError(f"matmul: {schedule} sums leaves of trees of radix 2, not of {o.radices}")
    if o.x.dtype is torch.float32 and o.leaf_k > matmul_kernels.FP32_BLOCK.value:
        raise ScheduleError(f"matmul: {schedule} does not support float32 blocks within leaves of {o.leaf_k}")
    batched_leaves.launch(schedule, o)


def _launch_tiles(schedule: PointerTiles | TmaTiles, o: Operands, split: bool) -> None:
    """Run the kernels of kernels.py; with ``split`` every leaf's sum goes to ``o.out`` [leaves, M, N]."""
    leaves = math.prod(o.radices)
    tiles_m, tiles_n = cdiv(len(o.x), schedule.block_m), cdiv(len(o.w), schedule.block_n)
    sizes = (len(o.x), o.out.shape[-1], o.leaf_k, leaves)
    options = {
        "HAS_BIAS": o.bias is not None,
        "HAS_RESIDUAL": o.residual is not None,
        "SPLIT": split,
        "BM": schedule.block_m,
        "BN": schedule.block_n,
        "BK": schedule.block_k,
        "GROUP": schedule.group,
        "SWAP": schedule.swapped,
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "enable_fp_fusion": False,
        **tree_options(() if split else o.radices),
        **launch_options(o.x.device),
    }
    parts = leaves if split else 1
    if isinstance(schedule, TmaTiles):
        programs = min(tiles_m * tiles_n * parts, multiprocessors(o.x.device) * schedule.ctas)
        _launch_tma(schedule, o, programs, sizes, options)
    else:
        grid = (tiles_n, parts, tiles_m) if schedule.swapped else (tiles_m * tiles_n, parts)
        _launch_pointers(schedule, o, grid, sizes, options)


def _launch_tma(
    schedule: TmaTiles, o: Operands, programs: int, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    w, w_nk = (o.w, True) if o.w.stride(1) == 1 else (o.w.t(), False)
    block_w = [schedule.block_n, schedule.block_k]
    x_desc = TensorDescriptor.from_tensor(o.x, [schedule.block_m, schedule.block_k])
    w_desc = TensorDescriptor.from_tensor(w, block_w if w_nk else block_w[::-1])
    launcher(matmul_kernels.tma_kernel)[(programs,)](
        x_desc, w_desc, *o.epilogue, *sizes, o.residual_stride, W_NK=w_nk, **options
    )


def _launch_pointers(
    schedule: PointerTiles, o: Operands, grid: tuple[int, ...], sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    if schedule.gated and (not schedule.swapped or o.radices):
        raise ScheduleError(f"matmul: {schedule} has no gate: only swapped pointer tiles without leaves have one")
    assert not schedule.gated or o.are_gated
    blocked = o.x.dtype is torch.float32
    even = o.leaf_k % (matmul_kernels.FP32_BLOCK.value if blocked else schedule.block_k) == 0
    launcher(matmul_kernels.tile_kernel)[grid](
        o.x, o.w, *o.epilogue, *sizes, *o.x.stride(), *o.w.stride(), o.residual_stride,
        BLOCKED=blocked, EVEN_K=even, GATED=schedule.gated, ON_GPU=o.x.is_cuda, **options,
    )  # fmt: skip


def sum_partials_cuda(
    partials: Tensor, bias: Tensor | None, residual: Tensor | None, radices: tuple[int, ...], out: Tensor
) -> None:
    """Add float32 partials [prod(radices), M, N] into out [M, N], in the order of a split schedule's leaves."""
    radices = tuple(radix for radix in radices if radix > 1)
    _combine(partials, Operands(partials, partials, bias, residual, out, radices))


def _combine(partial: Tensor, o: Operands) -> None:
    """Add the leaves, up to four levels of the tree per launch; the last launch has the epilogue."""
    radices = o.radices
    M, N = o.out.shape
    while radices:
        radices, lowest = radices[:-LEVELS], radices[-LEVELS:]
        nodes = math.prod(radices)
        last = not radices
        out = o.out if last else partial.new_empty((nodes, M, N))
        bias, residual = (o.bias, o.residual) if last else (None, None)
        block_n = min(1024, max(128, next_power_of_2(N)))
        launcher(matmul_kernels.combine_kernel)[(M, cdiv(N, block_n), nodes)](
            partial, out, out if bias is None else bias, out if residual is None else residual, M, N,
            0 if residual is None else residual.stride(0), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
            LEAVES=math.prod(lowest), BN=block_n, num_warps=4, enable_fp_fusion=False,
            **tree_options(lowest), **launch_options(partial.device),
        )  # fmt: skip
        partial = out
