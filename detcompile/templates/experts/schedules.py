"""Schedules of expert products on the GPU: the candidates for a problem, the likely fastest first.

Legend: E experts, N output features, K summed features. A schedule never affects bits; `templates.device.gate` checks
this.
"""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from detcompile.templates.matmul.schedules import PipelinedTile

DECODE_ROWS = 64  # rows that a program searches for its expert's


@dataclass(frozen=True, slots=True)
class Decode(PipelinedTile):
    """kernels.decode_kernel: at most block_m rows, one program per tile of N and expert with rows.

    Attributes:
        swapped: True if the weights are the M operand of the MMA.
    """

    _: KW_ONLY
    swapped: bool = False

    def __str__(self) -> str:
        return f"decode{'-swapped' * self.swapped}-{self.size}-w{self.warps}s{self.stages}"


@dataclass(frozen=True, slots=True)
class Grouped(PipelinedTile):
    """kernels.grouped_kernel: rows in order of their experts, one program per tile.

    Attributes:
        swapped: True if the weights are the M operand of the MMA.
        descriptors: True if the weights are read through a tensor descriptor.
        group: tiles of rows that share their weights in L2.
    """

    _: KW_ONLY
    swapped: bool = False
    descriptors: bool = False
    group: int = 8

    def __str__(self) -> str:
        kind = "grouped" + "-swapped" * self.swapped + "-tma" * self.descriptors
        return f"{kind}-{self.size}-w{self.warps}s{self.stages}g{self.group}"


@dataclass(frozen=True, slots=True)
class Sorted(PipelinedTile):
    """kernels.sorted_kernel: rows copied in order of their experts; descriptors read them and the weights.

    Attributes:
        group: tiles of rows that share their weights in L2.
    """

    _: KW_ONLY
    group: int = 8

    def __str__(self) -> str:
        return f"sorted-{self.size}-w{self.warps}s{self.stages}g{self.group}"


ExpertsSchedule: TypeAlias = Decode | Grouped | Sorted

REFERENCE = Grouped(32, 64, 32, 4, 2)  # used if no candidate passes; gated like the others


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsProblem:
    """Everything that a choice of schedule may depend on.

    Attributes:
        radices: radices of the tree over K; () for one chain.
        order: the SumOrder, as text.
        w_nk: True if the weights are contiguous along K (else along N).
        aligned: True if the weights can be read through a tensor descriptor.
        bias: dtype of the bias, or None.
        bucket: rows (choices of all tokens), rounded up to a power of two.
    """

    dtype: str
    experts: int
    n: int
    k: int
    radices: tuple[int, ...]
    order: str
    w_nk: bool
    aligned: bool
    bias: str | None
    bucket: int

    def __str__(self) -> str:
        layout = ("NK" if self.w_nk else "KN") + ("" if self.aligned else " unaligned")
        shape = f"{self.dtype} experts={self.experts} n={self.n} {self.order}"
        return f"{shape} {layout} bias={self.bias} rows<={self.bucket}"


# Few rows per expert: the weights' bytes dominate.
_DECODE: dict[int, list[Decode]] = {
    16: [
        Decode(16, 64, 128, 4, 5, swapped=True),
        Decode(16, 32, 256, 4, 4, swapped=True),
        Decode(16, 64, 256, 4, 4, swapped=True),
        Decode(16, 32, 128, 4, 6, swapped=True),
        Decode(16, 128, 64, 4, 5, swapped=True),
    ],
    32: [
        Decode(32, 64, 128, 4, 5, swapped=True),
        Decode(32, 64, 256, 4, 3, swapped=True),
        Decode(32, 128, 64, 4, 5, swapped=True),
    ],
    64: [Decode(64, 64, 128, 4, 4, swapped=True), Decode(64, 128, 64, 4, 4, swapped=True)],
}
_GROUPED: dict[int, list[Grouped | Sorted]] = {  # by rows per expert
    16: [
        Grouped(16, 64, 256, 4, 4, swapped=True, descriptors=True),
        Grouped(16, 64, 128, 4, 6, swapped=True, descriptors=True),
        Grouped(16, 64, 128, 4, 4, swapped=True, descriptors=True),
        Grouped(16, 128, 128, 4, 4, swapped=True, descriptors=True),
        Grouped(16, 64, 128, 4, 5, swapped=True),
        Grouped(16, 64, 256, 4, 4, swapped=True),
        Grouped(16, 128, 64, 4, 5, swapped=True),
    ],
    32: [
        Grouped(32, 64, 128, 4, 5, swapped=True, descriptors=True),
        Grouped(32, 128, 128, 4, 4, swapped=True, descriptors=True),
        Grouped(32, 128, 64, 4, 5, swapped=True, descriptors=True),
        Grouped(32, 64, 128, 4, 4, swapped=True),
        Grouped(32, 128, 64, 4, 4, swapped=True),
    ],
    64: [
        Grouped(64, 128, 64, 4, 5, swapped=True, descriptors=True),
        Grouped(64, 128, 64, 4, 4, descriptors=True),
        Grouped(64, 64, 128, 4, 4, swapped=True, descriptors=True),
        Grouped(64, 256, 64, 8, 4, descriptors=True),
        Sorted(64, 256, 64, 8, 4),
        Sorted(64, 128, 64, 4, 6),
        Grouped(64, 128, 64, 4, 4, swapped=True),
        Grouped(64, 128, 64, 4, 4),
    ],
    128: [
        Sorted(128, 256, 64, 8, 4),
        Sorted(128, 256, 64, 8, 3),
        Sorted(128, 128, 64, 8, 5),
        Sorted(64, 256, 64, 8, 4),
        Sorted(64, 128, 64, 4, 6),
        Grouped(128, 128, 64, 8, 4, descriptors=True),
        Grouped(128, 256, 64, 8, 3, descriptors=True),
        Grouped(128, 256, 64, 8, 4, descriptors=True),
        Grouped(128, 128, 64, 4, 4, descriptors=True),
        Grouped(64, 256, 64, 8, 4, descriptors=True),
        Grouped(64, 128, 64, 4, 4, descriptors=True),
        Grouped(128, 128, 64, 8, 3),
        Grouped(128, 256, 64, 8, 3),
        Grouped(64, 128, 64, 4, 3),
    ],
}
_FLOAT32: list[Grouped] = [
    Grouped(16, 64, 32, 4, 3),
    Grouped(32, 64, 32, 4, 3),
    Grouped(64, 64, 32, 4, 3),
]


@functools.cache
def expert_candidates(problem: ExpertsProblem) -> tuple[ExpertsSchedule, ...]:
    """Return the schedules for a problem, the likely fastest first. All but ``Decode`` serve any number of rows."""
    decodes = problem.bucket <= DECODE_ROWS
    if problem.dtype == "float32":
        return (*([Decode(problem.bucket, 32, 64, 4, 3)] if decodes else []), *_FLOAT32)
    evenly = max(16, min(128, problem.bucket // problem.experts))  # average rows per expert
    width = 1 << (evenly - 1).bit_length()
    grouped = _GROUPED[width] + _GROUPED.get(2 * width, [])[:2]
    fitting = [s for s in grouped if problem.aligned or not (isinstance(s, Sorted) or s.descriptors)]
    return (*(_DECODE[problem.bucket] if decodes else []), *fitting)
