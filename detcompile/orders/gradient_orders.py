"""Orders of backward sums: over tokens exactly, over one sequence's keys and queries in a fixed order.

Legend: D dims of a head.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from detcompile.errors import NumericsError
from detcompile.orders.float32 import add_left_to_right, fma_float32
from detcompile.orders.sum_order import QUIET, Size, SumOrder


@dataclass(frozen=True, slots=True)
class Exact(SumOrder):
    """A sum over tokens that does not depend on order: leaf sums are rounded to a grid and added exactly.

    A leaf covers up to `tokens` tokens of one sequence and starts at a multiple of `tokens` in that sequence. It is
    summed in float32 in the order `leaf`, and rounded to a multiple of 2^grid, to nearest even. Sums of such multiples
    are exact in float64 in any order, as long as none exceeds 2^(53 + grid). Demmel and Nguyen, "Fast Reproducible
    Floating-Point Summation", ARITH 2013, also round to a grid.

    Raises:
        NumericsError: the grid is not an integer, or is outside of the range of float32 or float64.
    """

    leaf: SumOrder
    tokens: Size
    grid: int

    def __post_init__(self) -> None:
        grid = self.grid
        if type(grid) is not int or not -149 <= grid <= 76:
            raise NumericsError(f"Exact: grid={grid!r} must be an exponent of two from -149 to 76")
        object.__setattr__(self, "grid", 1)  # SumOrder requires positive sizes
        SumOrder.__post_init__(self)
        object.__setattr__(self, "grid", grid)

    def __str__(self) -> str:
        return f"Exact({self.leaf}, tokens={self.tokens}, grid=2^{self.grid})"

    @property
    def limit(self) -> float:
        """Largest sum of the leaves' magnitudes for which sums are exact."""
        return 2.0 ** (51 + self.grid)

    def evaluate(self, leaves: np.ndarray) -> np.ndarray:
        """leaves [count, ...], rounded to float32 first, -> [...] float64, in exact arithmetic.

        An element with a non-finite leaf is NaN.

        Raises:
            InvalidInput: the order is symbolic.
            NumericsError: magnitudes add up to more than ``limit``.
        """
        self._check_numeric()
        leaves = np.asarray(leaves, np.float32)
        flat = leaves.reshape(len(leaves), -1)
        return np.array([self._sum(column) for column in flat.T], np.float64).reshape(leaves.shape[1:])

    def _sum(self, values: np.ndarray) -> float:
        if not np.isfinite(values).all():
            return float("nan")
        step = Fraction(2) ** self.grid
        multiples = [round(Fraction(float(value)) / step) for value in values]
        if sum(map(abs, multiples)) * step > self.limit:
            raise NumericsError(f"{self}: the magnitudes of {len(values)} leaves add up to more than {self.limit}")
        return float(sum(multiples) * step)


@dataclass(frozen=True, slots=True)
class Keys(SumOrder):
    """A query's gradient: blocks of `block` keys at absolute positions, in descending order from the query's block.

    Within a block keys ascend in one chain of float32 multiply-adds from 0.0. Block sums are added to a running sum
    that starts at 0.0. FlashAttention 3's fast deterministic backward uses the same block order.
    """

    block: Size = 128

    def __str__(self) -> str:
        return f"Keys(block={self.block})"

    @QUIET
    def evaluate(self, ds: np.ndarray, k: np.ndarray) -> np.ndarray:
        """ds [queries, keys], 0 where a key is not seen, and k [keys, D] of one sequence -> [queries, D] float32.

        Raises:
            InvalidInput: the order is symbolic, or ds and k have different numbers of keys.
        """
        self._check_numeric()
        self._check_extent("the last dim of ds", ds.shape[-1], len(k))
        total = np.zeros((len(ds), k.shape[1]), np.float32)
        position = np.arange(len(ds))[:, None]
        for start in reversed(range(0, len(k), self.block)):
            keys = slice(start, start + self.block)
            total = np.where(position >= start, total + _chain(ds[:, keys].T, k[keys]), total)
        return total


@dataclass(frozen=True, slots=True)
class Queries(SumOrder):
    """A key's or value's gradient: for each of `heads` query heads, one chain over the queries of the sequence.

    A chain of float32 multiply-adds starts at 0.0 and ascends. It may start at any query up to the key's position,
    because earlier queries do not see the key and contribute zeros. The heads' sums are added left to right.
    """

    heads: Size

    def __str__(self) -> str:
        return f"Queries(heads={self.heads})"

    @QUIET
    def evaluate(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """weights [heads, queries, keys], 0 where a key is not seen, and rows [heads, queries, D] -> [keys, D] float32.

        Raises:
            InvalidInput: the order is symbolic, or the number of heads differs.
        """
        self._check_extent("the first dim of weights", len(weights), self.heads)
        return add_left_to_right([_chain(weight, row) for weight, row in zip(weights, rows, strict=True)])


def _chain(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """weights [terms, outputs] and rows [terms, D] -> [outputs, D]: one multiply-add a term, ascending from 0.0."""
    weights, rows = np.asarray(weights, np.float32), np.asarray(rows, np.float32)
    total = np.zeros((weights.shape[1], rows.shape[1]), np.float32)
    for weight, row in zip(weights, rows, strict=True):
        total = fma_float32(weight[:, None], row[None, :], total)
    return total
