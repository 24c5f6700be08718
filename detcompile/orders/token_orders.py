"""Orders of a token's sums over the keys that it attends to, and over the outputs of its experts.

Legend: D Dv dims of a head's keys and values.
"""

import math
from dataclasses import dataclass

import numpy as np
import sympy

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders.float32 import add_left_to_right, fma_float32
from detcompile.orders.matmul_orders import Sequential
from detcompile.orders.sum_order import QUIET, Size, SumOrder


@dataclass(frozen=True, slots=True)
class KV(SumOrder):
    """Keys at absolute positions: chunks of `chunk` keys, each with a fresh online softmax over blocks of `block`.

    Inside a chunk blocks ascend; the chunks' partials (maximum m, sum l, output o) are merged ascending. The
    order does not depend on prefill chunks, pages or splits. A block without a visible key changes nothing.

    Raises:
        NumericsError: chunk is not a multiple of block.
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
        """Attend with the query at `position`, q [D], over k [keys, D] and v [keys, Dv] -> [Dv] float32.

        Key p is visible iff position - window < p <= position; window 0 shows every key up to `position`. This is a
        reference for the order of blocks and chunks, not for a template's bits: it uses numpy's exponential, and one
        chain through the blocks of a chunk, while a template uses lanes and may sum each block separately.

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
        """Return (m, l, o [Dv]) of one chunk's visible keys."""
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
        """Sum partials [num_experts, ...] float32, best-ranked expert first, to [...] float32."""
        self._check_extent("the first dim of partials", len(partials), self.num_experts)
        return add_left_to_right(list(np.asarray(partials, np.float32)))


def _nothing_seen(head_dim: int) -> tuple[np.float32, np.float32, np.ndarray]:
    return np.float32(-np.inf), np.float32(0), np.zeros(head_dim, np.float32)


def _finite(maximum: np.float32) -> np.float32:
    """Return the maximum to subtract from scores: 0 instead of -inf, which would give NaN."""
    return np.float32(0) if maximum == -np.inf else maximum
