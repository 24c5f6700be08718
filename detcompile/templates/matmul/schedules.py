"""GEMM schedules: which exist for a problem, in the order in which they are likely to be fast.

Legend: M tokens, N output features, K summed features. A schedule never decides bits; `templates.device.gate` sees to
that.
"""

import functools
import math
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
        hopper: matmul_hopper can run: a Hopper GPU, 16-bit operands, aligned, weights contiguous along K.
        epilogue: dtype names of out, bias and residual (None: absent).
        bucket: the token count, rounded up to a power of two.
        gated: the first half of the features is a gate, and silu(gate) * up is what is wanted (gated_matmul).
    """

    dtype: str
    n: int
    k: int
    radices: tuple[int, ...]
    order: str
    w_nk: bool
    aligned: bool
    hopper: bool
    epilogue: tuple[str, str | None, str | None]
    bucket: int
    gated: bool = False

    def __str__(self) -> str:
        out, bias, residual = self.epilogue
        layout = ("NK" if self.w_nk else "KN") + ("" if self.aligned else " unaligned") + " hopper" * self.hopper
        epilogue = f"-> {out} bias={bias} residual={residual}" + " gated" * self.gated
        return f"{self.dtype} n={self.n} {self.order} {layout} {epilogue} m<={self.bucket}"


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """kind: "pointers", "tma" or "hopper" (matmul_hopper; its warps are its own affair), "few" (experts), "fused",
    "warps" or "expand" (dequant_schedules); swapped: the weights are the M operand of the MMA; ctas: programs a
    multiprocessor (not for pointers); leaves: "register", "split" or "together" (see matmul_kernels); gated: half of
    block_n is the gate's, and one launch gives silu(gate) * up (hopper, and swapped pointers); ahead: the weights are
    fetched ahead ("together")."""

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
    gated: bool = False
    ahead: bool = False

    def __str__(self) -> str:
        name = f"{self.kind}{'-swapped' if self.swapped else ''}{'-gated' if self.gated else ''}-{self.leaves}"
        name += "-ahead" * self.ahead
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{name}-{tile}-w{self.warps}s{self.stages}c{self.ctas}g{self.group}"


_Rows: TypeAlias = list[tuple[int, ...]]  # block_m, block_n, block_k, warps, stages, ctas (1 if left out)


def _schedules(kind: str, swapped: bool, rows: _Rows) -> list[GemmSchedule]:
    return [
        GemmSchedule(kind, *row[:5], swapped=swapped, ctas=row[5] if len(row) > 5 else 1)  # type: ignore[arg-type, misc]
        for row in rows
    ]


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
# Features are the rows of a warpgroup here: with a tree nothing is split, and no second launch adds leaves.
_HOPPER_FEW: dict[int, _Rows] = {
    16: [(16, 64, 256, 4, 5), (16, 64, 128, 4, 8), (16, 64, 128, 4, 4, 2), (16, 64, 64, 4, 8, 2), (16, 64, 64, 4, 12)],
    32: [(32, 64, 256, 4, 4), (32, 64, 128, 4, 8), (32, 64, 128, 4, 4, 2), (32, 64, 64, 4, 8)],
    64: [(64, 64, 128, 4, 6), (64, 64, 64, 4, 10), (32, 64, 128, 4, 8)],
}
# Trees of radix 2, whose leaves are summed side by side: K of all leaves, warps at most, stages.
_BATCHED_LEAVES = [(1024, 8, 3), (1024, 4, 3), (512, 8, 4)]
_BATCHED_LEAVES_FEATURES = 16
_TMA: _Rows = [(64, 64, 128, 4, 6), (64, 128, 64, 4, 4, 2), (128, 128, 64, 4, 6), (128, 256, 64, 8, 4)]
_NARROW = (64, 32, 128, 4, 8)
_HOPPER: _Rows = [
    _NARROW,
    (64, 64, 128, 4, 6),
    (64, 128, 64, 4, 8),
    (128, 80, 64, 8, 6),
    (128, 96, 64, 8, 6),
    (128, 128, 64, 8, 5),
    (128, 160, 64, 8, 4),
    (128, 192, 64, 8, 4),
    (128, 256, 64, 8, 3),
]
_HOPPER_GATED: _Rows = [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 8, 6)]
_HOPPER_TREE: _Rows = [
    (64, 32, 128, 4, 6),
    (64, 32, 64, 4, 6, 2),
    (64, 64, 128, 4, 5),
    (64, 64, 64, 4, 8),
    (64, 128, 64, 4, 6),
    (128, 64, 64, 8, 6),
    (128, 64, 128, 8, 3),
]
# One open node per level lives in registers, so that tiles are smaller.
_TMA_TREE: _Rows = [(128, 128, 64, 8, 4), (128, 64, 64, 8, 4, 2), (64, 128, 64, 8, 4, 2), (64, 64, 64, 4, 4, 3)]
_ANY_STRIDES: _Rows = [(128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3)]
_FLOAT32: dict[int, _Rows] = {
    16: [(16, 32, 64, 4, 3), (16, 64, 32, 4, 3), (16, 128, 32, 4, 3)],
    64: [(32, 64, 32, 4, 3), (64, 64, 32, 4, 3)],
    4096: [(64, 64, 32, 4, 3), (128, 64, 16, 8, 3), (128, 128, 16, 8, 3), (64, 64, 16, 4, 3)],
}
# An H200, roughly: it only sorts candidates. Multiply-adds and bytes that a multiprocessor takes in a cycle.
_MULTIPROCESSORS, _MULTIPLY_ADDS, _BYTES = 132, 1860, 52
_MANY_TOKENS = 2048
_FEW_WEIGHTS = 8 << 20  # numbers; so few are fetched ahead whole, and without a warp of its own
_MANY_FEATURES = 16384
_MANY_GATED = 1024  # from here on the one launch of a gated schedule is worth the registers that it takes
_SHARED_BYTES = 231_424  # that a program may have there, less the barriers of matmul_hopper


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
        found = _few_tokens(problem) if problem.bucket <= 64 else []
        found += _many_tokens(problem) if problem.bucket >= 64 else []
        found = list(dict.fromkeys(found + _schedules("pointers", False, _ANY_STRIDES)))
    if not problem.radices:
        return tuple(found)
    return tuple(_with_leaves(problem, found))


def _few_tokens(problem: GemmProblem) -> list[GemmSchedule]:
    """Of all that swap their operands, and of 64 tokens one that need not."""
    bucket = max(16, problem.bucket)
    hopper = _schedules("hopper", True, _HOPPER_FEW[bucket]) if problem.hopper else []
    tma = _schedules("tma", True, _TMA_FEW[bucket]) if problem.aligned else []
    pointers = _schedules("pointers", True, _POINTERS_FEW[bucket])
    plain = pointers + tma if bucket == 16 else tma[:1] + pointers + tma[1:]
    if bucket > 16 and problem.n >= _MANY_FEATURES:  # tiles come in waves, whose gaps short steps along K fill
        pointers.sort(key=lambda schedule: schedule.block_k)
        plain = pointers + tma
    many_weights = bucket <= 16 and problem.n * problem.k > _FEW_WEIGHTS
    if problem.gated:
        gated = [replace(schedule, gated=True) for schedule in pointers]
        plain = plain + gated if many_weights or bucket > 32 else gated + plain
    # The weights that it fetches ahead, while the kernel before ends, count where many are read for few tokens.
    if many_weights:
        return hopper + plain
    narrow = GemmSchedule("hopper", *_NARROW)
    if bucket == 64 and problem.hopper and problem.n <= narrow.block_n * _MULTIPROCESSORS:
        return [narrow, *plain, *hopper]  # swapped tiles would leave half of the multiprocessors without one
    return plain + hopper


def _many_tokens(problem: GemmProblem) -> list[GemmSchedule]:
    found = _schedules("tma", False, _TMA) if problem.aligned else []
    if problem.hopper:
        found += _schedules("hopper", False, _HOPPER)
    if problem.gated and problem.hopper and problem.bucket >= _MANY_GATED:
        gated = [replace(schedule, gated=True) for schedule in _schedules("hopper", False, _HOPPER_GATED)]
        return gated + sorted(found, key=functools.partial(_cycles, problem))
    return sorted(found, key=functools.partial(_cycles, problem))


def _cycles(problem: GemmProblem, schedule: GemmSchedule) -> tuple[float, int, bool]:
    """Expected for one k, over all waves of tiles: whichever of arithmetic and loads takes longer.

    Of many tokens the last wave does not count: the bucket says little about it. Equals: the larger tile, then the
    kernel whose loads run ahead over the end of a tile.
    """
    m, n = schedule.block_m, schedule.block_n
    tiles = math.ceil(problem.bucket / m) * math.ceil(problem.n / n)
    waves = tiles / (_MULTIPROCESSORS * schedule.ctas)
    waves = (waves if problem.bucket >= _MANY_TOKENS else math.ceil(waves)) * schedule.ctas
    cycles = waves * max(m * n / _MULTIPLY_ADDS, 2 * (m + n) / _BYTES)
    return round(cycles, 3), -m * n, schedule.kind != "hopper"


def _with_leaves(problem: GemmProblem, found: list[GemmSchedule]) -> list[GemmSchedule]:
    plain = [schedule for schedule in found if schedule.kind != "hopper"]
    split = [replace(schedule, leaves="split") for schedule in plain]
    if len(problem.radices) > 4:
        return _whole_groups(problem, split)
    if problem.dtype != "float32" and problem.bucket > 64 and problem.aligned:
        plain = _schedules("tma", False, _TMA_TREE) + plain
    hopper = []
    if problem.hopper and problem.bucket >= 64:
        hopper = sorted(_schedules("hopper", False, _HOPPER_TREE), key=functools.partial(_cycles, problem))
    if problem.hopper and problem.bucket <= 64:
        hopper += _schedules("hopper", True, _HOPPER_FEW[max(16, problem.bucket)])
    found = hopper + (split + plain if problem.bucket <= 256 else plain + split)
    return _whole_groups(problem, _batched_leaves(problem) + found)


def _batched_leaves(problem: GemmProblem) -> list[GemmSchedule]:
    leaves = math.prod(problem.radices)
    if problem.dtype == "float32" or problem.bucket > 16 or set(problem.radices) != {2}:
        return []
    rows = dict.fromkeys((k // leaves, min(leaves, warps), stages) for k, warps, stages in _BATCHED_LEAVES)
    tile = problem.bucket, _BATCHED_LEAVES_FEATURES
    ahead = problem.w_nk and problem.n * problem.k <= _FEW_WEIGHTS
    return [GemmSchedule("pointers", *tile, *row, swapped=True, leaves="together", ahead=ahead) for row in rows]


def _whole_groups(problem: GemmProblem, found: list[GemmSchedule]) -> list[GemmSchedule]:
    """A descriptor does not end at a leaf: its leaves must be whole tiles of K. And the nodes of a tree must fit."""
    leaf_k = problem.k // math.prod(problem.radices)
    whole = [schedule for schedule in found if schedule.kind == "pointers" or leaf_k % schedule.block_k == 0]
    return [schedule for schedule in whole if schedule.kind != "hopper" or _fits(problem, schedule)]


def _fits(problem: GemmProblem, schedule: GemmSchedule) -> bool:
    """Whether the ring of k-groups and the nodes that wait, one float32 tile a level, fit into shared memory."""
    ring = 2 * (schedule.block_m + schedule.block_n) * schedule.block_k * schedule.stages
    levels = len(problem.radices) - 1
    return ring + 4 * levels * schedule.block_m * schedule.block_n <= _SHARED_BYTES
