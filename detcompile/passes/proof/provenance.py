"""Row provenance: which rows of the inputs each value of a graph may read.

"Pointwise or data movement" proves nothing about a batch: a roll over tokens is an index_select. So every dimension of
every value is described by its row-major *axes*. An axis is either a feature (its extent is a number) or a row space
("tokens", "batch", "logits") in its original order. An operation is accepted only if row t of its output reads row t of
its inputs. The rule of each operation says how axes move. Operations without a rule are refused.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sympy


class Axis(NamedTuple):
    """One factor of a dimension. ``row`` is its row space, None for a feature."""

    size: sympy.Expr
    row: str | None = None


Dim = tuple[Axis, ...]


@dataclass(frozen=True)
class Rows:
    """A tensor: the axes of each dimension, outermost first; () for a dimension of extent 1."""

    dims: tuple[Dim, ...]

    @property
    def row_spaces(self) -> tuple[str, ...]:
        return tuple(axis.row for dim in self.dims for axis in dim if axis.row)

    def without(self, dim: int) -> "Rows":
        """Return the tensor without a dimension, 0 <= dim < rank."""
        return Rows(self.dims[:dim] + self.dims[dim + 1 :])


@dataclass(frozen=True)
class Layout:
    """Step metadata (slots, lengths, block tables, caches): only attention may read it.

    part: field of StepInputs. index: layer of a cache. group: KV group whose blocks it describes.
    """

    part: str = ""
    index: int = 0
    group: int | None = None


@dataclass(frozen=True)
class Size:
    """A symbolic extent: it may shape a value, never enter one."""


@dataclass(frozen=True)
class TokenSum:
    """The gradient of a weight, summed exactly over all tokens. No row may read it."""


LAYOUT, SIZE = Layout(), Size()


class Refusal(Exception):
    """Why an operation is not proven to keep rows apart."""


def simplify(axes: Iterable[Axis]) -> Dim:
    """Drop extents of 1 and merge adjacent features."""
    kept: list[Axis] = []
    for axis in axes:
        if axis.size == 1 and not axis.row:
            continue
        if kept and not kept[-1].row and not axis.row:
            kept[-1] = Axis(kept[-1].size * axis.size)
        else:
            kept.append(axis)
    return tuple(kept)


def is_feature(dim: Dim) -> bool:
    return all(axis.row is None and not axis.size.free_symbols for axis in dim)


def join(values: Sequence[Rows], rank: int) -> Rows:
    """Return the axes of an elementwise result with broadcast operands."""
    dims: list[Dim] = []
    for position in range(-rank, 0):
        joined: Dim = ()
        for value in values:
            if -position > len(value.dims):
                continue
            dim = simplify(value.dims[position])
            if not dim or dim == joined:
                continue
            if joined:
                raise Refusal(f"elements of {describe(joined)} meet elements of {describe(dim)}")
            joined = dim
        dims.append(joined)
    return Rows(tuple(dims))


def require_apart(value: Rows, sizes: Sequence[sympy.Expr], chosen: Iterable[str]) -> None:
    """Require that the axes match the extents, and that no row meets another row of its space.

    The caller selected the rows of the spaces in ``chosen`` from other spaces, whose rows they may not meet.
    """
    spaces = value.row_spaces
    crossed = {row for row in spaces if spaces.count(row) > 1}
    if crossed:
        raise Refusal(f"every row of {', '.join(sorted(crossed))} meets every other")
    if len(spaces) > 1 and set(chosen) & set(spaces):
        raise Refusal(f"rows chosen by the caller meet rows of the step ({', '.join(spaces)})")
    extents = [math.prod((axis.size for axis in dim), start=sympy.Integer(1)) for dim in value.dims]
    if len(extents) != len(sizes) or any(sympy.expand(a - b) != 0 for a, b in zip(extents, sizes, strict=True)):
        raise Refusal(f"its axes {' '.join(map(describe, value.dims))} do not make its extents {list(sizes)}")


def describe(dim: Dim) -> str:
    return "[" + " x ".join(axis.row or str(axis.size) for axis in dim) + "]"


def take(axes: list[Axis], size: sympy.Expr) -> Dim:
    """Remove axes of total extent ``size`` from the front of ``axes``, splitting a feature where it divides."""
    taken: list[Axis] = []
    while size != 1:
        if not axes:
            raise Refusal("the reshape does not follow the axes")
        axis = axes.pop(0)
        rest = sympy.cancel(size / axis.size)
        if rest.is_integer is not False and sympy.denom(rest) == 1:
            taken.append(axis)
            size = rest
            continue
        left = sympy.cancel(axis.size / size)
        if axis.row or sympy.denom(left) != 1:
            raise Refusal(f"a reshape cuts {describe((axis,))} into pieces of {size}")
        taken.append(Axis(size))
        axes.insert(0, Axis(left))
        size = sympy.Integer(1)
    return simplify(taken)


def view(value: Rows, sizes: Sequence[sympy.Expr]) -> Rows:
    """Return the axes after a reshape to ``sizes``."""
    axes = [axis for dim in value.dims for axis in simplify(dim)]
    dims = tuple(take(axes, size) for size in sizes)
    if axes:
        raise Refusal(f"the reshape leaves {describe(tuple(axes))} over")
    return Rows(dims)


def permute(value: Rows, order: Sequence[int]) -> Rows:
    return Rows(tuple(value.dims[position] for position in order))


def drop(value: Rows, dims: Iterable[int], keepdim: bool, what: str) -> Rows:
    """Return the axes after a reduction over ``dims``, which must be features."""
    rank = len(value.dims)
    gone = {dim % rank for dim in dims}
    for dim in gone:
        require_feature(value, dim, what)
    kept = [() if i in gone else dim for i, dim in enumerate(value.dims) if keepdim or i not in gone]
    return Rows(tuple(kept))


def require_feature(value: Rows, dim: int, what: str) -> None:
    axes = value.dims[dim]
    if not is_feature(axes):
        raise Refusal(f"{what} over {describe(axes)}")


def require_weight(value: Rows, what: str) -> None:
    if value.row_spaces:
        raise Refusal(f"{what} holds rows of {', '.join(value.row_spaces)}")


RowSymbols = dict[sympy.Expr, str]
Rule = Callable[..., Rows | tuple[Rows, ...] | Layout]


def created(sizes: Sequence[sympy.Expr], row_symbols: RowSymbols) -> Rows:
    """Return the axes of a value that reads no row. A row space's extent stands for that row space, broadcast."""
    return Rows(tuple(simplify((Axis(size, row_symbols.get(size)),)) for size in sizes))


