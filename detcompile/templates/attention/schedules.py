"""Attention schedules: which exist for a problem, in the order in which they are likely to be fast.

A schedule never decides bits; `templates.device.gate` sees to that.
"""

import functools
from dataclasses import dataclass

from detcompile.templates.attention import hopper_decode as attention_turned

__all__ = ["AttentionProblem", "AttentionSchedule", "attention_candidates", "reference_attention_schedule"]


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """block_m: rows (tokens x heads of one KV head) of a program; split: one program a chunk, then a merge; hopper:
    the kernel of attention_hopper (block_m 64 or 128, warps as that kernel has them); turned: attention_turned's."""

    block_m: int
    warps: int
    stages: int
    split: bool = False
    hopper: bool = False
    turned: bool = False

    def __str__(self) -> str:
        name = "hopper" if self.hopper else "turned" if self.turned else "attention"
        return f"{name}-{self.block_m}-w{self.warps}s{self.stages}{'-split' if self.split else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """All that a choice of schedule may depend on.

    page 0 means dense; few: mostly one token a sequence; split: tiles alone leave multiprocessors idle; hopper:
    attention_hopper can read the keys and values; stages: blocks that attention_turned should have on their way, 0
    where it does not serve.
    """

    dtype: str
    heads: int
    kv_heads: int
    d: int
    dv: int
    page: int
    chunk: int
    windowed: bool
    few: bool
    split: bool
    hopper: bool = False
    stages: int = 0
    scaled: bool = False  # these four: see attention_scores
    capped: bool = False
    alibi: bool = False
    sinks: bool = False
    chunked: bool = False  # what is windowed are chunks of tokens
    relative: bool = False  # biases by distance

    @property
    def fast(self) -> bool:
        """Whether attention_hopper serves."""
        return self.hopper and not (self.scaled or self.sinks or self.chunked)

    @property
    def turned(self) -> bool:
        """Whether attention_turned serves."""
        return self.fast and self.few and self.page > 0

    def __str__(self) -> str:
        kind = f"page={self.page}" if self.page else "dense"
        regime = ("decode" if self.few else "prefill") + ("-split" if self.split else "")
        window = " window" if self.windowed else ""
        heads = f"{self.heads}/{self.kv_heads} d={self.d}/{self.dv}"
        flags = ("hopper", "scaled", "capped", "alibi", "sinks", "chunked", "relative")
        words = [flag for flag in flags if getattr(self, flag)]
        words += [f"stages={self.stages}"] if self.stages else []
        return " ".join([f"{self.dtype} {heads} {kind} KV(chunk={self.chunk}){window} {regime}", *words])


def reference_attention_schedule(problem: AttentionProblem) -> AttentionSchedule:
    """The schedule whose bits the gate asks of all others."""
    return AttentionSchedule(16, 4, 1)


@functools.cache
def attention_candidates(problem: AttentionProblem) -> tuple[AttentionSchedule, ...]:
    """Schedules for this problem, the likely fastest first."""
    if problem.dtype == "float32":
        rows = [(16, 4, 2), (16, 4, 1)] if problem.few else [(32, 4, 2), (32, 8, 1), (16, 4, 2), (16, 4, 1)]
    elif problem.few:
        rows = [(16, 2, 3), (16, 1, 3), (16, 4, 2), (16, 4, 5), (16, 4, 3), (32, 4, 2), (16, 4, 1)]
    else:
        rows = [(64, 4, 2), (128, 8, 3), (128, 8, 2), (64, 4, 3), (128, 4, 2), (32, 4, 2), (64, 4, 1)]
    plain = [AttentionSchedule(*row, split=problem.split) for row in rows]
    if not problem.fast:
        return tuple(plain)
    rows = [(64, 4, 2), (64, 4, 3)] if problem.few else [(128, 8, 3), (128, 8, 4), (64, 4, 2)]
    hopper = [AttentionSchedule(*row, problem.split and row[0] == 64, True) for row in rows]
    stages = sorted((2, 3, 4), key=lambda count: (count != problem.stages, count))
    turned = [AttentionSchedule(attention_turned.COLUMNS, 4, count, problem.split, turned=True) for count in stages]
    return tuple((turned if problem.turned else []) + hopper + plain)
