"""Tiles of rows on the GPU: their layout, loads and stores. tile_sums adds them up in the order of `Row`.

Legend: T rows, R row length, W columns per program, F folds, C = W // F. A tile is ROWS rows x W slots; slot c belongs
to step c // (LANES * VECTOR), lane c // VECTOR % LANES, place c % VECTOR. Its shape is [ROWS, F, C]: if a row is one
step, a thread can hold F of its lanes, C slots apart, which are added first in the lanes' tree and so in registers.
Fewer threads then share the row, and work that is done once per row is spread over more elements.

Triton chooses a tile's layout by what it knows of strides and alignment, and the lanes' tree can follow the layout.
Therefore R, the tile and the alignment are compile-time functions of the row length and dtype, and no argument that a
caller can change is specialized on.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.orders import Row
from detcompile.templates.device.launcher import cdiv, next_power_of_2
from detcompile.templates.device.primitives import widened

CALLERS = ["T", "heads", "outer", "inner"]  # arguments that depend on the call


@triton.jit
def rows_at(CHUNKS: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, FOLDS: tl.constexpr = 1):
    """Rows [ROWS] and columns [F, C] of this program."""
    C: tl.constexpr = W // FOLDS
    program = tl.program_id(0)
    row = program // CHUNKS * ROWS + tl.arange(0, ROWS)
    return row, program % CHUNKS * W + tl.arange(0, FOLDS)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def row_starts(row, T, heads, outer, inner, UNIT: tl.constexpr):
    """Where rows start, in units. Most callers' rows have one stride, which saves a tile of several rows the divisions.

    Not used if a thread loads so little of a row that it holds many rows: both address computations cost registers.
    """
    if row.shape[0] == 1 or UNIT < 4:
        start = (row // heads).to(tl.int64) * outer + (row % heads).to(tl.int64) * inner
    elif heads >= T:
        start = row.to(tl.int64) * inner
    else:
        start = (row // heads).to(tl.int64) * outer + (row % heads).to(tl.int64) * inner
    return start


@triton.jit
def _inside(row, column, T, R: tl.constexpr, W: tl.constexpr):
    """Mask of the tile's places that exist; W columns cover a row."""
    if W == R:
        ok = (row < T)[:, None, None]
    else:
        ok = (row < T)[:, None, None] & (column < R)[None, :, :]
    return ok


@triton.jit
def load_rows(
    x_ptr, row, column, T, heads, outer, inner, other, R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr,
    EVICT_FIRST: tl.constexpr = True,
):  # fmt: skip
    """The tile in fp32; ``other`` past the last row or column. Row r starts at UNIT * (r // heads, r % heads)'s.

    EVICT_FIRST: for many short rows the cache is better kept for the output.
    """
    W: tl.constexpr = column.shape[0] * column.shape[1] * CHUNKS
    start = row_starts(row, T, heads, outer, inner, UNIT)
    pointers = (x_ptr + start * UNIT)[:, None, None] + column[None, :, :]
    if row.shape[0] == 1 and W == R:
        x = tl.load(pointers)
    elif row.shape[0] == 1:
        x = tl.load(pointers, mask=(column < R)[None, :, :], other=other)
    elif EVICT_FIRST:
        x = tl.load(pointers, mask=_inside(row, column, T, R, W), other=other, eviction_policy="evict_first")
    else:
        x = tl.load(pointers, mask=_inside(row, column, T, R, W), other=other)
    return x.to(tl.float32)


@triton.jit
def load_columns(pointer, row, column, R: tl.constexpr, VECTOR: tl.constexpr, DTYPE: tl.constexpr):
    """A vector [R] for every row of a tile of DTYPE, in fp32, [ROWS or 1, F, C].

    It is loaded as a tile if it is needed at once. But a tile's layout follows the widest load of its shape, which must
    remain the load of the rows: a vector that allows wider loads is loaded once and exchanged between threads.
    """
    WIDEST: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    if WIDEST <= VECTOR:
        pointers = pointer + column[None, :, :] + tl.zeros_like(row)[:, None, None]
        x = tl.load(pointers, mask=(column < R)[None, :, :], other=0.0)
    else:
        x = tl.load(pointer + column, mask=column < R, other=0.0)[None, :, :]
    return widened(x, DTYPE)