def expand(value: Rows, sizes: Sequence[sympy.Expr], row_symbols: RowSymbols) -> Rows:
    """Return the axes after a broadcast to ``sizes``."""
    new = created(sizes, row_symbols).dims
    padding = len(sizes) - len(value.dims)
    return Rows(
        tuple(
            new[i] if i < padding or not value.dims[i - padding] else value.dims[i - padding] for i in range(len(sizes))
        )
    )


def choose_rows(value: Rows, dim: int, chosen: Axis) -> Rows:
    """Return the axes after logits_to_keep picks rows of ``dim``, the only dimension with rows."""
    if len(value.row_spaces) != 1 or len(value.dims[dim]) != 1 or value.dims[dim][0].row in (None, chosen.row):
        raise Refusal(f"rows are chosen from {' '.join(map(describe, value.dims))}, dimension {dim}")
    return Rows((*value.dims[:dim], (chosen,), *value.dims[dim + 1 :]))


def index(value: Rows, indices: Sequence[Rows | None]) -> Rows:
    """Return the axes of ``value[indices]``."""
    chosen = [i for i, idx in enumerate(indices) if idx is not None]
    for i in chosen:
        require_feature(value, i, "indexing")
    if chosen != list(range(chosen[0], chosen[-1] + 1)):
        raise Refusal("indexing over separated dimensions")
    picked = [idx for idx in indices if idx is not None]
    joined = join(picked, max(len(idx.dims) for idx in picked))
    if joined.row_spaces and value.row_spaces:
        raise Refusal("rows index into rows")
    return Rows((*value.dims[: chosen[0]], *joined.dims, *value.dims[chosen[-1] + 1 :]))


def gather(value: Rows, dim: int, idx: Rows) -> Rows:
    """Return the axes of a gather along a feature dimension with an index of the same rows."""
    rank = len(value.dims)
    dim %= rank
    require_feature(value, dim, "gather")
    require_feature(idx, dim, "gather index")
    others = join([value.without(dim), idx.without(dim)], rank - 1)
    return Rows((*others.dims[:dim], idx.dims[dim], *others.dims[dim:]))
