"""GEMM problems and kinds of schedules; a kind has exactly the fields that its kernel reads.

Legend: M tokens, N output features, K summed features. A schedule never affects bits; `templates.device.gate` checks
this.
"""

from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmProblem:
    """Everything that a choice of schedule may depend on.

    Attributes:
        order: the SumOrder, as text.
        w_nk: True if the weights are contiguous along K (else along N).
        aligned: True if x and w can be read through tensor descriptors.
        hopper: True if hopper.py's kernel can run: Hopper GPU, 16-bit operands, aligned, weights contiguous along K.
        epilogue: dtype names of out, bias and residual (None: absent).
        bucket: the token count, rounded up to a power of two.
        gated: True if the first half of the features is a gate and the result is silu(gate) * up (gated_matmul).
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
    """Sizes of a program's tile in M, N and K; base of the kinds of schedules."""

    block_m: int
    block_n: int
    block_k: int

    @property
    def size(self) -> str:
        """The sizes as text, for a schedule's name."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}"


@dataclass(frozen=True, slots=True)
class PipelinedTile(Tile):
    """A tile, the warps of its program, and the stages of its loop: the steps of K in flight."""

    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class PointerTiles(PipelinedTile):
    """kernels.tile_kernel: operands of any strides.

    Attributes:
        swapped: True if the weights are the M operand of the MMA.
        split: True if each leaf of a tree has a separate program and a second launch adds them.
        group: tiles of M that share their weights in L2; unused if swapped.
        gated: True if half of block_n is the gate's and one launch gives silu(gate) * up; only swapped, without a tree.
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
    """kernels.tma_kernel: operands through tensor descriptors, persistent programs.

    Attributes:
        ctas: programs per multiprocessor.
        swapped, split, group: as in ``PointerTiles``.
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
        ctas, swapped, group: as in ``TmaTiles``.
        nodes: nodes of a tree in registers, 1 or 2; the others wait in shared memory.
        gated: True if half of block_n is the gate's and one launch gives silu(gate) * up; not swapped, without a tree.
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
class RingTiles(Tile):
    """ring.ring_matmul_kernel, for few tokens without a tree: weights arrive before x does.

    Attributes:
        block_m: 8, the least of a warpgroup product.
        block_n: rows of the weights, 32 or 64.
        stages: k-groups in the ring.
        gated: True if half of block_n is the gate's and one launch gives silu(gate) * up.
    """

    stages: int
    _: KW_ONLY
    gated: bool = False

    def __str__(self) -> str:
        return f"ring{'-gated' * self.gated}-{self.size}-s{self.stages}"


@dataclass(frozen=True, slots=True)
class BatchedLeaves(PipelinedTile):
    """batched_leaves.batched_leaves_kernel: the leaves of a tree of radix 2 in parallel, for few tokens.

    Attributes:
        ahead: True if the weights are prefetched into L2 while the previous kernel is finishing.
    """

    _: KW_ONLY
    ahead: bool = False

    def __str__(self) -> str:
        return f"batched-leaves{'-ahead' * self.ahead}-{self.size}-w{self.warps}s{self.stages}"


GemmSchedule: TypeAlias = PointerTiles | TmaTiles | HopperTiles | RingTiles | BatchedLeaves
