"""tree_all_reduce over memory that the GPUs of a group have opened to each other: one kernel a rank, no library.

Legend: M tokens, N features, R ranks; elements of [M, N] are counted through. See peer_memory for boxes, flags,
channels and epochs.

A rank *writes* into the boxes of the others and reads its own alone: a write needs no answer, and whoever waits looks
at memory of its own. Of a block of elements

    one shot:   every rank sends its partials to all, and adds all
    two shots:  rank r gets the partials of the r-th piece, adds them, and sends the rounded sums to all

Both add the partials of an element in the order of the tree over the ranks, in float32, so that they have the bits of
`collectives.add_partials`. Filling a box again needs no leave: who sends box e + 2 has received box e + 1, which its
reader sent after having read box e. Epochs are counted on the device, so that a replayed CUDA graph goes on counting.

Large sums travel otherwise: overlapped.

All ranks have to launch the same sums in the same order, with as many elements and the same schedule. Programs start
in the order of their numbers, so that the lowest unfinished one runs on every rank and none waits for ever.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.collectives.peer_memory import BOX, CHANNELS, LANES, PeerMemory
from detcompile.templates.device.dependent_launch import launch_options, let_next_start, wait_for_earlier
from detcompile.templates.device.launcher import launcher
from detcompile.templates.device.primitives import widened
from detcompile.templates.matmul.tree import close_leaf, root_of, tree_options

__all__ = [
    "LEVELS",
    "MOST_ELEMENTS",
    "ReduceSchedule",
    "Reduction",
    "choose_schedule",
    "enter",
    "finish",
    "launch_arguments",
    "meet",
    "memory_arguments",
    "reduce_over_peers",
    "shot_schedule",
    "tree_sum",
]

LEVELS = 4  # of the tree over the ranks, at most
MOST_ELEMENTS = 1 << 30  # offsets are 32 bits wide
BLOCKS = ((512, 4), (1024, 8), (2048, 8), (4096, 8))  # elements, warps
LINK_BYTES = 4e11  # a second, roughly, that a GPU sends; SHOT_SECONDS: of a meeting
SHOT_SECONDS = 2.5e-6


@dataclass(frozen=True, slots=True)
class ReduceSchedule:
    """How elements are dealt out; no part of it moves a bit. block: elements of a piece, at most BOX."""

    two_shot: bool
    block: int
    warps: int


def choose_schedule(num_elements: int, num_ranks: int, out_bytes: int) -> ReduceSchedule:
    """The one that is likely the fastest: to send less, or to meet once less."""
    one = 4 * (num_ranks - 1) * num_elements / LINK_BYTES
    two = (4 + out_bytes) * (num_ranks - 1) / num_ranks * num_elements / LINK_BYTES + SHOT_SECONDS
    return shot_schedule(num_elements, num_ranks, two < one)


class Reduction(NamedTuple):
    """out [M, N] = round(residual + round(partials of all ranks + bias)).

    Attributes:
        partial: share that this rank adds to the sum, [M, N] float32, contiguous.
        bias: [N], contiguous. residual: [M, N], unit stride along N.
        radices: fan-ins of the tree over the ranks, at most LEVELS of them above 1.
        out: contiguous.
    """

    partial: Tensor
    bias: Tensor | None
    residual: Tensor | None
    radices: tuple[int, ...]
    out: Tensor

    def piece(self, rows: slice) -> "Reduction":
        """The reduction of these tokens alone."""
        residual = None if self.residual is None else self.residual[rows]
        return self._replace(partial=self.partial[rows], residual=residual, out=self.out[rows])


def reduce_over_peers(memory: PeerMemory, reduction: Reduction, two_shot: bool | None = None) -> None:
    """Write the sum to ``reduction.out``. two_shot: a way to force."""
    num_ranks, total = len(memory.boxes), reduction.out.numel()
    assert total <= MOST_ELEMENTS and reduction.out.is_contiguous() and reduction.partial.is_contiguous()
    if two_shot is None:
        schedule = choose_schedule(total, num_ranks, reduction.out.element_size())
    else:
        schedule = shot_schedule(total, num_ranks, two_shot)
    share = schedule.block * (num_ranks if schedule.two_shot else 1)
    kernel = two_shot_kernel if schedule.two_shot else one_shot_kernel
    launcher(kernel)[(min(CHANNELS, triton.cdiv(total, share)),)](
        boxes=memory.boxes, BOX=BOX, BLOCK=schedule.block, num_warps=schedule.warps,
        **memory_arguments(memory), **launch_arguments(reduction),
    )  # fmt: skip


def memory_arguments(memory: PeerMemory) -> dict[str, Any]:
    """What a kernel that meets other ranks takes, by name."""
    return {
        "flags_ptr": memory.flags,
        "addresses_ptr": memory.flag_addresses,
        "epochs_ptr": memory.epochs,
        "RANK": memory.rank,
        "RANKS": len(memory.boxes),
        "LANES": LANES,
        **launch_options(memory.flags.device),
    }


def launch_arguments(reduction: Reduction) -> dict[str, Any]:
    """What a kernel of a reduction takes beside."""
    partial, bias, residual, radices, out = reduction
    return {
        "partial_ptr": partial,
        "out_ptr": out,
        "bias_ptr": out if bias is None else bias,
        "residual_ptr": out if residual is None else residual,
        "total": out.numel(),
        "N": out.shape[1],
        "residual_stride": 0 if residual is None else residual.stride(0),
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "enable_fp_fusion": False,
        **tree_options(tuple(radix for radix in radices if radix > 1)),
    }


def shot_schedule(num_elements: int, num_ranks: int, two_shot: bool) -> ReduceSchedule:
    """One way's schedule: blocks as small as the boxes hold at once."""
    shares = num_ranks if two_shot else 1
    fitting = [row for row in BLOCKS if num_elements <= row[0] * shares * CHANNELS]
    block, warps = fitting[0] if fitting else BLOCKS[-1]
    return ReduceSchedule(two_shot, block, warps)


