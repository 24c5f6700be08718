"""Row sums and norms on the GPU: sums use the `Row` order of the row's length, whatever the tile and the other rows.

Legend: T rows, R row length, W columns per program, F folds, C = W // F; see rows/tiles.py.

A row that fits in one program is loaded once and kept in registers, with one load per thread in flight for all of it. A
longer row is split into the chunks of its order: one kernel sums each chunk, the next adds the sums and finishes.

Kernels are launched with ``enable_fp_fusion=False``, so nothing is contracted to an FMA: a term is rounded before it is
added.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.orders import Row
from detcompile.orders.numerics import row_order
from detcompile.templates.device.dependent_launch import (
    fetch_rows_ahead,
    launch_options,
    let_next_start,
    wait_for_earlier,
)
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.device.primitives import exponential
from detcompile.templates.rows.tile_sums import chunk_sums, tile_total
from detcompile.templates.rows.tiles import (
    CALLERS,
    RowLayout,
    RowPlan,
    ShortTile,
    aligned,
    load_columns,
    load_rows,
    rms_scale,
    row_layout,
    row_mean,
    row_plan,
    rows_at,
    store_rows,
)

# The term that a row's sum adds for an element x.
PLAIN = tl.constexpr(0)  # x
SQUARE = tl.constexpr(1)  # x * x
CENTERED_SQUARE = tl.constexpr(2)  # (x - the row's mean)^2
P_LOG_P = tl.constexpr(3)  # p * log(p) of x's probability in its row; 0 if p is 0
UNLIKELY = tl.constexpr(-1e30)  # a finite stand-in for log(0)
SHORT = ShortTile()


@triton.jit
def _terms(x, normalizer_ptr, row, column, T, R: tl.constexpr, TERM: tl.constexpr, SHUFFLE: tl.constexpr):
    if TERM == SQUARE:
        x = x * x
    elif TERM == P_LOG_P:
        top = tl.load(normalizer_ptr + 2 * row, mask=row < T, other=0.0)
        x = x - top[:, None, None] - tl.load(normalizer_ptr + 2 * row + 1, mask=row < T, other=0.0)[:, None, None]
        x = exponential(x, SHUFFLE) * tl.where(x > UNLIKELY, x, UNLIKELY)
        x = tl.where((column < R)[None, :, :], x, 0.0)
    return x


@triton.jit
def _centered_squares(x, mean, column, R: tl.constexpr):
    centered = x - mean[:, None, None]
    return tl.where((column < R)[None, :, :], centered * centered, 0.0)


@triton.jit(do_not_specialize=CALLERS)
def _chunks_kernel(
    x_ptr, aside_ptr, partial_ptr, T, heads, outer, inner,
    TERM: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the sum of TERM over each chunk: partial [T, CHUNKS]. aside_ptr: for a centered term the chunks' sums, for
    P_LOG_P the normalizers."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row, column = rows_at(CHUNKS, ROWS, W, FOLDS)
    x = load_rows(x_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, CHUNKS)
    if TERM == CENTERED_SQUARE:
        x = _centered_squares(
            x, row_mean(chunk_sums(aside_ptr, tl.program_id(0) // CHUNKS, CHUNKS, CHUNK_LANES, SHUFFLE), R), column, R
        )
    else:
        x = _terms(x, aside_ptr, row, column, T, R, TERM, SHUFFLE)
    tl.store(partial_ptr + tl.program_id(0) + tl.arange(0, 1), tile_total(x, ROWS, LANES, VECTOR, SHUFFLE))


@triton.jit(do_not_specialize=CALLERS)
def _row_sum_kernel(
    x_ptr, normalizer_ptr, partial_ptr, out_ptr, T, heads, outer, inner,
    TERM: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row, column = rows_at(1, ROWS, W, FOLDS)
    if CHUNKS == 1:
        x = load_rows(x_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, CHUNKS)
        x = _terms(x, normalizer_ptr, row, column, T, R, TERM, SHUFFLE)
        total = tile_total(x, ROWS, LANES, VECTOR, SHUFFLE)
    else:
        total = chunk_sums(partial_ptr, tl.program_id(0), CHUNKS, CHUNK_LANES, SHUFFLE)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=row < T)


@triton.jit(do_not_specialize=CALLERS)
def _row_var_mean_kernel(
    x_ptr, partial_ptr, squares_ptr, var_ptr, mean_ptr, T, heads, outer, inner, denominator,
    R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row, column = rows_at(1, ROWS, W, FOLDS)
    if CHUNKS == 1:
        x = load_rows(x_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, CHUNKS)
        mean = row_mean(tile_total(x, ROWS, LANES, VECTOR, SHUFFLE), R)
        squares = tile_total(_centered_squares(x, mean, column, R), ROWS, LANES, VECTOR, SHUFFLE)
    else:
        mean = row_mean(chunk_sums(partial_ptr, tl.program_id(0), CHUNKS, CHUNK_LANES, SHUFFLE), R)
        squares = chunk_sums(squares_ptr, tl.program_id(0), CHUNKS, CHUNK_LANES, SHUFFLE)
    tl.store(mean_ptr + row, mean, mask=row < T)
    tl.store(var_ptr + row, tl.div_rn(squares, tl.zeros((ROWS,), tl.float32) + denominator), mask=row < T)


@triton.jit(do_not_specialize=CALLERS)
def _rms_norm_kernel(
    x_ptr, partial_ptr, weight_ptr, out_ptr, T, heads, outer, inner, eps,
    HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    if HAS_WEIGHT and ROWS == 1:
        fetch_rows_ahead(weight_ptr, 0, 1, 1, 0, R, PDL)
    wait_for_earlier(PDL)
    row, column = rows_at(CHUNKS, ROWS, W, FOLDS)
    x = load_rows(x_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, CHUNKS)
    if HAS_WEIGHT:
        # this load is in flight while the row is summed
        weight = load_columns(weight_ptr, row, column, R, VECTOR, out_ptr.dtype.element_ty)
    if CHUNKS == 1:
        squares = tile_total(x * x, ROWS, LANES, VECTOR, SHUFFLE)
    else:
        squares = chunk_sums(partial_ptr, tl.program_id(0) // CHUNKS, CHUNKS, CHUNK_LANES, SHUFFLE)
    y = x * rms_scale(squares, eps, R)[:, None, None]
    if ROUND_FIRST:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        y = y * weight
    store_rows(out_ptr, row, column, T, y, R, UNIT, CHUNKS)


@triton.jit(do_not_specialize=CALLERS)
def _layer_norm_kernel(
    x_ptr, partial_ptr, squares_ptr, weight_ptr, bias_ptr, out_ptr, T, heads, outer, inner, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row, column = rows_at(CHUNKS, ROWS, W, FOLDS)
    x = load_rows(x_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, CHUNKS)
    if HAS_WEIGHT:
        weight = load_columns(weight_ptr, row, column, R, VECTOR, out_ptr.dtype.element_ty)
    if HAS_BIAS:
        bias = load_columns(bias_ptr, row, column, R, VECTOR, out_ptr.dtype.element_ty)
    if CHUNKS == 1:
        mean = row_mean(tile_total(x, ROWS, LANES, VECTOR, SHUFFLE), R)
        squares = tile_total(_centered_squares(x, mean, column, R), ROWS, LANES, VECTOR, SHUFFLE)
    else:
        mean = row_mean(chunk_sums(partial_ptr, tl.program_id(0) // CHUNKS, CHUNKS, CHUNK_LANES, SHUFFLE), R)
        squares = chunk_sums(squares_ptr, tl.program_id(0) // CHUNKS, CHUNKS, CHUNK_LANES, SHUFFLE)
    y = (x - mean[:, None, None]) * rms_scale(squares, eps, R)[:, None, None]
    if HAS_WEIGHT:
        y = y * weight
    if HAS_BIAS:
        y = y + bias
    store_rows(out_ptr, row, column, T, y, R, UNIT, CHUNKS)


def row_sum_cuda(
    x: Tensor,
    out_dtype: torch.dtype | None = None,
    order: Row | None = None,
    term: tl.constexpr = PLAIN,
    normalizer: Tensor | None = None,
) -> Tensor:
    """Sum each row of x [..., R] in fp32, rounded once to out_dtype (default x.dtype) -> [...].

    Args:
        term: the function of an element that is added, computed and rounded in fp32.
        normalizer: [..., 2] float32 from ``log_normalizer_cuda``, for P_LOG_P.
    """
    assert (term.value == P_LOG_P.value) == (normalizer is not None), "P_LOG_P needs normalizers, and only it"
    out = torch.empty(x.shape[:-1], dtype=out_dtype or x.dtype, device=x.device)
    if x.shape[-1] == 0:
        return out.zero_()
    if out.numel():
        rows, plan = _planned(x, order)
        partial = _chunks(rows, plan, term, normalizer)
        _launch(_row_sum_kernel, rows, plan._replace(programs=1), normalizer, partial, out, TERM=term.value)
    return out


def row_var_mean_cuda(x: Tensor, correction: float, order: Row | None = None) -> tuple[Tensor, Tensor]:
    """Return the fp32 variance and mean [...] of x [..., R], in two passes."""
    var, mean = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    if x.shape[-1] == 0:
        return var.fill_(torch.nan), mean.fill_(torch.nan)
    if var.numel():
        rows, plan = _planned(x, order)
        partial = _chunks(rows, plan, PLAIN)
        squares = _chunks(rows, plan, CENTERED_SQUARE, partial)
        denominator = max(x.shape[-1] - correction, 0.0)
        once = plan._replace(programs=1)
        _launch(_row_var_mean_kernel, rows, once, partial, squares, var, mean, scalars=(denominator,))
    return var, mean


def rms_norm_cuda(
    x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool, order: Row | None = None
) -> Tensor:
    """Run the op on the GPU, x [..., R], weight [R] -> [..., R] in x.dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, plan = _planned(x, order)
        partial = _chunks(rows, plan, SQUARE)
        flags = {"HAS_WEIGHT": weight is not None, "ROUND_FIRST": round_before_weight}
        _launch(_rms_norm_kernel, rows, plan, partial, aligned(weight), out, scalars=(eps,), **flags)
    return out


