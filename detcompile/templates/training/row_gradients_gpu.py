"""Gradients of norms, softmaxes and logprobs of rows on the GPU: a row is loaded once and held by one program.

Legend: T rows, R row length, W columns per program, F folds; see rows.tiles. Sums use the `Row` order of the rows'
dtype. Rows too long for one program use sums of rows and torch's pointwise operations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.orders import Row
from detcompile.orders.numerics import row_order
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.device.primitives import exponential
from detcompile.templates.rows.sums_and_norms_gpu import UNLIKELY, row_sum_cuda
from detcompile.templates.rows.tile_sums import tile_total
from detcompile.templates.rows.tiles import (
    CALLERS,
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

_SHORT = ShortTile()
_LOGITS = 4096  # per program


@triton.jit(do_not_specialize=CALLERS)
def norm_backward_kernel(
    x_ptr, g_ptr, weight_ptr, dx_ptr, met_ptr, T, heads, outer, inner, eps,
    CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr,
):  # fmt: skip
    """dx, and g times the weight's factor (met), of rms_norm or, CENTERED, of layer_norm."""
    row, column = rows_at(1, ROWS, W, FOLDS)
    n = load_rows(x_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, 1)
    g = load_rows(g_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, 1)
    inside = (column < R)[None, :, :]
    if CENTERED:
        mean = row_mean(tile_total(n, ROWS, LANES, VECTOR, SHUFFLE), R)
        n = tl.where(inside, n - mean[:, None, None], 0.0)
    scale = rms_scale(tile_total(n * n, ROWS, LANES, VECTOR, SHUFFLE), eps, R)[:, None, None]
    n = n * scale
    met = n
    if ROUND_FIRST:
        met = n.to(dx_ptr.dtype.element_ty).to(tl.float32)
    store_rows(met_ptr, row, column, T, g * met, R, UNIT, 1)
    if HAS_WEIGHT:
        g = g * load_columns(weight_ptr, row, column, R, VECTOR, dx_ptr.dtype.element_ty)
    along = row_mean(tile_total(g * n, ROWS, LANES, VECTOR, SHUFFLE), R)
    if CENTERED:
        middle = row_mean(tile_total(g, ROWS, LANES, VECTOR, SHUFFLE), R)
        g = g - middle[:, None, None]
    store_rows(dx_ptr, row, column, T, (g - n * along[:, None, None]) * scale, R, UNIT, 1)


