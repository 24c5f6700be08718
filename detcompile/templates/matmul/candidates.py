"""Candidate GEMM schedules for a problem, the most promising first.

Legend: M tokens, N output features, K summed features. A schedule never affects bits; templates.device.gate checks it.
"""

import functools
import math
from dataclasses import replace
from typing import TypeAlias

from detcompile.templates.matmul.schedules import (
    BatchedLeaves,
    GemmProblem,
    GemmSchedule,
    HopperTiles,
    PointerTiles,
    RingTiles,
    TmaTiles,
)

_Rows: TypeAlias = list[tuple[int, ...]]  # sizes, warps (not for hopper), stages, ctas and nodes (default 1)
_POINTERS_FEW: dict[int, _Rows] = {
    16: [(16, 64, 128, 4, 6), (16, 64, 256, 4, 5), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4)],
    32: [(32, 64, 128, 4, 5), (32, 128, 64, 4, 4)],
    64: [(64, 64, 128, 4, 5), (64, 64, 64, 4, 4)],
}
_TMA_FEW: dict[int, _Rows] = {
    16: [(16, 64, 256, 4, 5), (16, 64, 128, 4, 6)],
    32: [(32, 64, 256, 4, 4), (32, 64, 128, 4, 5)],
    64: [(64, 64, 128, 4, 5), (64, 128, 64, 4, 6)],
}
# Swapped: features are the rows of a warpgroup. A tree is not split, so no second kernel adds leaves.
_HOPPER_FEW: dict[int, _Rows] = {
    16: [(16, 64, 256, 5), (16, 64, 128, 8), (16, 64, 128, 4, 2), (16, 64, 64, 8, 2), (16, 64, 64, 12)],
    32: [(32, 64, 256, 4), (32, 64, 128, 8), (32, 64, 128, 4, 2), (32, 64, 64, 8)],
    64: [(64, 64, 128, 6), (64, 64, 64, 10), (32, 64, 128, 8)],
}
# Up to eight tokens. Tiles of 32 features come first for gates, and if tiles of 64 would leave multiprocessors idle.
_RING = [RingTiles(8, 64, 256, 5), RingTiles(8, 32, 256, 10)]
_RING_GATED = [RingTiles(8, 32, 256, 10, gated=True), RingTiles(8, 64, 256, 5, gated=True)]
# For radix-2 trees whose leaves are summed in parallel: K of all leaves in a step, maximum warps, stages.
_BATCHED_LEAVES = [(1024, 8, 3), (1024, 4, 3), (512, 8, 4)]
_BATCHED_LEAVES_FEATURES = 16
_TMA: _Rows = [(64, 64, 128, 4, 6), (64, 128, 64, 4, 4, 2), (128, 128, 64, 4, 6), (128, 256, 64, 8, 4)]
_NARROW = (64, 32, 128, 8)
_HOPPER: _Rows = [
    _NARROW,
    (64, 64, 128, 6),
    (64, 128, 64, 8),
    (128, 80, 64, 6),
    (128, 96, 64, 6),
    (128, 128, 64, 5),
    (128, 160, 64, 4),
    (128, 192, 64, 4),
    (128, 256, 64, 3),
]
_HOPPER_GATED: _Rows = [(128, 256, 64, 4), (128, 256, 64, 3), (128, 128, 64, 6)]
_HOPPER_TREE: _Rows = [
    (64, 32, 128, 6),
    (64, 32, 64, 6, 2),
    (64, 64, 128, 5),
    (64, 64, 64, 8),
    (64, 128, 64, 6),
    (128, 64, 64, 6),
    (128, 64, 128, 3),
    (128, 128, 64, 5, 1, 2),
    (128, 128, 64, 5),
    (128, 128, 64, 4),
]
# Registers hold one open node per level, so tiles are smaller.
_TMA_TREE: _Rows = [(128, 128, 64, 8, 4), (128, 64, 64, 8, 4, 2), (64, 128, 64, 8, 4, 2), (64, 64, 64, 4, 4, 3)]
_ANY_STRIDES: _Rows = [(128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3)]
_FLOAT32: dict[int, _Rows] = {
    16: [(16, 32, 64, 4, 3), (16, 64, 32, 4, 3), (16, 128, 32, 4, 3)],
    64: [(32, 64, 32, 4, 3), (64, 64, 32, 4, 3)],
    4096: [(64, 64, 32, 4, 3), (128, 64, 16, 8, 3), (128, 128, 16, 8, 3), (64, 64, 16, 4, 3)],
}
# About an H200's; they only sort candidates. Multiply-adds and bytes are per cycle of a multiprocessor.
_MULTIPROCESSORS, _MULTIPLY_ADDS, _BYTES = 132, 1860, 52
_MANY_TOKENS = 2048
_FEW_WEIGHTS = 8 << 20  # elements; up to this size weights are prefetched whole, without a separate warp
_MANY_FEATURES = 16384
_MANY_LEAVES = 8  # summing fewer leaves in parallel (a rank's share of a tree) leaves a multiprocessor mostly idle
_MANY_GATED = 1024  # tokens from which one launch of a gated schedule is worth its registers
_SHARED_BYTES = 231_424  # shared memory of a program, minus the barriers of hopper.py


