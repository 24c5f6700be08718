"""Few tokens' sums over ranks and the RMSNorm that follows, in one kernel: a token is one program's.

Legend: M tokens, N features. As one_shot_kernel of collectives_triton, in pieces of a whole row; a program then reads
back the row that it has written, as the kernel of the norm does, and takes the norm's steps: the bits are those of the
sum and the norm apart.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.numerics import row_order
from detcompile.templates.collectives_memory import BOX, CHANNELS, PeerMemory
from detcompile.templates.collectives_triton import Reduction, finish, flags_of, launch_arguments, meet, tree_sum
from detcompile.templates.dependent_launch import let_next_start, wait_for_earlier
from detcompile.templates.row_tiles import RowPlan, aligned, load_rows, row_plan, row_total, store_rows
from detcompile.templates.rows_triton import rms_normed

__all__ = ["MOST_TOKENS", "Norm", "norm_plan", "reduce_and_norm"]

MOST_TOKENS = 32  # from here on to send less is worth a second meeting
LEAST_WIDTH = 1024  # shorter rows come several to a program of the norm


class Norm(NamedTuple):
    """rms_norm of the sums: ``out`` [M, N] is contiguous, the rest as in templates/norms.py."""

    weight: Tensor | None
    eps: float
    round_before_weight: bool
    out: Tensor


def norm_plan(num_tokens: int, features: int, dtype: torch.dtype) -> RowPlan | None:
    """How a program holds a row; None where sums of this size are not normed by the kernel that adds them."""
    if not 0 < num_tokens <= MOST_TOKENS:
        return None
    plan = row_plan(row_order(features, "cuda", (), dtype), 1)
    fits = plan.programs == 1 and LEAST_WIDTH <= plan.width <= BOX and features % plan.order.vector == 0
    return plan if fits else None


def reduce_and_norm(memory: PeerMemory, reduction: Reduction, norm: Norm, plan: RowPlan) -> None:
    """Write the sum to ``reduction.out`` and its norm to ``norm.out``."""
    weight = aligned(norm.weight)
    one_shot_norm_kernel[(min(CHANNELS, reduction.out.shape[0]),)](
        boxes=memory.boxes, weight_ptr=norm.out if weight is None else weight, normed_ptr=norm.out, eps=norm.eps,
        HAS_WEIGHT=weight is not None, ROUND_FIRST=norm.round_before_weight,
        R=plan.order.length, UNIT=plan.order.vector, W=plan.width, LANES_OF_ROW=plan.order.lanes,
        SHUFFLE=reduction.out.is_cuda, BOX=BOX, num_warps=plan.warps, **launch_arguments(memory, reduction),
    )  # fmt: skip


@triton.jit
def one_shot_norm_kernel(
    partial_ptr, boxes, flags_ptr, addresses_ptr, epochs_ptr, out_ptr, bias_ptr, residual_ptr, weight_ptr, normed_ptr,
    total, N, residual_stride, eps,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    R: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, LANES_OF_ROW: tl.constexpr, SHUFFLE: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BOX: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R is N, known to the compiler, as the norm's kernel knows it. Past the row, boxes carry what nobody reads."""
    let_next_start(PDL)
    channel = tl.program_id(0)
    theirs, mine = flags_of(channel, flags_ptr, addresses_ptr, RANK, RANKS, LANES)
    column = tl.arange(0, W)
    inside = column < R
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    wait_for_earlier(PDL)
    epoch = tl.load(epochs_ptr + channel)
    for row in range(channel, total // R, tl.num_programs(0)):
        epoch += 1
        box = (channel * 2 + (epoch & 1)) * (RANKS * BOX)
        element = row * R + column
        own = tl.load(partial_ptr + element, mask=inside, other=0.0)
        for r in tl.static_range(RANKS):
            if r != RANK:
                tl.store(boxes[r] + (box + RANK * BOX) + column, own)
        meet(theirs, mine, epoch, LANES)
        acc = tree_sum(own, boxes[RANK] + box + column, RANK, RANKS, BOX, R0, R1, R2, R3)
        y = finish(
            acc, element, total, N, bias_ptr, residual_ptr, residual_stride,
            HAS_BIAS, HAS_RESIDUAL, out_ptr.dtype.element_ty,
        )  # fmt: skip
        tl.store(out_ptr + element, y, mask=inside)
        tl.debug_barrier()
        rows = row + tl.arange(0, 1)
        x = load_rows(out_ptr, rows, column, total // R, 1, R // UNIT, 0, 0.0, R, UNIT, 1)
        squares = row_total(x * x, 1, LANES_OF_ROW, UNIT, SHUFFLE)
        z = rms_normed(
            x, squares, weight if HAS_WEIGHT else x, eps, HAS_WEIGHT, ROUND_FIRST, normed_ptr.dtype.element_ty, R
        )  # fmt: skip
        store_rows(normed_ptr, rows, column, total // R, z, R)
    tl.store(epochs_ptr + channel, epoch)