@triton.jit(do_not_specialize=CALLERS)
def softmax_backward_kernel(
    y_ptr, g_ptr, dx_ptr, T, heads, outer, inner, R: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    row, column = rows_at(1, ROWS, W, FOLDS)
    y = load_rows(y_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, 1)
    g = load_rows(g_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, 1)
    total = tile_total(g * y, ROWS, LANES, VECTOR, SHUFFLE)
    store_rows(dx_ptr, row, column, T, y * (g - total[:, None, None]), R, UNIT, 1)


@triton.jit
def logit_gradient_kernel(
    x_ptr, normalizer_ptr, targets_ptr, g_ptr, entropies_ptr, g_entropy_ptr, out_ptr, V, temperature,
    WARM: tl.constexpr, HAS_ENTROPY: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """((onehot - p) * g - p * (log p + entropy) * g_entropy) / temperature of contiguous rows [M, V]."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * V + column
    x = tl.load(x_ptr + at, mask=column < V, other=0.0).to(tl.float32)
    logprob = x - tl.load(normalizer_ptr + 2 * row) - tl.load(normalizer_ptr + 2 * row + 1)
    p = exponential(logprob, ON_GPU)
    onehot = tl.where(column == tl.load(targets_ptr + row), 1.0, 0.0)
    d = (onehot - p) * tl.load(g_ptr + row)
    if HAS_ENTROPY:
        surprise = tl.where(logprob > UNLIKELY, logprob, UNLIKELY) + tl.load(entropies_ptr + row)
        d = d - p * surprise * tl.load(g_entropy_ptr + row)
    if WARM:
        d = tl.div_rn(d, tl.zeros((BLOCK,), tl.float32) + temperature)
    tl.store(out_ptr + at, d.to(out_ptr.dtype.element_ty), mask=column < V)


def rms_norm_backward_cuda(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    """Run g and x [..., R], weight [R] -> dx in x.dtype, and g times the weight's factor in float32, [..., R]."""
    return _norm_backward(g, x, weight, eps, centered=False, round_first=round_before_weight)


def layer_norm_backward_cuda(g: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Run g and x [..., R], weight [R] -> dx in x.dtype, and g times the weight's factor in float32, [..., R]."""
    return _norm_backward(g, x, weight, eps, centered=True, round_first=False)


def softmax_backward_cuda(g: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Run g and the softmax y [..., R] -> dx [..., R] of ``dtype``."""
    order = row_order(y.shape[-1], "cuda", (), y.dtype)
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if order.chunk:
        wide, p = g.float(), y.float()
        return (p * (wide - row_sum_cuda(wide * p, None, order).unsqueeze(-1))).to(dtype)
    if dx.numel():
        _launch(softmax_backward_kernel, order, y, g, dx)
    return dx


def logit_gradients(
    x: Tensor, normalizer: Tensor, targets: Tensor, g: Tensor, surprise: tuple[Tensor, Tensor] | None,
    temperature: float, out: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of logits [M, V] to ``out``, which is contiguous.

    Args:
        x: the logits divided by the temperature [M, V], contiguous.
        normalizer: [M, 2] float32 from ``log_normalizer_cuda``.
        surprise: entropies [M] and their gradients [M], or nothing.
    """
    M, V = x.shape
    launcher(logit_gradient_kernel)[(M, cdiv(V, _LOGITS))](
        x, normalizer, targets, g, *(surprise or (g, g)), out, V, temperature,
        WARM=temperature != 1.0, HAS_ENTROPY=surprise is not None, ON_GPU=x.is_cuda, BLOCK=_LOGITS, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip


def _norm_backward(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, centered: bool, round_first: bool
) -> tuple[Tensor, Tensor]:
    order = row_order(x.shape[-1], "cuda", (), x.dtype)
    if order.chunk:
        return _of_long_rows(g, x, weight, eps, order, centered=centered, round_first=round_first)
    dx, met = (torch.empty(x.shape, dtype=dtype, device=x.device) for dtype in (x.dtype, torch.float32))
    if dx.numel():
        flags = {"CENTERED": centered, "HAS_WEIGHT": weight is not None, "ROUND_FIRST": round_first}
        weight = x if weight is None else aligned(weight)
        _launch(norm_backward_kernel, order, x, g, weight, dx, met, scalars=(eps,), **flags)
    return dx, met


def _of_long_rows(
    g: Tensor, x: Tensor, weight: Tensor | None, eps: float, order: Row, *, centered: bool, round_first: bool
) -> tuple[Tensor, Tensor]:
    def mean(terms: Tensor) -> Tensor:
        return (row_sum_cuda(terms, None, order) / order.length).unsqueeze(-1)

    n, g = x.float(), g.float()
    n = n - mean(n) if centered else n
    scale = torch.rsqrt(mean(n * n) + eps)
    n = n * scale
    gw = g if weight is None else g * weight.float()
    along = mean(gw * n)
    gw = gw - mean(gw) if centered else gw
    return ((gw - n * along) * scale).to(x.dtype), g * (n.to(x.dtype).float() if round_first else n)


def _launch(
    kernel: triton.JITFunction, order: Row, x: Tensor, g: Tensor, *tensors: Tensor | None,
    scalars: tuple[float, ...] = (), **flags: bool,
) -> None:  # fmt: skip
    """Run a kernel ``(x, g, *tensors, T, heads, outer, inner, *scalars, flags, tile)`` over all rows."""
    x, g = (_aligned_rows(rows) for rows in (x, g))
    rows, plan = row_layout(x, order.vector), row_plan(order, short=_SHORT)
    launcher(kernel)[(cdiv(rows.T, plan.rows),)](
        x, g, *tensors, *rows[1:5], *scalars, R=order.length, UNIT=rows.unit, ROWS=plan.rows, W=plan.width,
        FOLDS=plan.folds, LANES=order.lanes, VECTOR=order.vector, SHUFFLE=x.is_cuda, num_warps=plan.warps,
        enable_fp_fusion=False, **flags,
    )  # fmt: skip


def _aligned_rows(rows: Tensor) -> Tensor:
    if rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
