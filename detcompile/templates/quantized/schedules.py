"""Schedules of dequant_matmul on the GPU: the candidates for a problem, the likely fastest first.

Legend: M tokens, N output features, K summed features. A schedule never affects bits; `templates.device.gate` checks
this.
"""

import functools
import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeAlias

from detcompile.templates.matmul.schedules import PipelinedTile
from detcompile.templates.matmul.tree import LEVELS
from detcompile.templates.quantized.weights import NIBBLE_BLOCK


@dataclass(frozen=True, slots=True)
class Fused(PipelinedTile):
    """kernels.dequant_kernel, one tile in steps of block_k; weights are the M operand of the MMA.

    Attributes:
        split: True if each leaf of a tree has a separate program and a second launch adds them.
        group: tiles of M that share their weights in L2.
    """

    _: KW_ONLY
    split: bool = False
    group: int = 8

    def __str__(self) -> str:
        return f"fused{'-split' * self.split}-{self.size}-w{self.warps}s{self.stages}g{self.group}"


@dataclass(frozen=True, slots=True)
class Int4Decode(PipelinedTile):
    """int4_decode.int4_decode_kernel: nibbles and few tokens; each warp has its own features.

    Attributes:
        split: True if each leaf of a tree has a separate program, as every tree requires.
    """

    _: KW_ONLY
    split: bool = False

    def __str__(self) -> str:
        return f"int4-decode{'-split' * self.split}-{self.size}-w{self.warps}s{self.stages}"


@dataclass(frozen=True, slots=True)
class Expand:
    """Dequantizes the weights into memory, then runs matmul with a schedule of its own."""

    def __str__(self) -> str:
        return "expand"


DequantSchedule: TypeAlias = Fused | Int4Decode | Expand

EXPAND = Expand()
# block_m, block_n, block_k, warps, stages, by the largest bucket (nibbles take 128 k per step). Few features need many
# programs. With few tokens most of the work is dequantizing: more warps per tile.
_FUSED: dict[int, list[tuple[int, int, int, int, int]]] = {
    16: [
        (16, 64, 128, 4, 4),
        (16, 128, 128, 8, 4),
        (16, 128, 128, 4, 4),
        (16, 64, 128, 4, 6),
        (16, 32, 128, 4, 5),
        (16, 16, 128, 2, 6),
    ],
    32: [(32, 64, 128, 4, 4), (32, 32, 128, 4, 5), (32, 128, 128, 8, 4), (32, 128, 128, 4, 4), (16, 64, 128, 4, 5)],
    64: [
        (64, 64, 128, 4, 4),
        (64, 128, 128, 8, 3),
        (64, 64, 128, 4, 3),
        (32, 64, 128, 4, 4),
        (64, 32, 128, 4, 4),
        (64, 32, 128, 2, 5),
        (32, 32, 128, 2, 5),
    ],
    128: [(128, 64, 128, 4, 3), (128, 128, 128, 8, 3), (64, 128, 128, 8, 3)],
    512: [(128, 128, 128, 8, 3), (128, 64, 128, 4, 3), (256, 64, 128, 4, 2)],
}
# The same for nibbles, with several blocks of 128 k per step. For up to eight tokens no larger product is computed, and
# a warp has its own 16 features, so none is computed twice. One token takes 0.5 to 0.9 of the best time of _FUSED
# (docs/log/kernels.md).
_BLOCKS: dict[int, list[tuple[int, int, int, int, int]]] = {
    16: [(8, 32, 512, 2, 3), (8, 16, 512, 1, 3), (16, 16, 512, 1, 3)],
}
# For a tree with a separate program per leaf: the many programs hide each other's latency, and each covers a fraction
# of K, at the cost of a second launch that adds the leaves. A leaf of one step prefetches nothing, and needs many
# programs beside it instead.
_SPLIT: dict[int, list[tuple[int, int, int, int, int]]] = {
    16: [(8, 16, 512, 1, 3), (8, 16, 512, 1, 2), (8, 32, 512, 2, 2), (16, 16, 512, 1, 2), (16, 64, 128, 4, 4)],
    32: [(32, 64, 128, 4, 4), (32, 32, 128, 4, 4)],
    64: [(64, 64, 128, 4, 4), (32, 64, 128, 4, 4)],
}
# Int4Decode. A warp of 8 features has one chain of products, and with few features every part of a multiprocessor has
# one or two such warps; with many features a warp takes 16, so that all programs run at once. With a tree, each leaf
# has a separate program.
_INT4_DECODE: list[tuple[int, int, int, int, int]] = [
    (8, 32, 1024, 4, 3),
    (8, 64, 512, 4, 3),
    (8, 32, 512, 4, 4),
    (16, 32, 512, 4, 3),
    (16, 64, 512, 4, 3),
]
_INT4_DECODE_SPLIT: list[tuple[int, int, int, int, int]] = [
    (8, 64, 256, 4, 4),
    (8, 32, 256, 4, 3),
    (8, 64, 512, 4, 2),
    (16, 64, 256, 4, 3),
]
_MANY_FEATURES = 8192  # without a tree: above, 16 per warp
_MANY_TOKENS = 128  # above, they share the cost of a dequantized copy


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantProblem:
    """Everything that a choice of schedule may depend on.

    Attributes:
        dtype: name of the activations' dtype.
        w_dtype, s_dtype: names of the dtypes of the quantized weights and of their scales.
        zeros: True if the weights have zero points.
        mins: name of the dtype of their minima (None: absent).
        narrow: True if a 16-bit product equals the definition's weight, on a GPU: int4_decode.py requires it.
        order: the SumOrder, as text.
        epilogue: dtype names of out, bias and residual (None: absent).
        bucket: the token count, rounded up to a power of two.
    """

    dtype: str
    w_dtype: str
    s_dtype: str
    zeros: bool
    mins: str | None
    n: int
    k: int
    group: int
    rows: int
    radices: tuple[int, ...]
    order: str
    epilogue: tuple[str, str | None, str | None]
    bucket: int
    narrow: bool = False

    @property
    def leaf_k(self) -> int:
        """K per leaf of the tree."""
        return self.k // math.prod(self.radices)

    def __str__(self) -> str:
        out, bias, residual = self.epilogue
        weights = f"{self.w_dtype} x {self.s_dtype} by {self.group}x{self.rows}{' zeros' * self.zeros}"
        if self.mins:
            weights += f" mins {self.mins}"
        epilogue = f"-> {out} bias={bias} residual={residual}"
        return f"{self.dtype} {weights} n={self.n} {self.order} {epilogue} m<={self.bucket}"


