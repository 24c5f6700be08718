"""Attention schedules: the candidates for a problem, the likely fastest first.

A schedule never affects bits; `templates.device.gate` checks this.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from detcompile.templates.device.launcher import next_power_of_2

Kernel = Literal["plain", "hopper", "hopper_decode"]  # kernels.py, and the modules of these names
HOPPER_ROWS = 64  # rows of a warpgroup's tile
DECODE_COLUMNS = 8  # the minimum of a warpgroup MMA


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """How a launch is divided into programs.

    Attributes:
        kernel: name of the kernel that runs.
        block_m: rows (tokens x heads of one KV head) of a program; hopper: 64 or 128; hopper_decode: 8.
        warps: warps of a program (fixed for hopper and hopper_decode).
        stages: blocks of keys in flight.
        split: True for one program per chunk, then a merge.
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
    """Everything that a choice of schedule may depend on.

    Attributes:
        dtype: name of the dtype of queries, keys and values.
        heads: query heads.
        kv_heads: heads of keys and values.
        d: head dim of queries and keys.
        dv: head dim of values.
        block_size: keys of a KV block; 0 means dense.
        chunk: keys of a chunk of the KV order.
        windowed: True if a query sees a limited number of tokens.
        decode: True if most sequences have one token.
        split: True if tiles alone leave multiprocessors idle.
        descriptors: True if the kernels for Hopper GPUs can read the keys and values.
        stages: blocks in flight for hopper_decode; 0 if it does not serve the problem.
        needs_scores: see scores.AttentionRule.
        capped: True if scores have a soft cap.
        alibi: True if scores have slopes.
        sinks: True if heads have a sink.
        chunked: True if the window is a chunk of tokens.
        relative: True if scores have biases by distance.
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
        """Number of query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def fits_hopper(self) -> bool:
        """True if the kernel of hopper.py can run."""
        return self.descriptors and not (self.needs_scores or self.sinks or self.chunked)

    @property
    def fits_hopper_decode(self) -> bool:
        """True if the kernel of hopper_decode.py can run."""
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
    """Return the schedule that defines the bits."""
    return AttentionSchedule("plain", 16, 4, 1)


@functools.cache
def attention_candidates(problem: AttentionProblem) -> tuple[AttentionSchedule, ...]:
    """Return the schedules for a problem, the likely fastest first."""
    split = problem.split
    if problem.dtype == "float32":
        rows = [(16, 4, 2), (16, 4, 1)] if problem.decode else [(32, 4, 2), (32, 8, 1), (16, 4, 2), (16, 4, 1)]
    elif problem.decode:
        rows = [(16, 2, 3), (16, 1, 3), (16, 4, 2), (16, 4, 5), (16, 4, 3), (32, 4, 2), (16, 4, 1)]
    else:
        rows = [(64, 4, 2), (128, 8, 3), (128, 8, 2), (64, 4, 3), (128, 4, 2), (32, 4, 2), (64, 4, 1)]
    candidates = [AttentionSchedule("plain", *row, split) for row in rows]
    if problem.fits_hopper:
        rows = [(64, 4, 2), (64, 4, 3)] if problem.decode else [(128, 8, 3), (128, 8, 4), (64, 4, 2)]
        candidates = [AttentionSchedule("hopper", *row, split and row[0] == HOPPER_ROWS) for row in rows] + candidates
    if problem.fits_hopper_decode:
        stages = sorted((2, 3, 4), key=lambda count: (count != problem.stages, count))
        candidates = [AttentionSchedule("hopper_decode", DECODE_COLUMNS, 4, n, split) for n in stages] + candidates
    return tuple(candidates)


def most_tiles(T: int, S: int, block_m: int, group: int) -> int:
    """Return an upper bound of the tiles of S sequences and the padding, T tokens together."""
    block_q = block_m // min(next_power_of_2(group), block_m)
    return T // block_q + S + 1
