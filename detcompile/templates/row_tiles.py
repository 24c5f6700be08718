"""Tiles of rows on the GPU: how they are laid out, loaded and summed, in the `Row` order of their length.

Legend: T rows, R row length, W columns that a program holds. A tile is ROWS rows x W slots; slot c belongs to step
c // (LANES * VECTOR), lane c // VECTOR % LANES, place c % VECTOR.

Triton lays a tile out by what it knows of strides and alignment, and the lanes' tree can follow the layout: hence R,
the tile and the alignment are compile-time, functions of the row length and dtype alone, and no argument that a caller
can change is specialised on.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.numerics import Row

__all__ = [
    "CALLERS",
    "RowLayout",
    "RowPlan",
    "aligned",
    "chunk_sums",
    "lanes_total",
    "load_rows",
    "rms_scale",
    "row_layout",
    "row_mean",
    "row_plan",
    "row_total",
    "rows_at",
    "slots_to_row",
    "store_rows",
]

CALLERS = ["T", "heads", "outer", "inner"]  # arguments that depend on the call


@triton.jit
def _halve_adjacent(x_RC):
    """(0 + 1), (2 + 3), ..."""
    even, odd = tl.split(tl.reshape(x_RC, [x_RC.shape[0], x_RC.shape[1] // 2, 2]))
    return even + odd


@triton.jit
def _halves(x_RC):
    """The lower and the upper half of the columns."""
    half: tl.constexpr = x_RC.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x_RC, [x_RC.shape[0], 2, half]), [0, 2, 1]))


@triton.jit
def _halve_apart(x_RC):
    """(0 + n/2), (1 + n/2 + 1), ..."""
    low, high = _halves(x_RC)
    return low + high


@triton.jit
def _halve_down(x_RC):
    """_halve_apart until one column of up to 4096 is left."""
    x = x_RC
    if x.shape[1] >= 2048:
        x = _halve_apart(x)
    if x.shape[1] >= 1024:
        x = _halve_apart(x)
    if x.shape[1] >= 512:
        x = _halve_apart(x)
    if x.shape[1] >= 256:
        x = _halve_apart(x)
    if x.shape[1] >= 128:
        x = _halve_apart(x)
    if x.shape[1] >= 64:
        x = _halve_apart(x)
    if x.shape[1] >= 32:
        x = _halve_apart(x)
    if x.shape[1] >= 16:
        x = _halve_apart(x)
    if x.shape[1] >= 8:
        x = _halve_apart(x)
    if x.shape[1] >= 4:
        x = _halve_apart(x)
    if x.shape[1] >= 2:
        x = _halve_apart(x)
    return x


@triton.jit
def slots_to_row(slots_RC, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr):
    """Slot totals [ROWS, LANES * VECTOR] -> row totals [ROWS], in Row order.

    SHUFFLE leaves the lanes to tl.sum, whose butterfly is the same tree when a thread holds one lane, as it does where
    a lane's places are one load. Without it every addition is spelled out (the interpreter's tl.sum has an order of
    its own).
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
        group: tl.constexpr = 32 if LANES > 32 else LANES
        groups: tl.constexpr = LANES // group
        x = _halve_down(tl.reshape(x, [ROWS * groups, group]))
        x = _halve_down(tl.reshape(x, [ROWS, groups]))
        row_total = tl.reshape(x, [ROWS])
    return row_total


@triton.jit
def _add_2(slots, x):
    low, high = _halves(x)
    return slots + low + high


@triton.jit
def _add_4(slots, x):
    low, high = _halves(x)
    return _add_2(_add_2(slots, low), high)


@triton.jit
def _add_8(slots, x):
    low, high = _halves(x)
    return _add_4(_add_4(slots, low), high)


@triton.jit
def row_total(
    terms_RW, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, SHUFFLE: tl.constexpr
):  # fmt: skip
    """Terms [ROWS, W] of whole rows or of whole chunks -> their sums [ROWS], in Row order; 1 to 16 steps."""
    STEPS: tl.constexpr = terms_RW.shape[1] // (LANES * VECTOR)
    slots = tl.zeros((ROWS, LANES * VECTOR), tl.float32)
    if STEPS == 1:
        slots += terms_RW
    elif STEPS == 2:
        slots = _add_2(slots, terms_RW)
    elif STEPS == 4:
        slots = _add_4(slots, terms_RW)
    elif STEPS == 8:
        slots = _add_8(slots, terms_RW)
    else:
        tl.static_assert(STEPS == 16)
        low, high = _halves(terms_RW)
        slots = _add_8(_add_8(slots, low), high)
    return slots_to_row(slots, ROWS, LANES, VECTOR, SHUFFLE)


