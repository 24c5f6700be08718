"""Orders of a GEMM's sums over K: evaluate(x [M, K], w [N, K]) -> [M, N] performs exactly the order's additions.

The references compute like the CPU templates, in float32 with numpy: one fused multiply-add for each k, for bfloat16
float32.fma_flushed. A GPU's tensor core takes groups of k in the same order; rounding inside a group is the hardware's.

Legend: M tokens, N output features, K summed features, L leaves of a tree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import sympy

from detcompile.errors import NumericsError
from detcompile.orders.float32 import add_left_to_right, add_tree, fma_float32
from detcompile.orders.sum_order import QUIET, SharedOrder, Size, SumOrder

FusedMultiplyAdd: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class _MatmulOrder(SharedOrder):
    """A GEMM order without a tree: one leaf on one rank."""

    __slots__ = ()
    k: Size

    def leaf_slices(self) -> list[slice]:
        """Return the range of K that each leaf sums, in order."""
        return [slice(0, self.k)]

    def subtree(self, tp_size: int) -> "_MatmulOrder":
        """Return the order in which one of `tp_size` ranks sums its share of K."""
        self._depth_of(tp_size)
        return self

    @QUIET
    def evaluate(self, x_MK: np.ndarray, w_NK: np.ndarray, fma: FusedMultiplyAdd = fma_float32) -> np.ndarray:
        """x [..., M, K] times w [..., N, K], float32 or exactly convertible, -> [..., M, N] float32, in this order.

        Raises:
            InvalidInput: K is symbolic, or not the last dim of both.
        """
        self._check_extent("the last dim of x", np.shape(x_MK)[-1], self.k)
        self._check_extent("the last dim of w", np.shape(w_NK)[-1], self.k)
        return self._sum(np.asarray(x_MK, np.float32), np.asarray(w_NK, np.float32), fma)

    def _sum(self, x_MK: np.ndarray, w_NK: np.ndarray, fma: FusedMultiplyAdd) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Sequential(_MatmulOrder):
    """One float32 accumulator that starts at 0.0 and walks k upwards."""

    k: Size

    def __str__(self) -> str:
        return f"Sequential({self.k})"

    def _sum(self, x_MK: np.ndarray, w_NK: np.ndarray, fma: FusedMultiplyAdd) -> np.ndarray:
        x_KM, w_KN = np.moveaxis(x_MK, -1, 0), np.moveaxis(w_NK, -1, 0)
        acc = np.zeros(np.broadcast_shapes(x_KM.shape[1:] + (1,), w_KN.shape[1:-1] + (1, w_KN.shape[-1])), np.float32)
        for x_M, w_N in zip(x_KM, w_KN):
            acc = fma(x_M[..., :, None], w_N[..., None, :], acc)
        return acc


@dataclass(frozen=True, slots=True)
class Blocked(_MatmulOrder):
    """Blocks of `block` k (the last may be shorter) are summed sequentially; block sums are added left to right."""

    k: Size
    block: Size = 128

    def __str__(self) -> str:
        return f"Blocked({self.k}, block={self.block})"

    def _sum(self, x_MK: np.ndarray, w_NK: np.ndarray, fma: FusedMultiplyAdd) -> np.ndarray:
        cuts = range(0, self.k, self.block)
        blocks = [Sequential(1)._sum(x_MK[..., i : i + self.block], w_NK[..., i : i + self.block], fma) for i in cuts]
        return add_left_to_right(blocks)


@dataclass(frozen=True, slots=True)
class EvenOdd(_MatmulOrder):
    """Each block of `block` k is one chain of even k and one of odd k, both from 0.0. The last block may be shorter.

    A block's two chains are added, and their sum is added to an accumulator that starts at 0.0, blocks ascending. This
    is AMX's product of bfloat16 tiles (Intel SDM, TDPBF16PS), where all additions flush like fma_flushed.
    """

    k: Size
    block: Size = 32

    def __str__(self) -> str:
        return f"EvenOdd({self.k}, block={self.block})"

    def _sum(self, x_MK: np.ndarray, w_NK: np.ndarray, fma: FusedMultiplyAdd) -> np.ndarray:
        one, acc = np.ones((), np.float32), Sequential(1)._sum(x_MK[..., :0], w_NK[..., :0], fma)
        for start in range(0, self.k, self.block):
            block = [slice(start + first, min(start + self.block, self.k), 2) for first in (0, 1)]
            even, odd = (Sequential(1)._sum(x_MK[..., ks], w_NK[..., ks], fma) for ks in block)
            acc = fma(one, fma(one, even, odd), acc)
        return acc


@dataclass(frozen=True, slots=True)
class Tree(_MatmulOrder):
    """prod(radices) equal contiguous leaves of K; a node of radix r adds its r children left to right in float32.

    Radices run from root to leaf: after (1, 3, 6) they are (3, 2), and leaves 2i and 2i+1 meet first. A rank holds
    whole subtrees and sends one float32 partial. (2, 2, 2) is the balanced binary tree of tree-based invariant kernels
    (TBIK; Zhang et al., "Deterministic Inference across Tensor Parallel Sizes", arXiv:2511.17826).

    Raises:
        NumericsError: no radices, or the leaves do not add up to k.
    """

    k: Size
    radices: tuple[Size, ...]
    leaf: Sequential | Blocked | EvenOdd

    def __post_init__(self) -> None:
        SumOrder.__post_init__(self)
        assert isinstance(self.leaf, Sequential | Blocked | EvenOdd), self.leaf
        if not self.radices:
            raise NumericsError(f"Tree({self.k}): a tree without radices is its leaf; use {self.leaf}")
        leaves = math.prod(self.radices)
        if sympy.expand(self.leaf.k * leaves - self.k) != 0:
            raise NumericsError(
                f"{self}: {leaves} leaves of {self.leaf.k} are not {self.k}; give each leaf K / {leaves}, or choose "
                "tp_sizes whose largest divides K"
            )

    def __str__(self) -> str:
        return f"Tree({self.k}, {'x'.join(map(str, self.radices))}, {self.leaf})"

    def leaf_slices(self) -> list[slice]:
        """Return the range of K that each leaf sums, in order."""
        return [slice(i, i + self.leaf.k) for i in range(0, self.k, self.leaf.k)]

    def subtree(self, tp_size: int) -> _MatmulOrder:
        """Return the order in which one of `tp_size` ranks sums its share of K: a Tree, or the leaf itself.

        Raises:
            InvalidInput: no level of this tree has `tp_size` nodes.
        """
        radices = self.radices[self._depth_of(tp_size) :]
        return Tree(self.leaf.k * math.prod(radices), radices, self.leaf) if radices else self.leaf

    def _sum(self, x_MK: np.ndarray, w_NK: np.ndarray, fma: FusedMultiplyAdd) -> np.ndarray:
        return add_tree([self.leaf._sum(x_MK[..., ks], w_NK[..., ks], fma) for ks in self.leaf_slices()], self.radices)
