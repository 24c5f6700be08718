"""Row: the order of a reduction over one axis; evaluate(terms [..., R]) -> [...], R the length."""

import math
from dataclasses import dataclass

import numpy as np
import sympy

from detcompile.errors import NumericsError
from detcompile.orders.float32 import add_halves, add_pairs, add_tree, pad_last
from detcompile.orders.sum_order import QUIET, SharedOrder, Size, SumOrder

_WARP = 32  # lanes that a GPU combines without shared memory


@dataclass(frozen=True, slots=True)
class Row(SharedOrder):
    """A fixed lane tree over `length` terms, each rounded to float32 before it is added (no fused multiply-add).

    Element i belongs to step i // (lanes * vector), lane (i // vector) % lanes, place i % vector. Each (lane, place)
    adds its terms over ascending steps, from 0.0; a missing tail adds nothing. Then the places of a lane are combined
    in adjacent pairs, ((0+1)+(2+3))...; then the lanes of each group of 32 by halving (lane i += lane i+16, then 8, 4,
    2, 1); then the groups by halving.

    With radices, the row is split into prod(radices) leaves of ceil(length / prod(radices)) terms. Each leaf is summed
    as above, and leaves are combined as in Tree, so that a row sharded over ranks keeps its bits. With a chunk, a leaf
    is split into chunks of that many terms, each summed as above. The chunk sums, padded with 0.0 to a power of two of
    at least 32, are combined like lanes.
    """

    length: Size
    lanes: Size
    vector: Size = 1
    radices: tuple[Size, ...] = ()
    chunk: int = 0

    def __post_init__(self) -> None:
        chunk = self.chunk
        if type(chunk) is not int or chunk < 0:
            raise NumericsError(f"Row: chunk={chunk!r} must be a number of terms, or 0 for whole leaves")
        object.__setattr__(self, "chunk", max(chunk, 1))  # SumOrder requires positive sizes
        SumOrder.__post_init__(self)
        object.__setattr__(self, "chunk", chunk)
        for name in ("lanes", "vector"):
            size = getattr(self, name)
            if isinstance(size, int) and size & (size - 1):
                raise NumericsError(f"Row: {name}={size} is not a power of two, so halving cannot combine them")

    def __str__(self) -> str:
        leaves = f", leaves={'x'.join(map(str, self.radices))}" if self.radices else ""
        chunk = f", chunk={self.chunk}" if self.chunk else ""
        return f"Row({self.length}, lanes={self.lanes}, vector={self.vector}{leaves}{chunk})"

    @property
    def leaf_length(self) -> Size:
        """Terms in each leaf, with padding."""
        leaves = math.prod(self.radices)
        return -(-self.length // leaves) if isinstance(self.length, int) else sympy.ceiling(self.length / leaves)

    def subtree(self, tp_size: int) -> "Row":
        """Return the order in which one of `tp_size` ranks sums its share, padded with 0.0 to a whole subtree.

        Raises:
            InvalidInput: no level of this tree has `tp_size` nodes.
        """
        radices = self.radices[self._depth_of(tp_size) :]
        return Row(self.leaf_length * math.prod(radices), self.lanes, self.vector, radices, self.chunk)

    @QUIET
    def evaluate(self, terms: np.ndarray) -> np.ndarray:
        """terms [..., length], rounded to float32 first, -> [...] float32, in this order.

        Raises:
            InvalidInput: the length is symbolic, or not the last dim.
        """
        self._check_extent("the last dim of terms", np.shape(terms)[-1], self.length)
        terms = np.asarray(terms, np.float32)
        leaves = math.prod(self.radices)
        terms = pad_last(terms, leaves * self.leaf_length).reshape(*terms.shape[:-1], leaves, self.leaf_length)
        sums = self._sum_leaf(terms)
        return add_tree([sums[..., i] for i in range(leaves)], self.radices)

    def _sum_leaf(self, terms: np.ndarray) -> np.ndarray:
        if not self.chunk:
            return self._sum_lanes(terms)
        chunks = -(-self.leaf_length // self.chunk)
        terms = pad_last(terms, chunks * self.chunk).reshape(*terms.shape[:-1], chunks, self.chunk)
        sums = self._sum_lanes(terms)
        lanes = max(_WARP, 1 << (chunks - 1).bit_length())
        return add_halves(add_halves(pad_last(sums, lanes).reshape(*sums.shape[:-1], lanes // _WARP, _WARP)))

    def _sum_lanes(self, terms: np.ndarray) -> np.ndarray:
        group = min(self.lanes, _WARP)
        step = self.lanes * self.vector
        num_steps = -(-terms.shape[-1] // step)
        places = (self.lanes // group, group, self.vector)
        terms = pad_last(terms, num_steps * step).reshape(*terms.shape[:-1], num_steps, *places)
        acc = np.zeros((*terms.shape[:-4], *places), np.float32)
        for i in range(num_steps):
            acc = acc + terms[..., i, :, :, :]
        return add_halves(add_halves(add_pairs(acc)))