@triton.jit
def in_units(start, column, UNIT: tl.constexpr):
    """Pointers start + column of a tile [ROWS, W] or [ROWS, F, C], to be accessed UNIT elements at a time.

    A tile's layout follows the widest access of its shape, which must remain the load of the rows. Other accesses could
    be wider: a thread could store more 16-bit elements than it loads of fp32.
    """
    pointers = start + column
    if len(pointers.shape) == 2:
        pointers = tl.max_contiguous(pointers, [1, UNIT])
    else:
        pointers = tl.max_contiguous(pointers, [1, 1, UNIT])
    return pointers


@triton.jit
def store_rows(out_ptr, row, column, T, y, R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr):
    """Store the tile, rounded to out's dtype, into contiguous rows."""
    W: tl.constexpr = column.shape[0] * column.shape[1] * CHUNKS
    start = (out_ptr + row.to(tl.int64) * R)[:, None, None]
    if UNIT == 1:  # where this tile is summed R is odd, so no wider piece of a row is aligned
        pointers = start + column[None, :, :]
    else:
        pointers = in_units(start, column[None, :, :], UNIT)
    tl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=_inside(row, column, T, R, W))


@triton.jit
def row_mean(total_R, R: tl.constexpr):
    if R & (R - 1) == 0:
        mean = total_R * (1.0 / R)  # R is a power of two, so this equals the quotient
    else:
        mean = tl.div_rn(total_R, tl.zeros(total_R.shape, tl.float32) + R)
    return mean


@triton.jit
def rms_scale(squares_R, eps, R: tl.constexpr):
    """1 / sqrt(mean square + eps)."""
    return tl.rsqrt(row_mean(squares_R, R) + eps)


class RowLayout(NamedTuple):
    """Rows of R elements: row r starts at element unit * (r // heads * outer + r % heads * inner) of ``start``."""

    start: Tensor
    T: int
    heads: int
    outer: int
    inner: int
    unit: int


def row_layout(x: Tensor, vector: int) -> RowLayout:
    """Return the layout of the rows of x [..., R], R > 0; in place if they have two strides aligned to ``vector``.

    Other rows are copied, so that a kernel's compile-time knowledge and its tile's layout are always the same.
    """
    dims = _merged(x)
    in_place = len(dims) <= 2 and (x.shape[-1] == 1 or x.stride(-1) == 1) and x.data_ptr() % 16 == 0
    if not in_place or any(stride % vector for _, stride in dims):
        pitch = cdiv(x.shape[-1], vector) * vector
        x = x.new_empty(*x.shape[:-1], pitch)[..., : x.shape[-1]].copy_(x)
        dims = _merged(x)
    (outer_size, outer), (heads, inner) = [*[(1, 0)] * (2 - len(dims)), *dims]
    return RowLayout(x, outer_size * heads, heads, outer // vector, inner // vector, vector)


def _merged(x: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides of x's leading dims; dims that one stride covers are merged."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def aligned(vector: Tensor | None) -> Tensor | None:
    """Return a weight with unit stride that is aligned to 16 bytes."""
    if vector is None or (vector.stride(0) == 1 and vector.data_ptr() % 16 == 0):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)


class ShortTile(NamedTuple):
    """Rows that share a program. elements, warps: per program; folds: lanes of a row per thread."""

    elements: int = 2048
    warps: int = 4
    folds: int = 1


class RowPlan(NamedTuple):
    """How a kernel covers rows; depends only on the order. programs: per row; warps: per program."""

    order: Row
    rows: int
    width: int
    programs: int
    warps: int
    folds: int = 1


@functools.cache
def row_plan(order: Row, rows: int | None = None, short: ShortTile | None = None) -> RowPlan:
    """Return the tile of an order; several short rows share a program, each within one warp or two.

    Args:
        short: the tile for rows of up to 512 columns; default: ShortTile().
    """
    step = order.lanes * order.vector
    width = order.chunk or step * next_power_of_2(cdiv(order.length, step))
    short = short or ShortTile()
    if rows is None and width <= 512:
        # A thread holds whole lanes of a row, one or `folds`; this sets the number of threads and elements.
        folds = min(short.folds, order.lanes) if width == step and order.lanes <= 32 else 1
        warps = max(short.warps, order.lanes // 32)
        elements = max(short.elements, 32 * warps * order.vector * folds)
        return RowPlan(order, elements // width or 1, width, 1, warps, folds)
    warps = max(4, min(order.lanes // 32, 32))
    return RowPlan(order, rows or 1, width, cdiv(order.length, width), warps)
