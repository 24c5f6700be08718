"""SumOrder: a floating-point sum as a tree of additions. Equal orders give equal bits, whatever the schedule.

Each order prints itself, hashes, states the symbols of its sizes and evaluates a reference in exactly its order, in
float32 with numpy, as the CPU templates compute: one fused multiply-add a k, which for bfloat16 is float32.fma_flushed.
(A GPU's tensor core takes the k-groups in the same order, with a rounding of its own inside a group.) No order knows
how many rows it will be applied to.

SumOrder
├── Sequential, Blocked, EvenOdd, Tree    GEMMs: evaluate(x [M, K], w [N, K]) -> [M, N]
├── Row                                   reductions over one axis: evaluate(terms [..., R]) -> [...]
├── KV                                    attention over the keys of one sequence
└── Experts                               the outputs of one token's experts

Legend: M tokens, N output features, K summed features, L leaves of a tree, R length of a row, D Dv head dims.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import sympy

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders.float32 import add_halves, add_left_to_right, add_pairs, add_tree, fma_float32, pad_last
from detcompile.orders.sum_order import QUIET, SharedOrder, Size, SumOrder

__all__ = ["Blocked", "EvenOdd", "Experts", "KV", "Row", "Sequential", "Size", "SumOrder", "Tree"]

FusedMultiplyAdd: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

_WARP = 32  # lanes that a GPU combines without shared memory


class _MatmulOrder(SharedOrder):
    """A GEMM order without a tree: one leaf, held whole by the only rank there can be."""

    __slots__ = ()
    k: Size

    def leaf_slices(self) -> list[slice]:
        """The range of K that each leaf sums, in order."""
        return [slice(0, self.k)]

    def subtree(self, tp_size: int) -> "_MatmulOrder":
        """The order in which one of `tp_size` ranks sums its share of K."""
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
    """Each `block` k, the last maybe fewer, are Sequential; block sums are added left to right, from the first on."""

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
    """Each `block` k, the last maybe fewer, are one chain of the even and one of the odd; both start at 0.0.

    A block's two chains are added to each other, and their sum to an accumulator that starts at 0.0 and walks the
    blocks upwards. AMX's product of bfloat16 tiles (Intel SDM, TDPBF16PS), where all additions flush as fma_flushed.
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
    whole subtrees and ships one float32 partial. (2, 2, 2) is the balanced binary tree of tree-based invariant kernels
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
        return f"Tree({self.k}, {_by(self.radices)}, {self.leaf})"

    def leaf_slices(self) -> list[slice]:
        """The range of K that each leaf sums, in order."""
        return [slice(i, i + self.leaf.k) for i in range(0, self.k, self.leaf.k)]

    def subtree(self, tp_size: int) -> _MatmulOrder:
        """The order in which one of `tp_size` ranks sums its share of K: a Tree, or the leaf itself.

        Raises:
            InvalidInput: no level of this tree has `tp_size` nodes.
        """
        radices = self.radices[self._depth_of(tp_size) :]
        return Tree(self.leaf.k * math.prod(radices), radices, self.leaf) if radices else self.leaf

    def _sum(self, x_MK: np.ndarray, w_NK: np.ndarray, fma: FusedMultiplyAdd) -> np.ndarray:
        return add_tree([self.leaf._sum(x_MK[..., ks], w_NK[..., ks], fma) for ks in self.leaf_slices()], self.radices)


@dataclass(frozen=True, slots=True)
class Row(SharedOrder):
    """A fixed lane tree over `length` terms, each rounded to float32 before it is added (no fused multiply-add).

    Element i belongs to step i // (lanes * vector), lane (i // vector) % lanes, place i % vector. Each (lane, place)
    adds its terms over ascending steps, from 0.0; a missing tail adds nothing. Then the places of a lane are combined
    in adjacent pairs, ((0+1)+(2+3))...; then the lanes of each group of 32 by halving (lane i += lane i+16, then 8, 4,
    2, 1); then the groups by halving. With radices, the row is prod(radices) leaves of ceil(length / prod(radices)),
    each such a row of its own, combined as in Tree, so that a row sharded over ranks keeps its bits. With a chunk, a
    leaf is cut into chunks of so many terms, each summed in that way; their sums, padded with 0.0 to a power of two of
    at least 32, are combined as lanes are.
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
        object.__setattr__(self, "chunk", max(chunk, 1))  # the other sizes have to be positive
        SumOrder.__post_init__(self)
        object.__setattr__(self, "chunk", chunk)
        for name in ("lanes", "vector"):
            size = getattr(self, name)
            if isinstance(size, int) and size & (size - 1):
                raise NumericsError(f"Row: {name}={size} is not a power of two, so halving cannot combine them")

    def __str__(self) -> str:
        leaves = f", leaves={_by(self.radices)}" if self.radices else ""
        chunk = f", chunk={self.chunk}" if self.chunk else ""
        return f"Row({self.length}, lanes={self.lanes}, vector={self.vector}{leaves}{chunk})"

    @property
    def leaf_length(self) -> Size:
        """Terms in each leaf, counting the padding of the last ones."""
        leaves = math.prod(self.radices)
        return -(-self.length // leaves) if isinstance(self.length, int) else sympy.ceiling(self.length / leaves)

    def subtree(self, tp_size: int) -> "Row":
        """The order in which one of `tp_size` ranks sums its share, which is padded with 0.0 to a whole subtree.

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