def reference_schedule(problem: GemmProblem) -> PointerTiles:
    """Return the schedule that defines the bits: small tiles, plain pointers."""
    return PointerTiles(32, 64, 32, 4, 2, split=len(problem.radices) > 4)


@functools.cache
def candidates(problem: GemmProblem) -> tuple[GemmSchedule, ...]:
    """Return the schedules for a problem, the most promising first. Each works for any token count."""
    if problem.dtype == "float32":
        few = next(largest for largest in _FLOAT32 if problem.bucket <= largest)
        schedules: list[GemmSchedule] = [PointerTiles(*row) for row in _FLOAT32[few]]
    else:
        schedules = _few_tokens(problem) if problem.bucket <= 64 else []
        schedules += _many_tokens(problem) if problem.bucket >= 64 else []
        schedules = list(dict.fromkeys([*schedules, *(PointerTiles(*row) for row in _ANY_STRIDES)]))
    if not problem.radices:
        return tuple(schedules)
    return tuple(_with_leaves(problem, schedules))


def _few_tokens(problem: GemmProblem) -> list[GemmSchedule]:
    """Schedules with swapped operands, and for 64 tokens one without."""
    bucket = max(16, problem.bucket)
    hopper = [HopperTiles(*row, swapped=True) for row in _HOPPER_FEW[bucket]] if problem.hopper else []
    tma = [TmaTiles(*row, swapped=True) for row in _TMA_FEW[bucket]] if problem.aligned else []
    pointers = [PointerTiles(*row, swapped=True) for row in _POINTERS_FEW[bucket]]
    plain: list[GemmSchedule] = [*pointers, *tma] if bucket == 16 else [*tma[:1], *pointers, *tma[1:]]
    if bucket > 16 and problem.n >= _MANY_FEATURES:  # tiles come in waves; short steps along K fill the gaps
        pointers.sort(key=lambda schedule: schedule.block_k)
        plain = [*pointers, *tma]
    many_weights = bucket <= 16 and problem.n * problem.k > _FEW_WEIGHTS
    if problem.gated:
        gated = [replace(schedule, gated=True) for schedule in pointers]
        plain = [*plain, *gated] if many_weights or bucket > 32 else [*gated, *plain]
    # hopper prefetches weights while the previous kernel finishes; with many weights and few tokens that is faster.
    if many_weights:
        return [*_ring(problem), *hopper, *plain]
    narrow = HopperTiles(*_NARROW)
    if bucket == 64 and problem.hopper and problem.n <= narrow.block_n * _MULTIPROCESSORS:
        return [narrow, *plain, *hopper]  # swapped tiles would leave half of the multiprocessors idle
    return [*plain, *hopper]


def _ring(problem: GemmProblem) -> list[RingTiles]:
    if problem.bucket > 8 or not problem.hopper or problem.radices or problem.k % 64:
        return []
    if problem.gated:
        return _RING_GATED if problem.n % 16 == 0 else []
    return _RING[::-1] if problem.n <= 32 * _MULTIPROCESSORS else _RING


