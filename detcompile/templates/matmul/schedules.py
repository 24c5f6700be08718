"""GEMM problems, and the kinds of schedules that serve them: each has the fields that its kernel reads, and no other.

Legend: M tokens, N output features, K summed features. A schedule never decides bits; `templates.device.gate` sees to
that.
"""

from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

__all__ = [
    "BatchedLeaves",
    "GemmProblem",
    "GemmSchedule",
    "HopperTiles",
    "PipelinedTile",
    "PointerTiles",
    "Tile",
    "TmaTiles",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmProblem:
    """All that a choice of schedule may depend on.

    Attributes:
        order: the SumOrder, as text.
        w_nk: the weights are contiguous along K (else along N).
        aligned: x and w can be read through tensor descriptors.
        hopper: hopper.py's kernel can run: a Hopper GPU, 16-bit operands, aligned, weights contiguous along K.
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
class Tile:
    """Sizes of one program's tile of M, N and K. A kind of schedule is a tile and what its kernel reads beside."""

    block_m: int
    block_n: int
    block_k: int

    @property
    def size(self) -> str:
        """The sizes as text, for the name of a schedule."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}"


@dataclass(frozen=True, slots=True)
class PipelinedTile(Tile):
    """A tile, the warps of its program, and the stages of its loop: how many steps of K are in flight."""

    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class PointerTiles(PipelinedTile):
    """kernels.tile_kernel: operands of any strides.

    Attributes:
        swapped: The weights are the M operand of the MMA.
        split: Each leaf of a tree is a program's own, and a second launch adds them.
        group: Tiles of M that share their weights in the L2 cache; not read if swapped.
        gated: Half of block_n is the gate's, and one launch gives silu(gate) * up; swapped alone, and without a tree.
    """

    _: KW_ONLY
    swapped: bool = False
    split: bool = False
    group: int = 8
    gated: bool = False

    def __str__(self) -> str:
        kind = "pointers" + "-swapped" * self.swapped + "-gated" * self.gated + "-split" * self.split
        return f"{kind}-{self.size}-w{self.warps}s{self.stages}g{self.group}"


@dataclass(frozen=True, slots=True)
class TmaTiles(PipelinedTile):
    """kernels.tma_kernel: operands through tensor descriptors, programs that walk over the tiles.

    Attributes:
        ctas: Programs a multiprocessor.
        swapped, split, group: The same as of ``PointerTiles``.
    """

    ctas: int = 1
    _: KW_ONLY
    swapped: bool = False
    split: bool = False
    group: int = 8

    def __str__(self) -> str:
        kind = "tma" + "-swapped" * self.swapped + "-split" * self.split
        return f"{kind}-{self.size}-w{self.warps}s{self.stages}c{self.ctas}g{self.group}"


@dataclass(frozen=True, slots=True)
class HopperTiles(Tile):
    """hopper.hopper_matmul_kernel, which sets its warps itself: one fetches, and a warpgroup multiplies 64 rows.

    Attributes:
        ctas, swapped, group: The same as of ``TmaTiles``.
        nodes: Nodes of a tree that are held in registers, 1 or 2; the others wait in shared memory.
        gated: Half of block_n is the gate's, and one launch gives silu(gate) * up; not swapped, and without a tree.
    """

    stages: int
    ctas: int = 1
    nodes: int = 1
    _: KW_ONLY
    swapped: bool = False
    group: int = 8
    gated: bool = False

    def __str__(self) -> str:
        kind = "hopper" + "-swapped" * self.swapped + "-gated" * self.gated
        return f"{kind}-{self.size}-s{self.stages}c{self.ctas}g{self.group}" + "n2" * (self.nodes == 2)


@dataclass(frozen=True, slots=True)
class BatchedLeaves(PipelinedTile):
    """batched_leaves.batched_leaves_kernel: the leaves of a tree of radix 2 side by side, of few tokens.

    Attributes:
        ahead: The weights are brought into the L2 cache while the kernel before ends.
    """

    _: KW_ONLY
    ahead: bool = False

    def __str__(self) -> str:
        return f"batched-leaves{'-ahead' * self.ahead}-{self.size}-w{self.warps}s{self.stages}"


GemmSchedule: TypeAlias = PointerTiles | TmaTiles | HopperTiles | BatchedLeaves
