"""Schedules of packed attention's gradients: the candidates for a problem, the likely fastest first.

A schedule never affects bits; `templates.device.gate` checks this.
"""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientProblem:
    """Everything that a choice of schedule may depend on.

    Attributes:
        of_keys: True for the gradients of keys and values, False for the gradient of queries.
        dtype: name of the dtype of queries, keys and values.
        heads: query heads.
        kv_heads: heads of keys and values.
        d: head dim of queries and keys.
        dv: head dim of values.
        windowed: True if a query sees a limited number of tokens.
        chunked: True if the window is a chunk of tokens.
        needs_scores: see scores.AttentionRule.
        capped: True if scores have a soft cap.
        alibi: True if scores have slopes.
        hopper: True if attention_hopper.py's kernels can run.
    """

    of_keys: bool
    dtype: str
    heads: int
    kv_heads: int
    d: int
    dv: int
    windowed: bool
    chunked: bool
    needs_scores: bool
    capped: bool
    alibi: bool
    hopper: bool

    def __str__(self) -> str:
        flags = ("windowed", "chunked", "needs_scores", "capped", "alibi", "hopper")
        words = [flag for flag in flags if getattr(self, flag)]
        kind = "dk dv" if self.of_keys else "dq"
        return " ".join([f"{kind} {self.dtype} {self.heads}/{self.kv_heads} d={self.d}/{self.dv}", *words])


@dataclass(frozen=True, slots=True)
class GradientTiles:
    """Queries and keys of a tile, warps of a program, and tiles in flight.

    For dq both divide 128, and a tile of Triton's has at most 64 keys: with 128 in one product, it would add to the
    running sum inside the product, which is another order. hopper: attention_hopper.py's kernels, which set their warps
    themselves.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    hopper: bool = False

    def __str__(self) -> str:
        return f"{'hopper-' * self.hopper}gradient-{self.block_m}x{self.block_n}-w{self.warps}s{self.stages}"


def reference_tiles(problem: GradientProblem) -> GradientTiles:
    """Return the schedule that defines the bits."""
    return GradientTiles(16, 16, 4, 1) if problem.dtype == "float32" else GradientTiles(32, 32, 4, 1)


@functools.cache
def candidates(problem: GradientProblem) -> tuple[GradientTiles, ...]:
    """Return the schedules for a problem, the likely fastest first."""
    if problem.dtype == "float32":
        rows = [(32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1)]
    elif max(problem.d, problem.dv) > 128:
        rows = [(64, 64, 8, 1), (32, 64, 8, 2), (64, 32, 4, 1), (32, 32, 4, 1)]
    elif problem.of_keys:
        rows = [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2), (32, 128, 8, 2), (64, 64, 4, 1)]
    else:
        rows = [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 3), (64, 64, 4, 1)]
    schedules = [GradientTiles(*row) for row in rows]
    if problem.hopper:
        schedules.insert(0, GradientTiles(64 if problem.of_keys else 128, 128, 4, 2, hopper=True))
    return tuple(schedules)
