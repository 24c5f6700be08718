"""Row sums on the GPU: every sum takes the `Row` order of its length, whatever the tile and the neighbours.

Legend: T rows, R row length. A tile is ROWS rows x LANES * VECTOR slots; slot c belongs to lane c // VECTOR.

Each slot adds its terms over ascending steps; `slots_to_row` then combines the slots. Nothing here is contracted to
an FMA: kernels are launched with ``enable_fp_fusion=False``, so that a term is rounded before it is added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.numerics import Row, row_order

__all__ = [
    "launch_rows",
    "layer_norm_cuda",
    "rms_norm_cuda",
    "row_sum_cuda",
    "row_var_mean_cuda",
    "rows_of",
    "slots_to_row",
    "tile_rows",
    "total",
]

PLAIN = tl.constexpr(0)
SQUARE = tl.constexpr(1)
CENTERED_SQUARE = tl.constexpr(2)


@triton.jit
def _halve_adjacent(x_RC):
    """(0 + 1), (2 + 3), ..."""
    even, odd = tl.split(tl.reshape(x_RC, [x_RC.shape[0], x_RC.shape[1] // 2, 2]))
    return even + odd


@triton.jit
def _halve_apart(x_RC):
    """(0 + n/2), (1 + n/2 + 1), ..."""
    half: tl.constexpr = x_RC.shape[1] // 2
    low, high = tl.split(tl.permute(tl.reshape(x_RC, [x_RC.shape[0], 2, half]), [0, 2, 1]))
    return low + high


@triton.jit
def slots_to_row(slots_RC, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr):
    """Slot totals [ROWS, LANES * VECTOR] -> row totals [ROWS], in Row order.

    SHUFFLE leaves the lanes to tl.sum, whose butterfly is the same tree when a thread holds one lane; without it every
    addition is spelled out (the interpreter's tl.sum has an order of its own).
    """
    x = slots_RC
    if VECTOR >= 2:
        x = _halve_adjacent(x)
    if VECTOR >= 4:
        x = _halve_adjacent(x)
    if VECTOR >= 8:
        x = _halve_adjacent(x)
    if SHUFFLE:
        row_total = tl.sum(x, 1)
    else:
        groups: tl.constexpr = LANES // 32
        x = tl.reshape(x, [ROWS * groups, 32])
        x = _halve_apart(_halve_apart(_halve_apart(_halve_apart(_halve_apart(x)))))
        x = tl.reshape(x, [ROWS, groups])
        if groups >= 32:
            x = _halve_apart(x)
        if groups >= 16:
            x = _halve_apart(x)
        if groups >= 8:
            x = _halve_apart(x)
        if groups >= 4:
            x = _halve_apart(x)
        if groups >= 2:
            x = _halve_apart(x)
        row_total = tl.reshape(x, [ROWS])
    return row_total


@triton.jit
def total(
    rows_ptr,  # [ROWS] pointers to the first element of each row
    ok_R,
    R,
    shift_R,
    TERM: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr,
):
    """Sum of TERM over each row: [ROWS] fp32. Elements past R add +0.0."""
    STEP: tl.constexpr = LANES * VECTOR
    slots = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(0, R, STEP):
        column = start + tl.arange(0, STEP)
        inside = ok_R[:, None] & (column < R)[None, :]
        x = tl.load(rows_ptr[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if TERM == SQUARE:
            x = x * x
        elif TERM == CENTERED_SQUARE:
            x = x - shift_R[:, None]
            x = tl.where(inside, x * x, 0.0)
        slots += x
    return slots_to_row(slots, ROWS, LANES, VECTOR, SHUFFLE)


@triton.jit(do_not_specialize=["T"])
def _row_sum_kernel(
    x_ptr, out_ptr, T, R, stride,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < T
    row_total = total(x_ptr + row.to(tl.int64) * stride, ok, R, None, PLAIN, ROWS, LANES, VECTOR, SHUFFLE)
    tl.store(out_ptr + row, row_total.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T"])
def _row_var_mean_kernel(
    x_ptr, var_ptr, mean_ptr, T, R, stride, denominator,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < T
    rows_ptr = x_ptr + row.to(tl.int64) * stride
    length = tl.zeros((ROWS,), tl.float32) + R
    mean = tl.div_rn(total(rows_ptr, ok, R, None, PLAIN, ROWS, LANES, VECTOR, SHUFFLE), length)
    squares = total(rows_ptr, ok, R, mean, CENTERED_SQUARE, ROWS, LANES, VECTOR, SHUFFLE)
    tl.store(mean_ptr + row, mean, mask=ok)
    tl.store(var_ptr + row, tl.div_rn(squares, tl.zeros((ROWS,), tl.float32) + denominator), mask=ok)


@triton.jit(do_not_specialize=["T"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, T, R, stride, eps,
    HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = LANES * VECTOR
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < T
    rows_ptr = x_ptr + row.to(tl.int64) * stride
    squares = total(rows_ptr, ok, R, None, SQUARE, ROWS, LANES, VECTOR, SHUFFLE)
    scale = tl.rsqrt(tl.div_rn(squares, tl.zeros((ROWS,), tl.float32) + R) + eps)
    for start in range(0, R, STEP):
        column = start + tl.arange(0, STEP)
        inside = ok[:, None] & (column < R)[None, :]
        y = tl.load(rows_ptr[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        if ROUND_FIRST:
            y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            y = y * tl.load(weight_ptr + column, mask=column < R, other=0.0).to(tl.float32)[None, :]
        out_rows = out_ptr + row.to(tl.int64)[:, None] * R
        tl.store(out_rows + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, T, R, stride, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = LANES * VECTOR
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < T
    rows_ptr = x_ptr + row.to(tl.int64) * stride
    length = tl.zeros((ROWS,), tl.float32) + R
    mean = tl.div_rn(total(rows_ptr, ok, R, None, PLAIN, ROWS, LANES, VECTOR, SHUFFLE), length)
    squares = total(rows_ptr, ok, R, mean, CENTERED_SQUARE, ROWS, LANES, VECTOR, SHUFFLE)
    scale = tl.rsqrt(tl.div_rn(squares, length) + eps)
    for start in range(0, R, STEP):
        column = start + tl.arange(0, STEP)
        inside = ok[:, None] & (column < R)[None, :]
        x = tl.load(rows_ptr[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        y = (x - mean[:, None]) * scale[:, None]
        if HAS_WEIGHT:
            y = y * tl.load(weight_ptr + column, mask=column < R, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + column, mask=column < R, other=0.0).to(tl.float32)[None, :]
        out_rows = out_ptr + row.to(tl.int64)[:, None] * R
        tl.store(out_rows + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def row_sum_cuda(x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [..., R] -> [...]: the sum of each row in fp32, rounded once to out_dtype (default x.dtype)."""
    out = torch.empty(x.shape[:-1], dtype=out_dtype or x.dtype, device=x.device)
    launch_rows(_row_sum_kernel, x, out)
    return out


def row_var_mean_cuda(x: Tensor, correction: float) -> tuple[Tensor, Tensor]:
    """x [..., R] -> fp32 variance and mean [...], in two passes."""
    var, mean = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    launch_rows(_row_var_mean_kernel, x, var, mean, scalars=(max(x.shape[-1] - correction, 0.0),))
    return var, mean


def rms_norm_cuda(x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> Tensor:
    """x [..., R], weight [R] -> [..., R] in x.dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_weight = weight is not None
    launch_rows(
        _rms_norm_kernel, x, weight, out, scalars=(eps,), HAS_WEIGHT=has_weight, ROUND_FIRST=round_before_weight
    )
    return out


def layer_norm_cuda(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., R], weight and bias [R] -> [..., R] in x.dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    has_weight, has_bias = weight is not None, bias is not None
    launch_rows(
        _layer_norm_kernel, x, weight, bias, out, scalars=(eps,), HAS_WEIGHT=has_weight, HAS_BIAS=has_bias
    )
    return out


def rows_of(x: Tensor) -> Tensor:
    """x [..., R] -> [T, R], contiguous and aligned to 16 bytes.

    Triton lays a tile out by what it knows of strides and alignment, and the lanes' tree follows the layout: two calls
    for rows of one length have to know the same.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def tile_rows(order: Row) -> int:
    """Rows of a tile: like every other launch parameter of a row kernel, a function of the order alone."""
    return 4 if order.lanes == 32 else 1


def launch_rows(
    kernel: triton.JITFunction,
    x: Tensor,
    *tensors: Tensor | None,
    scalars: tuple[float, ...] = (),
    order: Row | None = None,
    **flags: object,
) -> None:
    """Runs a row kernel ``(x, *tensors, T, R, stride, *scalars, ROWS, LANES, VECTOR, SHUFFLE)`` over all rows of x.

    How lanes share a row follows from its length alone. tensors that are None are never read (x stands in for them).
    """
    T, R = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    if x.shape[:-1].numel() == 0:
        return
    if R == 0:
        x, T = x.new_zeros(*x.shape[:-1], 1), x.shape[:-1].numel()
    rows = rows_of(x)
    order = order or row_order(max(R, 1), "cuda")
    kernel[(triton.cdiv(T, tile_rows(order)),)](
        rows,
        *(rows if t is None else t for t in tensors),
        T,
        R,
        R,  # the stride: T = 1 may come with any other
        *scalars,
        ROWS=tile_rows(order),
        LANES=order.lanes,
        VECTOR=order.vector,
        SHUFFLE=x.is_cuda,
        num_warps=4 if order.lanes == 32 else order.lanes // 32,
        enable_fp_fusion=False,
        **flags,
    )
