"""Launches of the GEMM kernels: a schedule and its operands to a kernel's arguments.

Legend: M tokens, N output features, K summed features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from detcompile.errors import InvalidInput, ScheduleError
from detcompile.templates.device.dependent_launch import launch_options
from detcompile.templates.device.gate import multiprocessors
from detcompile.templates.device.integers import cdiv, next_power_of_2
from detcompile.templates.device.launcher import launcher
from detcompile.templates.matmul import batched_leaves
from detcompile.templates.matmul import hopper as matmul_hopper
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.matmul.schedules import GemmSchedule

__all__ = ["LEVELS", "Operands", "launch", "operands_of", "run_schedule", "sum_partials_cuda", "tree_options"]

LEVELS = 4  # of a tree that one kernel can hold


@dataclass(frozen=True, slots=True)
class Operands:
    """What a launch reads, in strides that kernels take, and where its result goes."""

    x: Tensor  # [M, K]
    w: Tensor  # [N, K], unit stride along one of them
    bias: Tensor | None  # [N]
    residual: Tensor | None  # [M, N], unit stride along N
    out: Tensor  # [M, N] contiguous
    radices: tuple[int, ...]

    @property
    def leaf_k(self) -> int:
        return self.x.shape[1] // math.prod(self.radices)


def run_schedule(
    schedule: GemmSchedule,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    radices: Sequence[int] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The op under one schedule, gate or no gate: for tests, the gate itself and benchmarks."""
    operands = operands_of(x, w, bias, residual, tuple(radices), out_dtype or x.dtype)
    launch(schedule, operands)
    return operands.out


