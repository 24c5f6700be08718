"""Schedules of token_matmul: the candidates for a problem, the likely fastest first.

A schedule never affects bits; `templates.device.gate` checks this.
"""

import functools
from dataclasses import dataclass

# The smaller tiles allow two resident programs: one multiplies while the other finishes a leaf.
_TMA = [
    (128, 128, 64, 8, 4), (128, 128, 64, 8, 5), (128, 128, 128, 8, 3), (64, 128, 64, 4, 4), (64, 128, 64, 4, 3),
    (128, 64, 64, 4, 4), (64, 256, 64, 8, 4), (128, 128, 64, 4, 4),
]  # fmt: skip
_HOPPER = [(128, 128, 64, 4, 6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProblem:
    """Everything that a choice of schedule may depend on.

    Attributes:
        dtype: name of the dtype of both operands.
        n: features of the gradient.
        k: features of the rows that were multiplied.
        grid: exponent of the grid.
        aligned: True if rows of both operands are aligned to 16 bytes.
        hopper: True if token_hopper.py's kernel can run: Hopper GPU, 16-bit operands, aligned.
    """

    dtype: str
    n: int
    k: int
    grid: int
    aligned: bool
    hopper: bool

    def __str__(self) -> str:
        layout = ("" if self.aligned else " unaligned") + " hopper" * self.hopper
        return f"{self.dtype} n={self.n} k={self.k} grid=2^{self.grid}{layout}"


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """A program's tile of N and K, the rows of a step, its warps, and the steps in flight.

    tma: operands use tensor descriptors; group: tiles of N that share their x in L2; hopper: token_hopper.py's kernel,
    which sets its warps itself.
    """

    block_n: int
    block_k: int
    block_t: int
    warps: int
    stages: int
    tma: bool = False
    group: int = 8
    hopper: bool = False

    def __str__(self) -> str:
        tile = f"{self.block_n}x{self.block_k}x{self.block_t}"
        return f"{'hopper-' * self.hopper}tokens{'-tma' * self.tma}-{tile}-w{self.warps}s{self.stages}g{self.group}"


def reference_schedule(problem: TokenProblem) -> TokenTiles:
    """Return the schedule that defines the bits."""
    return TokenTiles(32, 32, 32, 4, 1)


@functools.cache
def candidates(problem: TokenProblem) -> tuple[TokenTiles, ...]:
    """Return the schedules for a problem, the likely fastest first."""
    if problem.dtype == "float32":
        rows = [(64, 64, 32, 4, 3), (64, 64, 16, 8, 2), (32, 32, 32, 4, 2)]
    else:
        rows = [
            (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 4),
        ]  # fmt: skip
    schedules = [TokenTiles(*row) for row in rows]
    if problem.dtype != "float32" and problem.aligned:
        schedules = [*(TokenTiles(*row, tma=True) for row in _TMA), *schedules]
    if problem.hopper:
        schedules = [*(TokenTiles(*row, hopper=True) for row in _HOPPER), *schedules]
    return tuple(schedules)