@dataclass(frozen=True, slots=True)
class KV(SumOrder):
    """Keys at absolute positions: chunks of `chunk` keys, each with a fresh online softmax over blocks of `block`.

    Inside a chunk blocks ascend; the chunks' partials (maximum m, sum l, output o) are merged ascending. Where a
    sequence is cut into prefill chunks, pages or splits appears nowhere. A block without a visible key changes nothing.

    Raises:
        NumericsError: chunk is no multiple of block.
    """

    chunk: Size
    block: Size = 64

    def __post_init__(self) -> None:
        SumOrder.__post_init__(self)
        remainder = sympy.Mod(self.chunk, self.block)
        if remainder.is_number and remainder != 0:
            raise NumericsError(f"{self}: a chunk holds whole blocks; use a multiple of {self.block}")

    def __str__(self) -> str:
        return f"KV(chunk={self.chunk}, block={self.block})"

    @QUIET
    def evaluate(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, window: int, scale: float
    ) -> np.ndarray:
        """The query at `position`, q [D], over k [keys, D] and v [keys, Dv] -> [Dv] float32.

        Key p is visible iff position - window < p <= position; window 0 shows every key up to `position`. This is the
        reference of the order of blocks and chunks, not of a template's bits: the exponential is numpy's, and one
        chain runs through the blocks of a chunk, where a template uses its own lanes and may sum each block by itself.

        Raises:
            InvalidInput: the order is symbolic, or k or v end before `position`.
        """
        self._check_numeric()
        if not 0 <= position < min(len(k), len(v)):
            raise InvalidInput(f"{self}: position {position} has no key among {len(k)} keys and {len(v)} values")
        first = max(0, position - window + 1) if window else 0
        m, l, o = _nothing_seen(v.shape[-1])
        for start in range(first // self.chunk * self.chunk, position + 1, self.chunk):
            visible = slice(max(start, first), min(start + self.chunk, position + 1))
            m_chunk, l_chunk, o_chunk = self._chunk_partial(q, k, v, visible, scale)
            m_new = np.maximum(m, m_chunk)
            old, new = np.exp2(m - _finite(m_new)), np.exp2(m_chunk - _finite(m_new))
            m, l, o = m_new, l * old + l_chunk * new, o * old + o_chunk * new
        return o / l + np.float32(0)

    def _chunk_partial(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: slice, scale: float
    ) -> tuple[np.float32, np.float32, np.ndarray]:
        """(m, l, o [Dv]) of the visible keys of one chunk."""
        m, l, o = _nothing_seen(v.shape[-1])
        log2_scale = np.float32(scale * math.log2(math.e))
        for start in range(visible.start // self.block * self.block, visible.stop, self.block):
            keys = slice(max(start, visible.start), min(start + self.block, visible.stop))
            scores = Sequential(len(q)).evaluate(k[keys], q[None])[:, 0] * log2_scale
            m_new = np.maximum(m, scores.max())
            p = np.exp2(scores - _finite(m_new))
            alpha = np.exp2(m - _finite(m_new))
            m, l, o = m_new, l * alpha, o * alpha
            for p_key, v_key in zip(p, np.asarray(v[keys], np.float32)):
                l, o = l + p_key, fma_float32(p_key, v_key, o)
        return m, l, o


@dataclass(frozen=True, slots=True)
class Experts(SumOrder):
    """The weighted outputs of one token's `num_experts` experts, added left to right in the router's rank order."""

    num_experts: Size

    def __str__(self) -> str:
        return f"Experts({self.num_experts})"

    @QUIET
    def evaluate(self, partials: np.ndarray) -> np.ndarray:
        """partials [num_experts, ...] float32, best-ranked expert first, -> [...] float32."""
        self._check_extent("the first dim of partials", len(partials), self.num_experts)
        return add_left_to_right(list(np.asarray(partials, np.float32)))


def _nothing_seen(head_dim: int) -> tuple[np.float32, np.float32, np.ndarray]:
    return np.float32(-np.inf), np.float32(0), np.zeros(head_dim, np.float32)


def _finite(maximum: np.float32) -> np.float32:
    """What scores are taken against: 0 while none of them is above -inf, so that keys without weight leave no NaN."""
    return np.float32(0) if maximum == -np.inf else maximum


def _by(radices: tuple[Size, ...]) -> str:
    return "x".join(map(str, radices))
