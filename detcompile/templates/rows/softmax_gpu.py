"""softmax, log_softmax and logsumexp on the GPU: exponentials are summed in the `Row` order of the row's length.

Legend: T rows, R row length, W columns per program, F folds, C = W // F. A row that fits in one program is loaded once,
and its exponentials are relative to its maximum, which needs no order. A row of leaves (a vocabulary sharded over
ranks) or chunks is loaded twice: each part is summed relative to its own maximum, and the sums, scaled to the row's
maximum, are added in the order of the parts. FAST: for 16-bit results, which hide the errors of the hardware's
approximations.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from detcompile.orders import Row
from detcompile.orders.numerics import row_order
from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier
from detcompile.templates.device.launcher import cdiv, launcher, next_power_of_2
from detcompile.templates.device.primitives import exponential
from detcompile.templates.rows.division import normalized
from detcompile.templates.rows.tile_sums import lanes_total, tile_max, tile_total
from detcompile.templates.rows.tiles import (
    CALLERS,
    ShortTile,
    load_rows,
    row_layout,
    row_plan,
    row_starts,
    rows_at,
    store_rows,
)

SOFTMAX = tl.constexpr(0)
LOG_SOFTMAX = tl.constexpr(1)
LOGSUMEXP = tl.constexpr(2)
NORMALIZER = tl.constexpr(3)  # log_softmax's subtrahends: the maximum, then the logarithm of the sum
_OUTPUT_WIDTH = 4096  # columns per program that writes outputs once the row's sum is known
ONCE_WIDTH = 4096  # maximum of columns for which a row's exponentials share one reciprocal, which takes registers
SHORT = ShortTile(folds=2)
SHORT_LOG = ShortTile(elements=1024, warps=2, folds=2)  # for log_softmax
SHORT_FEW = ShortTile(elements=1024)  # more programs, for few rows
FEW_ELEMENTS = 1 << 21  # in all rows together


@triton.jit
def _log(x, SHUFFLE: tl.constexpr):
    if SHUFFLE:
        y = libdevice.log(x)
    else:
        y = tl.log(x)
    return y


@triton.jit
def _finite(shift):
    """The shift if only the sum is needed: for a row of only -inf it is 0, which gives log 0, as torch.logsumexp."""
    return tl.where(tl.abs(shift) == float("inf"), 0.0, shift)


@triton.jit(do_not_specialize=CALLERS)
def _held_kernel(
    x_ptr, out_ptr, T, heads, outer, inner, KIND: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    SHUFFLE: tl.constexpr, ONCE: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row, column = rows_at(1, ROWS, W, FOLDS)
    # If more is written than read, default cache eviction is best for both.
    WIDER: tl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth > x_ptr.dtype.element_ty.primitive_bitwidth
    EVICT_FIRST: tl.constexpr = KIND == LOGSUMEXP or not WIDER
    x = load_rows(x_ptr, row, column, T, heads, outer, inner, -float("inf"), R, UNIT, 1, EVICT_FIRST)
    shift = tile_max(x)
    if KIND == LOGSUMEXP:
        shift = _finite(shift)
    x = x - shift[:, None, None]
    e = tl.where((column < R)[None, :, :], exponential(x, SHUFFLE, FAST), 0.0)
    weight = tile_total(e, ROWS, LANES, VECTOR, SHUFFLE)
    if KIND == LOGSUMEXP:
        tl.store(out_ptr + row, _log(weight, SHUFFLE) + shift, mask=row < T)
    elif KIND == NORMALIZER:
        tl.store(out_ptr + 2 * row, shift, mask=row < T)
        tl.store(out_ptr + 2 * row + 1, _log(weight, SHUFFLE), mask=row < T)
    elif KIND == SOFTMAX:
        store_rows(out_ptr, row, column, T, normalized(e, weight, ONCE, FAST), R, UNIT, 1)
    else:
        store_rows(out_ptr, row, column, T, x - _log(weight, SHUFFLE)[:, None, None], R, UNIT, 1)


@triton.jit(do_not_specialize=CALLERS)
def _parts_kernel(
    x_ptr, top_ptr, sum_ptr, T, heads, outer, inner,
    R: tl.constexpr, UNIT: tl.constexpr, LEAF: tl.constexpr, LEAVES: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Store each chunk's maximum and the sum of its exponentials relative to it: [T, LEAVES, CHUNKS]."""
    program = tl.program_id(0)
    row = program // (LEAVES * CHUNKS) + tl.arange(0, 1)
    leaf = program // CHUNKS % LEAVES
    place = program % CHUNKS * W + tl.arange(0, W)
    column = (leaf * LEAF + place)[None, :]
    ok = (column < R)[None, :, :]
    if LEAVES == 1:
        x = load_rows(x_ptr, row, column, T, heads, outer, inner, -float("inf"), R, UNIT, CHUNKS)
    else:
        ok = ok & (place < LEAF)[None, None, :]
        pointers = (x_ptr + row_starts(row, T, heads, outer, inner, UNIT) * UNIT)[:, None, None] + column[None, :, :]
        x = tl.load(pointers, mask=ok, other=-float("inf")).to(tl.float32)
    top = tile_max(x)
    e = tl.where(ok, exponential(x - _finite(top)[:, None, None], SHUFFLE, FAST), 0.0)
    tl.store(top_ptr + program + tl.arange(0, 1), top)
    tl.store(sum_ptr + program + tl.arange(0, 1), tile_total(e, ROWS, LANES, VECTOR, SHUFFLE))


