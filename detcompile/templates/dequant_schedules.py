"""Schedules of dequant_matmul on the GPU: which exist for a problem, the likely fastest first.

Legend: M tokens, N output features, K summed features. Bits are the same under all; `templates.tuning` sees to that.
"""

import functools
import math
from dataclasses import dataclass, replace

from detcompile.templates.matmul_schedules import GemmSchedule
from detcompile.templates.quantized import NIBBLE_BLOCK

__all__ = ["DequantProblem", "EXPAND", "LEVELS", "dequant_candidates"]

EXPAND = GemmSchedule("expand", 0, 0, 0, 0, 0)  # then matmul, with a schedule of its own
LEVELS = 4  # of a tree that one kernel can hold
# block_m, block_n, block_k, warps, stages: by kind (nibbles take 128 k a step) and bucket.
_FUSED: dict[int, list[tuple[int, int, int, int, int]]] = {
    16: [(16, 64, 128, 4, 4), (16, 32, 128, 2, 5), (16, 16, 128, 1, 6), (16, 128, 128, 4, 4), (16, 64, 128, 4, 6)],
    32: [(32, 64, 128, 4, 4), (32, 32, 128, 2, 5), (32, 128, 128, 4, 4), (16, 64, 128, 4, 5)],
    64: [(64, 64, 128, 4, 4), (64, 128, 128, 8, 3), (64, 64, 128, 4, 3), (32, 64, 128, 4, 4)],
    128: [(128, 64, 128, 4, 3), (128, 128, 128, 8, 3), (64, 128, 128, 8, 3)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantProblem:
    """All that a choice of schedule may depend on.

    Attributes:
        dtype: of the activations.
        w_dtype, s_dtype: of the quantised weights and of their scales.
        zeros: whether they have zero points.
        order: the SumOrder, as text.
        epilogue: dtype names of out, bias and residual (None: absent).
        bucket: the token count, rounded up to a power of two.
    """

    dtype: str
    w_dtype: str
    s_dtype: str
    zeros: bool
    n: int
    k: int
    group: int
    rows: int
    radices: tuple[int, ...]
    order: str
    epilogue: tuple[str, str | None, str | None]
    bucket: int

    @property
    def leaf_k(self) -> int:
        return self.k // math.prod(self.radices)

    def __str__(self) -> str:
        out, bias, residual = self.epilogue
        weights = f"{self.w_dtype} x {self.s_dtype} by {self.group}x{self.rows}{' zeros' * self.zeros}"
        epilogue = f"-> {out} bias={bias} residual={residual}"
        return f"{self.dtype} {weights} n={self.n} {self.order} {epilogue} m<={self.bucket}"


@functools.cache
def dequant_candidates(problem: DequantProblem) -> tuple[GemmSchedule, ...]:
    """Fused schedules for this problem, the likely fastest first; of many tokens none pays."""
    few = problem.bucket <= max(_FUSED) and len(problem.radices) <= LEVELS
    if not few or problem.dtype == "float32" or (problem.radices and problem.leaf_k % NIBBLE_BLOCK):
        return ()
    found = [GemmSchedule("fused", *sizes, swapped=True) for sizes in _FUSED[problem.bucket]]
    if problem.w_dtype == "uint8":
        return tuple(found)
    shorter = [replace(schedule, block_k=64, stages=schedule.stages + 2) for schedule in found[:3]]
    return (*found, *shorter)