def _many_tokens(problem: GemmProblem) -> list[GemmSchedule]:
    schedules: list[TmaTiles | HopperTiles] = [TmaTiles(*row) for row in _TMA] if problem.aligned else []
    if problem.hopper:
        schedules += [HopperTiles(*row) for row in _HOPPER]
    schedules.sort(key=functools.partial(_cycles, problem))
    if problem.gated and problem.hopper and problem.bucket >= _MANY_GATED:
        return [*(HopperTiles(*row, gated=True) for row in _HOPPER_GATED), *schedules]
    return [*schedules]


def _cycles(problem: GemmProblem, schedule: TmaTiles | HopperTiles) -> tuple[float, int, bool]:
    """Estimate the cycles per k over all waves of tiles: the larger of arithmetic and loads.

    For many tokens the last wave is not rounded up, because the bucket tells little about it. Ties go to the larger
    tile, then to HopperTiles, whose loads continue across tiles.
    """
    m, n = schedule.block_m, schedule.block_n
    tiles = math.ceil(problem.bucket / m) * math.ceil(problem.n / n)
    waves = tiles / (_MULTIPROCESSORS * schedule.ctas)
    waves = (waves if problem.bucket >= _MANY_TOKENS else math.ceil(waves)) * schedule.ctas
    cycles = waves * max(m * n / _MULTIPLY_ADDS, 2 * (m + n) / _BYTES)
    return round(cycles, 3), -m * n, not isinstance(schedule, HopperTiles)


def _with_leaves(problem: GemmProblem, schedules: list[GemmSchedule]) -> list[GemmSchedule]:
    tiles = [schedule for schedule in schedules if isinstance(schedule, PointerTiles | TmaTiles)]
    split = [replace(schedule, split=True) for schedule in tiles]
    if len(problem.radices) > 4:
        return _whole_groups(problem, [*split])
    if problem.dtype != "float32" and problem.bucket > 64 and problem.aligned:
        tiles = [*(TmaTiles(*row) for row in _TMA_TREE), *tiles]
    hopper: list[HopperTiles] = []
    if problem.hopper and problem.bucket >= 64:
        hopper = sorted([HopperTiles(*row) for row in _HOPPER_TREE], key=functools.partial(_cycles, problem))
    if problem.hopper and problem.bucket <= 64:
        hopper += [HopperTiles(*row, swapped=True) for row in _HOPPER_FEW[max(16, problem.bucket)]]
    rest = [*split, *tiles] if problem.bucket <= 256 else [*tiles, *split]
    batched, leaves = _batched_leaves(problem), math.prod(problem.radices)
    if leaves >= _MANY_LEAVES or (leaves > 2 and problem.n * problem.k > _FEW_WEIGHTS):
        return _whole_groups(problem, [*batched, *hopper, *rest])
    return _whole_groups(problem, [*hopper, *rest, *batched])


def _batched_leaves(problem: GemmProblem) -> list[BatchedLeaves]:
    leaves = math.prod(problem.radices)
    if problem.dtype == "float32" or problem.bucket > 16 or set(problem.radices) != {2}:
        return []
    rows = dict.fromkeys((k // leaves, min(leaves, warps), stages) for k, warps, stages in _BATCHED_LEAVES)
    tile = problem.bucket, _BATCHED_LEAVES_FEATURES
    ahead = problem.w_nk and problem.n * problem.k <= _FEW_WEIGHTS
    return [BatchedLeaves(*tile, *row, ahead=ahead) for row in rows]


def _whole_groups(problem: GemmProblem, schedules: list[GemmSchedule]) -> list[GemmSchedule]:
    """Keep schedules that fit the tree: a leaf must be whole tiles of K, and the open nodes must fit in memory."""
    leaf_k = problem.k // math.prod(problem.radices)
    return [
        schedule
        for schedule in schedules
        if isinstance(schedule, PointerTiles | BatchedLeaves) or leaf_k % schedule.block_k == 0
        if not isinstance(schedule, HopperTiles) or _fits(problem, schedule)
    ]


def _fits(problem: GemmProblem, schedule: HopperTiles) -> bool:
    """Return True if the ring of k-groups and the open nodes (a float32 tile per level) fit into shared memory."""
    ring = 2 * (schedule.block_m + schedule.block_n) * schedule.block_k * schedule.stages
    levels = len(problem.radices) - schedule.nodes
    return levels >= 0 and ring + 4 * levels * schedule.block_m * schedule.block_n <= _SHARED_BYTES
