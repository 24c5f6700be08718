"""Schedules of experts' products on the GPU: which exist for a problem, the likely fastest first.

Legend: E experts, N output features, K summed features. Bits are the same under all; `templates.device.gate` sees to
that.
"""

import functools
from dataclasses import dataclass

from detcompile.templates.matmul.schedules import GemmSchedule

__all__ = ["DECODE_ROWS", "ExpertsProblem", "REFERENCE", "expert_candidates"]

DECODE_ROWS = 64  # that a program looks through for its expert's
REFERENCE = GemmSchedule("pointers", 32, 64, 32, 4, 2)  # serves where no candidate passes; gated like them


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsProblem:
    """All that a choice of schedule may depend on.

    Attributes:
        radices: of the tree over K; () for one chain. order: the SumOrder, as text.
        w_nk: the weights are contiguous along K (else along N).
        aligned: they can be read through a tensor descriptor.
        bias: its dtype, None where there is none.
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


# kind, block_m, block_n, block_k, warps, stages, swapped. "few" is decode_kernel, "tma" grouped_kernel with
# descriptors, "pointers" the same without, "sorted" sorted_kernel. Few rows an expert: the weights' bytes count.
_Row = tuple[str, int, int, int, int, int, bool]
_FEW: dict[int, list[_Row]] = {
    16: [
        ("few", 16, 64, 128, 4, 5, True),
        ("few", 16, 32, 256, 4, 4, True),
        ("few", 16, 64, 256, 4, 4, True),
        ("few", 16, 32, 128, 4, 6, True),
        ("few", 16, 128, 64, 4, 5, True),
    ],
    32: [("few", 32, 64, 128, 4, 5, True), ("few", 32, 64, 256, 4, 3, True), ("few", 32, 128, 64, 4, 5, True)],
    64: [("few", 64, 64, 128, 4, 4, True), ("few", 64, 128, 64, 4, 4, True)],
}
_GROUPED: dict[int, list[_Row]] = {  # by rows an expert
    16: [
        ("tma", 16, 64, 256, 4, 4, True),
        ("tma", 16, 64, 128, 4, 6, True),
        ("tma", 16, 64, 128, 4, 4, True),
        ("tma", 16, 128, 128, 4, 4, True),
        ("pointers", 16, 64, 128, 4, 5, True),
        ("pointers", 16, 64, 256, 4, 4, True),
        ("pointers", 16, 128, 64, 4, 5, True),
    ],
    32: [
        ("tma", 32, 64, 128, 4, 5, True),
        ("tma", 32, 128, 128, 4, 4, True),
        ("tma", 32, 128, 64, 4, 5, True),
        ("pointers", 32, 64, 128, 4, 4, True),
        ("pointers", 32, 128, 64, 4, 4, True),
    ],
    64: [
        ("tma", 64, 128, 64, 4, 5, True),
        ("tma", 64, 128, 64, 4, 4, False),
        ("tma", 64, 64, 128, 4, 4, True),
        ("tma", 64, 256, 64, 8, 4, False),
        ("sorted", 64, 256, 64, 8, 4, False),
        ("sorted", 64, 128, 64, 4, 6, False),
        ("pointers", 64, 128, 64, 4, 4, True),
        ("pointers", 64, 128, 64, 4, 4, False),
    ],
    128: [
        ("sorted", 128, 256, 64, 8, 4, False),
        ("sorted", 128, 256, 64, 8, 3, False),
        ("sorted", 128, 128, 64, 8, 5, False),
        ("sorted", 64, 256, 64, 8, 4, False),
        ("sorted", 64, 128, 64, 4, 6, False),
        ("tma", 128, 128, 64, 8, 4, False),
        ("tma", 128, 256, 64, 8, 3, False),
        ("tma", 128, 256, 64, 8, 4, False),
        ("tma", 128, 128, 64, 4, 4, False),
        ("tma", 64, 256, 64, 8, 4, False),
        ("tma", 64, 128, 64, 4, 4, False),
        ("pointers", 128, 128, 64, 8, 3, False),
        ("pointers", 128, 256, 64, 8, 3, False),
        ("pointers", 64, 128, 64, 4, 3, False),
    ],
}
_FLOAT32: list[_Row] = [
    ("pointers", 16, 64, 32, 4, 3, False),
    ("pointers", 32, 64, 32, 4, 3, False),
    ("pointers", 64, 64, 32, 4, 3, False),
]


@functools.cache
def expert_candidates(problem: ExpertsProblem) -> tuple[GemmSchedule, ...]:
    """Schedules for this problem, the likely fastest first. All but "few" serve any number of rows."""
    rows = []
    if problem.dtype == "float32":
        few = [("few", problem.bucket, 32, 64, 4, 3, False)] if problem.bucket <= DECODE_ROWS else []
        rows = few + _FLOAT32
    else:
        if problem.bucket <= DECODE_ROWS:
            rows += _FEW[problem.bucket]
        evenly = max(16, min(128, problem.bucket // problem.experts))  # rows an expert; some have more
        width = 1 << (evenly - 1).bit_length()
        rows += _GROUPED[width] + _GROUPED.get(2 * width, [])[:2]
    return tuple(GemmSchedule(*row) for row in rows if problem.aligned or row[0] not in ("tma", "sorted"))