def operands_of(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: tuple[int, ...],
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Operands:
    """The operands of x [M, K], w [N, K], bias [N] and residual [M, N], copied where their strides do not serve.

    Raises:
        InvalidInput: weights of 2^31 elements or more that are contiguous along N.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if 1 not in w.stride():
        w = w.contiguous()
    if w.stride(1) != 1 and w.numel() >= 2**31:  # offsets along K have 32 bits
        raise InvalidInput(
            f"matmul on the GPU: weights [{w.shape[0]}, {w.shape[1]}] contiguous along N are past 2^31 elements: store"
            " them contiguous along K"
        )
    if bias is not None:
        bias = bias.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    radices = tuple(radix for radix in radices if radix > 1)
    if out is None:
        out = x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)
    return Operands(x, w, bias, residual, out, radices)


def launch(schedule: GemmSchedule, o: Operands) -> None:
    """Run the op, or if the schedule is gated the gated op, whose out is [M, N / 2], into ``o.out``.

    Raises:
        ScheduleError: the schedule does not sum this order.
    """
    if schedule.gated:
        assert o.bias is None and o.residual is None and 2 * o.out.shape[1] == len(o.w), "gates: see run_gated"
    if schedule.leaves == "together":
        _launch_batched_leaves(schedule, o)
    elif schedule.leaves == "split" and o.radices:
        partial = o.out.new_empty((math.prod(o.radices), *o.out.shape), dtype=torch.float32)
        _launch_tiles(schedule, replace(o, bias=None, residual=None, out=partial), split=True)
        _combine(partial, o)
    elif len(o.radices) > LEVELS:
        raise ScheduleError(f"matmul: {schedule} holds {LEVELS} levels of a tree, not {o.radices}; split the leaves")
    elif schedule.kind == "hopper":
        _launch_hopper(schedule, o)
    else:
        _launch_tiles(schedule, o, split=False)


def _launch_hopper(schedule: GemmSchedule, o: Operands) -> None:
    width = schedule.block_m if schedule.swapped else schedule.block_n
    if o.radices and width & (width - 1):
        raise ScheduleError(f"matmul: {schedule} sums no tree over {width} columns")
    if o.radices and o.leaf_k % schedule.block_k:
        raise ScheduleError(f"matmul: {schedule} takes whole k-groups, not leaves of {o.leaf_k}")
    a, b = (schedule.block_n, schedule.block_m) if schedule.swapped else (schedule.block_m, schedule.block_n)
    tiles = cdiv(len(o.x), schedule.block_m) * cdiv(len(o.w), schedule.block_n)
    matmul_hopper.launch(
        o.x, o.w, o.bias, o.residual, o.out, tree_options(o.radices), o.leaf_k,
        programs=min(tiles, multiprocessors(o.x.device) * schedule.ctas), block_a=a, block_b=b,
        block_k=schedule.block_k, stages=schedule.stages, group=schedule.group, swapped=schedule.swapped,
        gated=schedule.gated,
    )  # fmt: skip


def _launch_batched_leaves(schedule: GemmSchedule, o: Operands) -> None:
    if not o.radices or set(o.radices) != {2}:
        raise ScheduleError(f"matmul: {schedule} sums the leaves of trees of radix 2, not of {o.radices}")
    if o.x.dtype is torch.float32 and o.leaf_k > matmul_kernels.FP32_BLOCK.value:
        raise ScheduleError(f"matmul: {schedule} has no blocks of float32 within leaves of {o.leaf_k}")
    batched_leaves.launch(o.x, o.w, o.bias, o.residual, o.out, len(o.radices), schedule)


def _launch_tiles(schedule: GemmSchedule, o: Operands, split: bool) -> None:
    """The kernels of kernels.py; with ``split`` every leaf's sum into ``o.out`` [leaves, M, N]."""
    if schedule.kind == "hopper":
        raise ScheduleError(f"matmul: {schedule}: no kernel of this kind splits leaves")
    if schedule.gated and (schedule.kind != "pointers" or not schedule.swapped or o.radices):
        raise ScheduleError(f"matmul: {schedule} has no gate: only swapped tiles of pointers, without leaves, do")
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
    tiles_m, tiles_n = cdiv(len(o.x), schedule.block_m), cdiv(len(o.w), schedule.block_n)
    residual_stride = 0 if o.residual is None else o.residual.stride(0)
    epilogue = (o.out, o.out if o.bias is None else o.bias, o.out if o.residual is None else o.residual)
    sizes = (len(o.x), o.out.shape[-1], o.leaf_k, math.prod(o.radices))
    parts = math.prod(o.radices) if split else 1
    if schedule.kind == "tma":
        w, w_nk = (o.w, True) if o.w.stride(1) == 1 else (o.w.t(), False)
        block_w = [schedule.block_n, schedule.block_k]
        x_desc = TensorDescriptor.from_tensor(o.x, [schedule.block_m, schedule.block_k])
        w_desc = TensorDescriptor.from_tensor(w, block_w if w_nk else block_w[::-1])
        programs = min(tiles_m * tiles_n * parts, multiprocessors(o.x.device) * schedule.ctas)
        launcher(matmul_kernels.tma_kernel)[(programs,)](
            x_desc, w_desc, *epilogue, *sizes, residual_stride, W_NK=w_nk, **options
        )  # fmt: skip
        return
    blocked = o.x.dtype is torch.float32
    even = o.leaf_k % (matmul_kernels.FP32_BLOCK.value if blocked else schedule.block_k) == 0
    launcher(matmul_kernels.tile_kernel)[(tiles_n, parts, tiles_m) if schedule.swapped else (tiles_m * tiles_n, parts)](
        o.x, o.w, *epilogue, *sizes, *o.x.stride(), *o.w.stride(), residual_stride,
        BLOCKED=blocked, EVEN_K=even, GATED=schedule.gated, ON_GPU=o.x.is_cuda, **options,
    )  # fmt: skip


def sum_partials_cuda(
    partials: Tensor, bias: Tensor | None, residual: Tensor | None, radices: tuple[int, ...], out: Tensor
) -> None:
    """float32 partials [prod(radices), M, N] -> out [M, N], as the leaves of a split schedule are added."""
    radices = tuple(radix for radix in radices if radix > 1)
    _combine(partials, Operands(partials, partials, bias, residual, out, radices))


def _combine(partial: Tensor, o: Operands) -> None:
    """Adds the leaves, up to four levels of the tree a launch; the last one has the epilogue."""
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
            partial,
            out,
            out if bias is None else bias,
            out if residual is None else residual,
            M,
            N,
            0 if residual is None else residual.stride(0),
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            LEAVES=math.prod(lowest),
            BN=block_n,
            num_warps=4,
            enable_fp_fusion=False,
            **tree_options(lowest),
            **launch_options(partial.device),
        )
        partial = out


def tree_options(radices: tuple[int, ...]) -> dict[str, int]:
    """The radices of up to LEVELS levels as a kernel takes them, R0 to R3."""
    padded = (1,) * (LEVELS - len(radices)) + radices
    return {f"R{i}": radix for i, radix in enumerate(padded)}