@functools.cache
def dequant_candidates(problem: DequantProblem) -> tuple[DequantSchedule, ...]:
    """Return the schedules for a problem, the likely fastest first; EXPAND is always among them."""
    whole = not problem.radices or problem.leaf_k % NIBBLE_BLOCK == 0
    bucket = next((largest for largest in _FUSED if problem.bucket <= largest), None)
    if bucket is None or not whole or problem.dtype == "float32" or len(problem.radices) > LEVELS:
        return (EXPAND,)
    fitting = _fitting(problem, [*_BLOCKS.get(bucket, []), *_FUSED[bucket]])
    if problem.w_dtype != "uint8":
        fitting += [replace(schedule, block_k=64, stages=schedule.stages + 2) for schedule in fitting[:3]]
    if problem.radices:
        split = _fitting(problem, _SPLIT.get(bucket, []))
        fitting = [replace(schedule, split=True) for schedule in split] + fitting
    fused: list[Fused | Int4Decode] = [*fitting]
    if problem.narrow and bucket == min(_FUSED):
        fused = [*_int4_decode(problem), *fused]
    return (EXPAND, *fused) if problem.bucket > _MANY_TOKENS else (*fused, EXPAND)


def _fitting(problem: DequantProblem, rows: list[tuple[int, int, int, int, int]]) -> list[Fused]:
    """Return the fitting Fused schedules: several blocks per step need nibbles, one scale per block and whole steps."""
    several = problem.w_dtype == "uint8" and problem.group % NIBBLE_BLOCK == 0
    schedules = (Fused(*sizes) for sizes in rows)
    return [s for s in schedules if s.block_k == NIBBLE_BLOCK or (several and problem.leaf_k % s.block_k == 0)]


def _int4_decode(problem: DequantProblem) -> list[Int4Decode]:
    rows = _INT4_DECODE_SPLIT if problem.radices else _INT4_DECODE
    schedules = (Int4Decode(*sizes, split=bool(problem.radices)) for sizes in rows)
    fitting = [s for s in schedules if fits_int4_decode(s, problem.group, problem.rows, problem.n, problem.leaf_k)]
    wide = bool(problem.radices) or problem.n > _MANY_FEATURES
    return sorted(fitting, key=lambda s: (s.block_m, (s.block_n >= 16 * s.warps) != wide))


def fits_int4_decode(schedule: Int4Decode, group: int, rows: int, n: int, leaf_k: int) -> bool:
    """Return True if int4_decode.py can run: one scale per 128 k and feature, whole steps, vectors of 16 features."""
    return group % NIBBLE_BLOCK == 0 and rows == 1 and n % 16 == 0 and leaf_k % schedule.block_k == 0