@triton.jit
def one_shot_kernel(
    partial_ptr, boxes, flags_ptr, addresses_ptr, epochs_ptr, out_ptr, bias_ptr, residual_ptr,
    total, N, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BOX: tl.constexpr, BLOCK: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channel, theirs, mine, epoch = enter(flags_ptr, addresses_ptr, epochs_ptr, RANK, RANKS, LANES, PDL)
    place = tl.arange(0, BLOCK)
    for start in range(channel * BLOCK, total, tl.num_programs(0) * BLOCK):
        epoch += 1
        box = (channel * 2 + (epoch & 1)) * (RANKS * BOX)
        element = start + place
        own = tl.load(partial_ptr + element, mask=element < total, other=0.0)
        for r in tl.static_range(RANKS):
            if r != RANK:
                tl.store(boxes[r] + (box + RANK * BOX) + place, own)
        meet(theirs, mine, epoch, LANES)
        acc = tree_sum(own, boxes[RANK] + box + place, RANK, RANKS, BOX, R0, R1, R2, R3)
        y = finish(
            acc, element, total, N, bias_ptr, residual_ptr, residual_stride,
            HAS_BIAS, HAS_RESIDUAL, out_ptr.dtype.element_ty,
        )  # fmt: skip
        tl.store(out_ptr + element, y, mask=element < total)
    tl.store(epochs_ptr + channel, epoch)


@triton.jit
def two_shot_kernel(
    partial_ptr, boxes, flags_ptr, addresses_ptr, epochs_ptr, out_ptr, bias_ptr, residual_ptr,
    total, N, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BOX: tl.constexpr, BLOCK: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rank r owns the r-th of each R blocks. The sums travel in the same boxes, in the dtype of the output."""
    channel, theirs, mine, epoch = enter(flags_ptr, addresses_ptr, epochs_ptr, RANK, RANKS, LANES, PDL)
    place = tl.arange(0, BLOCK)
    for start in range(channel * (RANKS * BLOCK), total, tl.num_programs(0) * (RANKS * BLOCK)):
        epoch += 1
        box = (channel * 2 + (epoch & 1)) * (RANKS * BOX)
        for r in tl.static_range(RANKS):
            if r != RANK:
                element = start + r * BLOCK + place
                sent = tl.load(partial_ptr + element, mask=element < total, other=0.0)
                tl.store(boxes[r] + (box + RANK * BOX) + place, sent)
        element = start + RANK * BLOCK + place
        own = tl.load(partial_ptr + element, mask=element < total, other=0.0)
        meet(theirs, mine, epoch, LANES)
        acc = tree_sum(own, boxes[RANK] + box + place, RANK, RANKS, BOX, R0, R1, R2, R3)
        y = finish(
            acc, element, total, N, bias_ptr, residual_ptr, residual_stride,
            HAS_BIAS, HAS_RESIDUAL, out_ptr.dtype.element_ty,
        )  # fmt: skip
        epoch += 1
        box = (channel * 2 + (epoch & 1)) * (RANKS * BOX)
        for r in tl.static_range(RANKS):
            if r != RANK:
                tl.store((boxes[r] + (box + RANK * BOX)).to(tl.pointer_type(out_ptr.dtype.element_ty)) + place, y)
        tl.store(out_ptr + element, y, mask=element < total)
        meet(theirs, mine, epoch, LANES)
        for r in tl.static_range(RANKS):
            if r != RANK:
                element = start + r * BLOCK + place
                got = tl.load((boxes[RANK] + (box + r * BOX)).to(tl.pointer_type(out_ptr.dtype.element_ty)) + place)
                tl.store(out_ptr + element, got, mask=element < total)
    tl.store(epochs_ptr + channel, epoch)


@triton.jit
def enter(
    flags_ptr, addresses_ptr, epochs_ptr,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's channel; [LANES] pointers to this rank's flag on every rank, and to every rank's flag here; the epoch
    that the kernels before have left."""
    let_next_start(PDL)
    channel = tl.program_id(0)
    lane = tl.arange(0, LANES)
    rank = tl.where(lane < RANKS, lane, RANK)  # lanes without a rank speak with themselves
    theirs = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + (channel * LANES + RANK)
    wait_for_earlier(PDL)
    return channel, theirs, flags_ptr + channel * LANES + rank, tl.load(epochs_ptr + channel)


@triton.jit
def meet(theirs, mine, epoch, LANES: tl.constexpr):
    """Say to every rank that its box of this epoch is full, and wait until all of one's own are.

    The barrier puts what all threads have stored and loaded before the release of those that write the flags. A flag
    may be ahead of the epoch, by one.
    """
    epochs = tl.zeros((LANES,), tl.int32) + epoch
    tl.debug_barrier()
    tl.atomic_xchg(theirs, epochs, sem="release", scope="sys")
    behind = tl.min(tl.atomic_cas(mine, epochs, epochs, sem="acquire", scope="sys") - epoch, 0)
    while behind < 0:
        behind = tl.min(tl.atomic_cas(mine, epochs, epochs, sem="acquire", scope="sys") - epoch, 0)
    tl.debug_barrier()


@triton.jit
def tree_sum(
    own, boxes_ptr, RANK: tl.constexpr, RANKS: tl.constexpr, BOX: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
):  # fmt: skip
    """The partials of this rank and in its boxes, which are BOX apart, added in the tree's order."""
    t0, t1, t2, t3 = own, own, own, own
    for r in tl.static_range(RANKS):
        if r == RANK:
            acc = own
        else:
            acc = tl.load(boxes_ptr + r * BOX)
        t0, t1, t2, t3 = close_leaf(acc, r, t0, t1, t2, t3, R0, R1, R2, R3)
    return root_of(t0, t1, t2, t3, R0, R1, R2)


@triton.jit
def finish(
    acc, element, total, N, bias_ptr, residual_ptr, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """round(residual + round(acc + bias)), as the matmul template ends."""
    inside = element < total
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + element % N, mask=inside, other=0.0).to(tl.float32)
    y = acc.to(DTYPE)
    if HAS_RESIDUAL:
        row = (element // N).to(tl.int64) * residual_stride
        residual = tl.load(residual_ptr + row + element % N, mask=inside, other=0.0)
        y = (widened(residual, DTYPE) + y.to(tl.float32)).to(DTYPE)
    return y