@triton.jit
def lanes_total(lanes_L, SHUFFLE: tl.constexpr):
    """Sums of lanes [L] -> their sum [1], by halving in groups of 32, then the groups.

    One dimension: in two, Triton may give a thread several of them, as it did to the row that is in flight beside.
    """
    if SHUFFLE and lanes_L.shape[0] <= 512:
        total = tl.zeros((1,), tl.float32) + tl.sum(lanes_L, 0)
    else:
        total = slots_to_row(tl.reshape(lanes_L, [1, lanes_L.shape[0]]), 1, lanes_L.shape[0], 1, False)
    return total


@triton.jit
def chunk_sums(partial_ptr, row, CHUNKS: tl.constexpr, CHUNK_LANES: tl.constexpr, SHUFFLE: tl.constexpr):
    """The sum of a row that is cut into CHUNKS chunks, [1]."""
    chunk = tl.arange(0, CHUNK_LANES)
    sums = tl.load(partial_ptr + row.to(tl.int64) * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    return lanes_total(sums, SHUFFLE)


@triton.jit
def rows_at(CHUNKS: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr):
    """Rows [ROWS] and columns [W] of this program."""
    program = tl.program_id(0)
    row = program // CHUNKS * ROWS + tl.arange(0, ROWS)
    return row, program % CHUNKS * W + tl.arange(0, W)


@triton.jit
def load_rows(
    x_ptr, row, column, T, heads, outer, inner, other, R: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The tile in fp32; ``other`` past the last row or column. Row r starts at UNIT * (r // heads, r % heads)'s."""
    start = (row // heads).to(tl.int64) * outer + (row % heads).to(tl.int64) * inner
    pointers = (x_ptr + start * UNIT)[:, None] + column[None, :]
    if row.shape[0] == 1 and column.shape[0] * CHUNKS == R:
        x = tl.load(pointers)
    elif row.shape[0] == 1:
        x = tl.load(pointers, mask=(column < R)[None, :], other=other)
    else:
        x = tl.load(pointers, mask=(row < T)[:, None] & (column < R)[None, :], other=other)
    return x.to(tl.float32)


@triton.jit
def store_rows(out_ptr, row, column, T, y, R: tl.constexpr):
    """The tile, rounded to out's dtype, into contiguous rows."""
    pointers = out_ptr + row.to(tl.int64)[:, None] * R + column[None, :]
    tl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=(row < T)[:, None] & (column < R)[None, :])


@triton.jit
def row_mean(total_R, R: tl.constexpr):
    return tl.div_rn(total_R, tl.zeros(total_R.shape, tl.float32) + R)


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
    """Where the rows of x [..., R], R > 0, are: in place if they sit at two strides, each aligned to ``vector``.

    Other rows are copied, so that a kernel is always told the same of them and its tile has one layout.
    """
    dims = _merged(x)
    in_place = len(dims) <= 2 and (x.shape[-1] == 1 or x.stride(-1) == 1) and x.data_ptr() % 16 == 0
    if not in_place or any(stride % vector for _, stride in dims):
        pitch = triton.cdiv(x.shape[-1], vector) * vector
        x = x.new_empty(*x.shape[:-1], pitch)[..., : x.shape[-1]].copy_(x)
        dims = _merged(x)
    (outer_size, outer), (heads, inner) = [*[(1, 0)] * (2 - len(dims)), *dims]
    return RowLayout(x, outer_size * heads, heads, outer // vector, inner // vector, vector)


def _merged(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the leading dims of x, those that one stride walks joined."""
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
    """A weight that starts at 16 bytes, with a unit stride."""
    if vector is None or (vector.stride(0) == 1 and vector.data_ptr() % 16 == 0):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)


class RowPlan(NamedTuple):
    """How a kernel covers rows; a function of the order alone. programs: of each row; warps: of each program."""

    order: Row
    rows: int
    width: int
    programs: int
    warps: int


@functools.cache
def row_plan(order: Row, rows: int | None = None) -> RowPlan:
    """The tile of an order: short rows come several to a program, each within one warp or two."""
    step = order.lanes * order.vector
    width = order.chunk or step * triton.next_power_of_2(triton.cdiv(order.length, step))
    rows = rows or max(1, 2048 // width if width <= 512 else 1)
    return RowPlan(order, rows, width, triton.cdiv(order.length, width), max(4, min(order.lanes // 32, 32)))