@triton.jit
def _leaf_weight(
    top_ptr, sum_ptr, shift, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr, SHUFFLE: tl.constexpr
):  # fmt: skip
    """Sum of a leaf's exponentials relative to the row's shift (a scalar), [1], from the sums of its chunks."""
    chunk = tl.arange(0, CHUNK_LANES)
    top = tl.load(top_ptr + chunk, mask=chunk < CHUNKS, other=-float("inf"))
    sums = tl.load(sum_ptr + chunk, mask=chunk < CHUNKS, other=0.0)
    # Chunks of only -inf sum to 0, unless they contain a NaN, which the maximum ignores.
    weights = tl.where(top == -float("inf"), sums, sums * exponential(_finite(top) - shift, SHUFFLE))
    return lanes_total(weights, SHUFFLE)


@triton.jit
def _row_weight(
    top_ptr, sum_ptr, shift, RADICES: tl.constexpr, LEVELS: tl.constexpr, LEAVES: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """The row's sum as a tree of leaves; RADICES run from the leaves up, and partial[:, i] is level i's open node."""
    level = tl.arange(0, 16)[None, :]
    partial = tl.zeros((1, 16), tl.float32)
    value = tl.zeros((1,), tl.float32)
    for leaf in range(0, LEAVES):
        value = _leaf_weight(top_ptr, sum_ptr, shift, CHUNKS, CHUNK_LANES, SHUFFLE)
        top_ptr += CHUNKS
        sum_ptr += CHUNKS
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


@triton.jit(do_not_specialize=CALLERS)
def _merge_kernel(
    x_ptr, top_ptr, sum_ptr, out_ptr, T, heads, outer, inner,
    KIND: tl.constexpr, RADICES: tl.constexpr, LEVELS: tl.constexpr, LEAVES: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK_LANES: tl.constexpr, PART_LANES: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr,
    W: tl.constexpr, SHUFFLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Compute the row's maximum and sum from its parts', then W columns of the output."""
    row, column = rows_at(TILES, 1, W)
    if KIND < LOGSUMEXP:  # the output is a whole row
        x = load_rows(x_ptr, row, column, T, heads, outer, inner, 0.0, R, UNIT, TILES)
    parts = (tl.program_id(0) // TILES).to(tl.int64) * (LEAVES * CHUNKS)
    part = tl.arange(0, PART_LANES)
    top = tl.load(top_ptr + parts + part, mask=part < LEAVES * CHUNKS, other=-float("inf"))
    shift = tl.max(top, 0)
    if KIND == LOGSUMEXP:
        shift = _finite(shift)
    if LEVELS == 0:
        weight = _leaf_weight(top_ptr + parts, sum_ptr + parts, shift, CHUNKS, CHUNK_LANES, SHUFFLE)
    else:
        weight = _row_weight(
            top_ptr + parts, sum_ptr + parts, shift, RADICES, LEVELS, LEAVES, CHUNKS, CHUNK_LANES, SHUFFLE
        )  # fmt: skip
    if KIND == LOGSUMEXP:
        tl.store(out_ptr + row, _log(weight, SHUFFLE) + shift)
    elif KIND == NORMALIZER:
        tl.store(out_ptr + 2 * row, tl.zeros((1,), tl.float32) + shift)
        tl.store(out_ptr + 2 * row + 1, _log(weight, SHUFFLE))
    elif KIND == SOFTMAX:
        e = exponential(x - shift, SHUFFLE, FAST)
        store_rows(out_ptr, row, column, T, normalized(e, weight, False, FAST), R, UNIT, TILES)
    else:
        store_rows(out_ptr, row, column, T, x - shift - _log(weight, SHUFFLE)[:, None, None], R, UNIT, TILES)


def softmax_cuda(
    x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int] | None, order: Row | None = None
) -> Tensor:
    """Run the op on the GPU, x [..., R] -> [..., R] in out_dtype (default x.dtype)."""
    return _normalized(SOFTMAX, x, out_dtype, radices, order)


def log_softmax_cuda(
    x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int] | None, order: Row | None = None
) -> Tensor:
    """Run the op on the GPU, x [..., R] -> [..., R] in out_dtype (default x.dtype)."""
    return _normalized(LOG_SOFTMAX, x, out_dtype, radices, order)


def logsumexp_cuda(x: Tensor, radices: Sequence[int] | None, order: Row | None = None) -> Tensor:
    """Run the op on the GPU, x [..., R] -> [...] fp32."""
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.shape[-1] == 0:
        return out.fill_(-math.inf)
    if out.numel():
        _run(LOGSUMEXP, x, out, order or row_order(x.shape[-1], "cuda", tuple(radices or ()), x.dtype))
    return out


def log_normalizer_cuda(x: Tensor, radices: Sequence[int] | None) -> Tensor:
    """Return [..., 2] fp32: the maximum m and the logarithm l such that log_softmax(x) = (x - m) - l."""
    out = torch.empty((*x.shape[:-1], 2), dtype=torch.float32, device=x.device)
    if x.numel():
        _run(NORMALIZER, x, out, row_order(x.shape[-1], "cuda", tuple(radices or ()), x.dtype))
    return out


def _normalized(
    kind: tl.constexpr, x: Tensor, out_dtype: torch.dtype | None, radices: Sequence[int] | None, order: Row | None
) -> Tensor:
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    if x.numel():
        _run(kind, x, out, order or row_order(x.shape[-1], "cuda", tuple(radices or ()), x.dtype))
    return out


def _run(kind: tl.constexpr, x: Tensor, out: Tensor, order: Row) -> None:
    rows, options = row_layout(x, order.vector), {"SHUFFLE": x.is_cuda, "enable_fp_fusion": False}
    options["FAST"] = x.is_cuda and kind.value == SOFTMAX.value and out.dtype.itemsize == 2
    tile = {"R": order.length, "UNIT": rows.unit, "LANES": order.lanes, "VECTOR": order.vector}
    if not order.radices and not order.chunk:
        short = SHORT_LOG if kind.value in (LOG_SOFTMAX.value, NORMALIZER.value) else SHORT
        plan = row_plan(order, short=SHORT_FEW if rows.T * order.length < FEW_ELEMENTS else short)
        grid = (cdiv(rows.T, plan.rows),)
        once = x.is_cuda and not options["FAST"] and plan.width <= ONCE_WIDTH and order.vector >= 4
        launcher(_held_kernel)[grid](
            rows.start, out, *rows[1:5], KIND=kind.value, ROWS=plan.rows, W=plan.width, FOLDS=plan.folds,
            ONCE=once, num_warps=plan.warps, **launch_options(x.device), **tile, **options,
        )  # fmt: skip
        return
    leaves = math.prod(order.radices)
    plan = row_plan(Row(order.leaf_length, order.lanes, order.vector, (), order.chunk), 1)
    chunks = plan.programs
    parts = {"LEAVES": leaves, "CHUNKS": chunks}
    top, sums = torch.empty(2, rows.T, leaves, chunks, dtype=torch.float32, device=x.device)
    launcher(_parts_kernel)[(rows.T * leaves * chunks,)](
        rows.start, top, sums, *rows[1:5], LEAF=order.leaf_length, ROWS=1, W=plan.width, num_warps=plan.warps,
        **parts, **tile, **options,
    )  # fmt: skip
    tiles = 1 if kind.value in (LOGSUMEXP.value, NORMALIZER.value) else cdiv(order.length, _OUTPUT_WIDTH)
    launcher(_merge_kernel)[(rows.T * tiles,)](
        rows.start, top, sums, out, *rows[1:5], KIND=kind.value, RADICES=order.radices[::-1] or (1,),
        LEVELS=len(order.radices), CHUNK_LANES=max(32, next_power_of_2(chunks)),
        PART_LANES=max(32, next_power_of_2(leaves * chunks)), TILES=tiles, R=order.length, UNIT=rows.unit,
        W=_OUTPUT_WIDTH, num_warps=16, **parts, **options,
    )  # fmt: skip
