"""Attention schedules: which exist for a problem, in the order in which they are likely to be fast.

A schedule never decides bits; `templates.device.gate` sees to that.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from detcompile.templates.device.launcher import next_power_of_2

__all__ = [
    "AttentionProblem",
    "AttentionSchedule",
    "DECODE_COLUMNS",
    "HOPPER_ROWS",
    "Kernel",
    "attention_candidates",
    "most_tiles",
    "reference_attention_schedule",
]

Kernel = Literal["plain", "hopper", "hopper_decode"]  # kernels.py, and the modules of these names
HOPPER_ROWS = 64  # of a warpgroup's tile
DECODE_COLUMNS = 8  # the least that a warpgroup MMA takes


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """How a launch is cut into programs.

    Attributes:
        kernel: name of the kernel that runs.
        block_m: rows (tokens x heads of one KV head) of a program; hopper: 64 or 128; hopper_decode: 8.
        warps: warps of a program (hopper and hopper_decode have their own number).
        stages: blocks of keys that are on their way at a time.
        split: one program a chunk, then a merge.
    """

    kernel: Kernel
    block_m: int
    warps: int
    stages: int
    split: bool = False

    def __str__(self) -> str:
        return f"{self.kernel}-{self.block_m}-w{self.warps}s{self.stages}{'-split' if self.split else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """All that a choice of schedule may depend on.

    Attributes:
        dtype: name of the dtype of queries, keys and values.
        heads: query heads.
        kv_heads: heads of keys and values.
        d: head dim of queries and keys.
        dv: head dim of values.
        block_size: keys of a KV block; 0 means dense.
        chunk: keys of a chunk of the KV order.
        windowed: whether a query sees a limited number of tokens.
        decode: mostly one token a sequence.
        split: tiles alone leave multiprocessors idle.
        descriptors: whether the kernels for Hopper GPUs can read the keys and values.
        stages: blocks that hopper_decode should have on their way; 0 where it does not serve.
        needs_scores: see scores.AttentionRule.
        capped: whether scores have a soft cap.
        alibi: whether scores have slopes.
        sinks: whether heads have a sink.
        chunked: what is windowed are chunks of tokens.
        relative: whether scores have biases by distance.
    """

    dtype: str
    heads: int
    kv_heads: int
    d: int
    dv: int
    block_size: int
    chunk: int
    windowed: bool
    decode: bool
    split: bool
    descriptors: bool = False
    stages: int = 0
    needs_scores: bool = False
    capped: bool = False
    alibi: bool = False
    sinks: bool = False
    chunked: bool = False
    relative: bool = False

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def fits_hopper(self) -> bool:
        """Whether the kernel of hopper.py serves."""
        return self.descriptors and not (self.needs_scores or self.sinks or self.chunked)

    @property
    def fits_hopper_decode(self) -> bool:
        """Whether the kernel of hopper_decode.py serves."""
        return self.fits_hopper and self.decode and self.block_size > 0

    def __str__(self) -> str:
        kind = f"block_size={self.block_size}" if self.block_size else "dense"
        regime = ("decode" if self.decode else "prefill") + ("-split" if self.split else "")
        window = " window" if self.windowed else ""
        heads = f"{self.heads}/{self.kv_heads} d={self.d}/{self.dv}"
        flags = ("descriptors", "needs_scores", "capped", "alibi", "sinks", "chunked", "relative")
        words = [flag for flag in flags if getattr(self, flag)]
        words += [f"stages={self.stages}"] if self.stages else []
        return " ".join([f"{self.dtype} {heads} {kind} KV(chunk={self.chunk}){window} {regime}", *words])


def reference_attention_schedule(problem: AttentionProblem) -> AttentionSchedule:
    """The schedule whose bits the gate asks of all others."""
    return AttentionSchedule("plain", 16, 4, 1)


@functools.cache
def attention_candidates(problem: AttentionProblem) -> tuple[AttentionSchedule, ...]:
    """Schedules for this problem, the likely fastest first."""
    split = problem.split
    if problem.dtype == "float32":
        rows = [(16, 4, 2), (16, 4, 1)] if problem.decode else [(32, 4, 2), (32, 8, 1), (16, 4, 2), (16, 4, 1)]
    elif problem.decode:
        rows = [(16, 2, 3), (16, 1, 3), (16, 4, 2), (16, 4, 5), (16, 4, 3), (32, 4, 2), (16, 4, 1)]
    else:
        rows = [(64, 4, 2), (128, 8, 3), (128, 8, 2), (64, 4, 3), (128, 4, 2), (32, 4, 2), (64, 4, 1)]
    found = [AttentionSchedule("plain", *row, split) for row in rows]
    if problem.fits_hopper:
        rows = [(64, 4, 2), (64, 4, 3)] if problem.decode else [(128, 8, 3), (128, 8, 4), (64, 4, 2)]
        found = [AttentionSchedule("hopper", *row, split and row[0] == HOPPER_ROWS) for row in rows] + found
    if problem.fits_hopper_decode:
        stages = sorted((2, 3, 4), key=lambda count: (count != problem.stages, count))
        found = [AttentionSchedule("hopper_decode", DECODE_COLUMNS, 4, count, split) for count in stages] + found
    return tuple(found)


def most_tiles(T: int, S: int, block_m: int, group: int) -> int:
    """Upper bound of the tiles of S sequences and the padding, T tokens together."""
    block_q = block_m // min(next_power_of_2(group), block_m)
    return T // block_q + S + 1
