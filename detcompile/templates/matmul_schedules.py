"""GEMM schedules: which exist for a problem, in the order in which they are likely to be fast.

Legend: M tokens, N output features, K summed features. A schedule never decides bits; `templates.tuning` sees to that.
"""

import functools
from dataclasses import dataclass, replace
from typing import TypeAlias

__all__ = ["GemmProblem", "GemmSchedule", "candidates", "reference_schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmProblem:
    """All that a choice of schedule may depend on.

    Attributes:
        order: the SumOrder, as text.
        w_nk: the weights are contiguous along K (else along N).
        aligned: x and w can be read through tensor descriptors.
        epilogue: dtype names of out, bias and residual (None: absent).
        bucket: the token count, rounded up to a power of two.
    """

    dtype: str
    n: int
    k: int
    radices: tuple[int, ...]
    order: str
    w_nk: bool
    aligned: bool
    epilogue: tuple[str, str | None, str | None]
    bucket: int

    def __str__(self) -> str:
        out, bias, residual = self.epilogue
        layout = ("NK" if self.w_nk else "KN") + ("" if self.aligned else " unaligned")
        epilogue = f"-> {out} bias={bias} residual={residual}"
        return f"{self.dtype} n={self.n} {self.order} {layout} {epilogue} m<={self.bucket}"


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """kind: "pointers" or "tma"; swapped: the weights are the M operand of the MMA; ctas: programs a multiprocessor
    (tma); leaves: "register" or "split" (see matmul_kernels)."""

    kind: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    swapped: bool = False
    leaves: str = "register"
    ctas: int = 1
    group: int = 8

    def __str__(self) -> str:
        name = f"{self.kind}{'-swapped' if self.swapped else ''}-{self.leaves}"
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{name}-{tile}-w{self.warps}s{self.stages}c{self.ctas}g{self.group}"


_Rows: TypeAlias = list[tuple[int, ...]]  # block_m, block_n, block_k, warps, stages, ctas (1 if left out)


def _schedules(kind: str, swapped: bool, rows: _Rows) -> list[GemmSchedule]:
    return [
        GemmSchedule(kind, *row[:5], swapped=swapped, ctas=row[5] if len(row) > 5 else 1)  # type: ignore[arg-type, misc]
        for row in rows
    ]


_FEW_TOKENS: dict[int, _Rows] = {
    16: [(16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 128, 128, 8, 3), (16, 64, 256, 4, 3)],
    32: [(32, 64, 128, 4, 4), (32, 128, 64, 4, 4), (32, 128, 128, 8, 3)],
    64: [(64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4)],
}
_FEW_TOKENS_TMA: dict[int, _Rows] = {
    16: [(16, 64, 128, 4, 6), (16, 128, 128, 4, 4)],
    32: [(32, 64, 128, 4, 5), (32, 128, 64, 4, 6)],
    64: [(64, 64, 128, 4, 5, 1), (64, 128, 64, 4, 6, 1), (64, 128, 128, 4, 3, 1)],
}
_TMA: dict[int, _Rows] = {
    64: [(64, 64, 64, 4, 6, 2), (64, 128, 64, 4, 6)],
    128: [(128, 64, 64, 4, 6), (128, 64, 128, 4, 4), (64, 128, 64, 4, 6), (64, 64, 128, 4, 4, 2), (128, 128, 64, 8, 4)],
    256: [(128, 128, 64, 8, 4), (128, 64, 128, 4, 4), (128, 128, 64, 4, 5), (256, 64, 64, 8, 4)],
    512: [(128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 5), (256, 128, 64, 8, 3)],
    1024: [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4)],
}
# One open node per level lives in registers, so that tiles are smaller.
_TMA_TREE: _Rows = [(128, 128, 64, 8, 4), (128, 64, 64, 8, 4, 2), (64, 128, 64, 8, 4, 2), (64, 64, 64, 4, 4, 3)]
_ANY_STRIDES: _Rows = [(128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3)]
_FLOAT32: dict[int, _Rows] = {
    16: [(16, 32, 64, 4, 3), (16, 64, 32, 4, 3), (16, 128, 32, 4, 3)],
    64: [(32, 64, 32, 4, 3), (64, 64, 32, 4, 3)],
    4096: [(64, 64, 32, 4, 3), (128, 64, 16, 8, 3), (128, 128, 16, 8, 3), (64, 64, 16, 4, 3)],
}


def reference_schedule(problem: GemmProblem) -> GemmSchedule:
    """The schedule whose bits the gate asks of all others: small tiles, plain pointers."""
    leaves = "register" if len(problem.radices) <= 4 else "split"
    return GemmSchedule("pointers", 32, 64, 32, 4, 2, False, leaves)


@functools.cache
def candidates(problem: GemmProblem) -> tuple[GemmSchedule, ...]:
    """Schedules for this problem, the likely fastest first. Every one can serve any token count."""
    if problem.dtype == "float32":
        few = next(largest for largest in _FLOAT32 if problem.bucket <= largest)
        found = _schedules("pointers", False, _FLOAT32[few])
    else:
        found = _half_precision(problem)
    if not problem.radices:
        return tuple(found)
    return tuple(_with_leaves(problem, found))


def _half_precision(problem: GemmProblem) -> list[GemmSchedule]:
    bucket = problem.bucket
    found = []
    if bucket <= 64:
        found += _schedules("pointers", True, _FEW_TOKENS[bucket])
        if problem.aligned:
            found += _schedules("tma", True, _FEW_TOKENS_TMA[bucket])
    if bucket >= 64 and problem.aligned:
        found += _schedules("tma", False, _TMA[min(bucket, 1024)])
    return found + _schedules("pointers", False, _ANY_STRIDES)


def _with_leaves(problem: GemmProblem, found: list[GemmSchedule]) -> list[GemmSchedule]:
    split = [replace(schedule, leaves="split") for schedule in found]
    if len(problem.radices) > 4:
        return _whole_groups(problem, split)
    if problem.dtype != "float32" and problem.bucket > 64 and problem.aligned:
        found = _schedules("tma", False, _TMA_TREE) + found
    return _whole_groups(problem, split + found if problem.bucket <= 256 else found + split)


def _whole_groups(problem: GemmProblem, found: list[GemmSchedule]) -> list[GemmSchedule]:
    """A descriptor does not end at a leaf: its leaves must be whole tiles of K."""
    leaf_k = problem.k
    for radix in problem.radices:
        leaf_k //= radix
    return [schedule for schedule in found if schedule.kind != "tma" or leaf_k % schedule.block_k == 0]
