"""SumOrder: base class of all orders of addition."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import sympy

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders.float32 import add_tree

Size: TypeAlias = int | sympy.Expr  # may be symbolic, so that a certificate can show what an order depends on

QUIET = np.errstate(over="ignore", invalid="ignore")  # infinities and NaN are results here, as on the device


class SumOrder:
    """A sum as a tree of additions. The subclasses are frozen dataclasses, equal iff their type and fields are.

    Raises:
        NumericsError: a size is a number but not an integer >= 1. Raised by the constructor.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Convert sympy numbers to ints, so that equal orders compare equal; reject sizes below 1."""
        for name, value in _fields(self):
            if isinstance(value, tuple | list):
                object.__setattr__(self, name, tuple(_checked_size(self, name, size) for size in value))
            elif not isinstance(value, SumOrder):
                object.__setattr__(self, name, _checked_size(self, name, value))

    @property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """Free symbols of the sizes; empty if every size is a number."""
        return _symbols(tuple(value for _, value in _fields(self)))

    def digest(self) -> str:
        """Return the sha256, in hex, of type and fields; equal in every process."""
        return hashlib.sha256(_canonical(self).encode()).hexdigest()

    def _check_numeric(self) -> None:
        if self.symbols:
            names = ", ".join(sorted(map(str, self.symbols)))
            raise InvalidInput(f"{self} cannot be evaluated: its sizes hold {names}; give numbers instead")

    def _check_extent(self, what: str, extent: int, size: Size) -> None:
        """Raise InvalidInput unless this order sums `extent` terms, the length of `what`."""
        self._check_numeric()
        if extent != size:
            raise InvalidInput(f"{self} sums {size} terms, but {what} holds {extent}; slice or pad {what} to fit")


class SharedOrder(SumOrder):
    """An order that may be sharded: each rank holds whole subtrees. Without radices, one rank holds all of it."""

    __slots__ = ()

    @QUIET
    def combine(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Sum the ranks' float32 partials, given in rank order, through the tree's levels above the subtrees.

        Raises:
            InvalidInput: no level of this tree has `len(parts)` nodes.
        """
        return add_tree(parts, _radices(self)[: self._depth_of(len(parts))])

    def _depth_of(self, tp_size: int) -> int:
        """Return the level of the tree that has `tp_size` nodes."""
        radices = _radices(self)
        sizes = [math.prod(radices[:depth]) for depth in range(len(radices) + 1)]
        if tp_size not in sizes:
            raise InvalidInput(f"{self} cannot be shared by {tp_size} ranks, only by {', '.join(map(str, sizes))}")
        return sizes.index(tp_size)


def _fields(order: SumOrder) -> list[tuple[str, object]]:
    names = [field.name for field in dataclasses.fields(order)]  # type: ignore[arg-type]
    return [(name, getattr(order, name)) for name in names]


def _radices(order: SharedOrder) -> tuple[int, ...]:
    return getattr(order, "radices", ())


def _checked_size(order: SumOrder, name: str, size: object) -> Size:
    if isinstance(size, sympy.Integer):
        size = int(size)
    if isinstance(size, sympy.Expr) and size.free_symbols:
        return size
    if type(size) is not int or size < 1:
        raise NumericsError(f"{type(order).__name__}: {name}={size!r} must be an integer of at least 1")
    return size


def _symbols(value: object) -> frozenset[sympy.Symbol]:
    if isinstance(value, SumOrder):
        return value.symbols
    if isinstance(value, tuple):
        return frozenset().union(*map(_symbols, value))
    return frozenset(value.free_symbols) if isinstance(value, sympy.Expr) else frozenset()


def _canonical(value: object) -> str:
    """Return text that is unique for an order, also for symbols of one name with different assumptions."""
    if isinstance(value, SumOrder):
        return f"{type(value).__name__}({', '.join(f'{name}={_canonical(field)}' for name, field in _fields(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_canonical, value))})"
    return sympy.srepr(value) if isinstance(value, sympy.Expr) else repr(value)