def layer_norm_cuda(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, order: Row | None = None
) -> Tensor:
    """Run the op on the GPU, x [..., R], weight and bias [R] -> [..., R] in x.dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, plan = _planned(x, order)
        partial = _chunks(rows, plan, PLAIN)
        squares = _chunks(rows, plan, CENTERED_SQUARE, partial)
        flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
        parameters = (aligned(weight), aligned(bias))
        _launch(_layer_norm_kernel, rows, plan, partial, squares, *parameters, out, scalars=(eps,), **flags)
    return out


def _planned(x: Tensor, order: Row | None) -> tuple[RowLayout, RowPlan]:
    order = order or row_order(x.shape[-1], "cuda", (), x.dtype)
    return row_layout(x, order.vector), row_plan(order, short=SHORT)


def _chunks(rows: RowLayout, plan: RowPlan, term: tl.constexpr, aside: Tensor | None = None) -> Tensor | None:
    """Return the sums [T, chunks] of a row that is split into chunks, else None."""
    if plan.programs == 1:
        return None
    partial = torch.empty(rows.T, plan.programs, dtype=torch.float32, device=rows.start.device)
    _launch(_chunks_kernel, rows, plan, aside, partial, TERM=term.value)
    return partial


def _launch(
    kernel: triton.JITFunction,
    rows: RowLayout,
    plan: RowPlan,
    *tensors: Tensor | None,
    scalars: tuple[float, ...] = (),
    **flags: object,
) -> None:
    """Run a row kernel ``(x, *tensors, T, heads, outer, inner, *scalars, flags, tile)`` over all rows.

    tensors that are None are never read (x is passed instead).
    """
    order = plan.order
    chunks = cdiv(order.length, plan.width)
    launcher(kernel)[(cdiv(rows.T, plan.rows) * plan.programs,)](
        rows.start, *(rows.start if t is None else t for t in tensors), *rows[1:5], *scalars,
        R=order.length, UNIT=rows.unit, CHUNKS=chunks, CHUNK_LANES=max(32, next_power_of_2(chunks)),
        ROWS=plan.rows, W=plan.width, FOLDS=plan.folds, LANES=order.lanes, VECTOR=order.vector,
        SHUFFLE=rows.start.is_cuda, num_warps=plan.warps, enable_fp_fusion=False,
        **launch_options(rows.start.device), **flags,
    )  # fmt: skip
