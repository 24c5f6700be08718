"""softmax, log_softmax and logsumexp on the GPU: the sum of exponentials takes the `Row` order of its length.

Legend: T rows, R row length. A row may be a tree of equal leaves (a vocabulary sharded over ranks): each leaf is
summed as a row of its own, and the leaves meet in the tree's order. The maximum has no order to fix.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from detcompile.numerics import row_order
from detcompile.templates.rows_triton import launch_rows, slots_to_row

__all__ = ["log_softmax_cuda", "logsumexp_cuda", "softmax_cuda"]

SOFTMAX = tl.constexpr(0)
LOG_SOFTMAX = tl.constexpr(1)
LOGSUMEXP = tl.constexpr(2)


@triton.jit
def _exp(x, SHUFFLE: tl.constexpr):
    """e^x as accurately as torch's; tl.exp, which the interpreter needs, rounds x * log2(e) first."""
    if SHUFFLE:
        y = libdevice.exp(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def _log(x, SHUFFLE: tl.constexpr):
    if SHUFFLE:
        y = libdevice.log(x)
    else:
        y = tl.log(x)
    return y


@triton.jit
def _maximum(rows_ptr, ok_R, R, ROWS: tl.constexpr, STEP: tl.constexpr):
    slots = tl.full((ROWS, STEP), -float("inf"), tl.float32)
    for start in range(0, R, STEP):
        column = start + tl.arange(0, STEP)
        inside = ok_R[:, None] & (column < R)[None, :]
        x = tl.load(rows_ptr[:, None] + column[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        slots = tl.maximum(slots, x)
    return tl.max(slots, 1)


@triton.jit
def _leaf_sum(
    rows_ptr, ok_R, first, last, shift_R,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """Sum of exp(x - shift) over columns first..last, [ROWS]."""
    STEP: tl.constexpr = LANES * VECTOR
    slots = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(first, last, STEP):
        column = start + tl.arange(0, STEP)
        inside = ok_R[:, None] & (column < last)[None, :]
        x = tl.load(rows_ptr[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        slots += tl.where(inside, _exp(x - shift_R[:, None], SHUFFLE), 0.0)
    return slots_to_row(slots, ROWS, LANES, VECTOR, SHUFFLE)


@triton.jit
def _tree_sum(
    rows_ptr, ok_R, R, shift_R, leaf_length, RADICES: tl.constexpr, LEVELS: tl.constexpr, LEAVES: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """The row as a tree of leaves; RADICES run from the leaves up, and partial[:, i] is level i's open node."""
    level = tl.arange(0, 16)[None, :]
    partial = tl.zeros((ROWS, 16), tl.float32)
    value = tl.zeros((ROWS,), tl.float32)
    for leaf in range(0, LEAVES):
        first = leaf * leaf_length
        last = tl.minimum(first + leaf_length, R)
        value = _leaf_sum(rows_ptr, ok_R, first, last, shift_R, ROWS, LANES, VECTOR, SHUFFLE)
        index = leaf
        complete = leaf >= 0
        for up in tl.static_range(LEVELS):
            digit = index % RADICES[up]
            here = tl.sum(tl.where(level == up, partial, 0.0), 1)
            value = tl.where(digit == 0, value, here + value)
            partial = tl.where((level == up) & complete, value[:, None], partial)
            complete = complete & (digit == RADICES[up] - 1)
            index = index // RADICES[up]
    return value


@triton.jit(do_not_specialize=["T"])
def _softmax_kernel(
    x_ptr, out_ptr, T, R, stride, leaf_length,
    KIND: tl.constexpr, RADICES: tl.constexpr, LEVELS: tl.constexpr, LEAVES: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = LANES * VECTOR
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < T
    rows_ptr = x_ptr + row.to(tl.int64) * stride
    shift = _maximum(rows_ptr, ok, R, ROWS, STEP)
    if KIND == LOGSUMEXP:
        shift = tl.where(tl.abs(shift) == float("inf"), 0.0, shift)  # all -inf gives -inf, as torch.logsumexp
    if LEVELS == 0:
        weight = _leaf_sum(rows_ptr, ok, 0, R, shift, ROWS, LANES, VECTOR, SHUFFLE)
    else:
        weight = _tree_sum(
            rows_ptr, ok, R, shift, leaf_length, RADICES, LEVELS, LEAVES, ROWS, LANES, VECTOR, SHUFFLE
        )
    if KIND == LOGSUMEXP:
        tl.store(out_ptr + row, _log(weight, SHUFFLE) + shift, mask=ok)
    else:
        out_rows = out_ptr + row.to(tl.int64)[:, None] * R
        log_weight = _log(weight, SHUFFLE)[:, None]
        for start in range(0, R, STEP):
            column = start + tl.arange(0, STEP)
            inside = ok[:, None] & (column < R)[None, :]
            x = tl.load(rows_ptr[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32) - shift[:, None]
            if KIND == SOFTMAX:
                y = tl.div_rn(_exp(x, SHUFFLE), tl.broadcast_to(weight[:, None], (ROWS, STEP)))
            else:
                y = x - log_weight
            tl.store(out_rows + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def softmax_cuda(x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int]) -> Tensor:
    """x [..., R] -> [..., R] in out_dtype (default x.dtype)."""
    return _normalised(SOFTMAX, x, out_dtype, radices)


def log_softmax_cuda(x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int]) -> Tensor:
    """x [..., R] -> [..., R] in out_dtype (default x.dtype)."""
    return _normalised(LOG_SOFTMAX, x, out_dtype, radices)


def logsumexp_cuda(x: Tensor, radices: Sequence[int]) -> Tensor:
    """x [..., R] -> [...] fp32."""
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.shape[-1] == 0:
        return out.fill_(-math.inf)
    _launch(LOGSUMEXP, x, out, radices)
    return out


def _normalised(kind: tl.constexpr, x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int]) -> Tensor:
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    if x.numel():
        _launch(kind, x, out, radices)
    return out


def _launch(kind: tl.constexpr, x: Tensor, out: Tensor, radices: Sequence[int]) -> None:
    radices = tuple(radices)
    order = row_order(x.shape[-1], "cuda", radices)
    tree = {"RADICES": radices[::-1] or (1,), "LEVELS": len(radices), "LEAVES": math.prod(radices)}
    launch_rows(_softmax_kernel, x, out, scalars=(order.leaf_length,), order=order, KIND=kind.value, **tree)
