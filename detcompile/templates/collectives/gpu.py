"""tree_all_reduce over peer memory of the GPUs of a group: one kernel per rank, without a library.

Legend: M tokens, N features, R ranks; elements of [M, N] are numbered consecutively. See peer_memory for boxes, flags,
channels and epochs.

A rank *writes* into the boxes of the others and reads only its own: a write needs no reply, and a waiting rank polls
its own memory. For a block of elements

    one shot:   every rank sends its partials to all ranks and adds all
    two shots:  rank r receives the partials of the r-th piece, adds them, and sends the rounded sums to all ranks

Both add the partials of an element in the order of the tree over the ranks, in float32, so they have the bits of
`collectives.add_partials`. Refilling a box needs no acknowledgment: a rank that sends box e + 2 has received box e + 1,
which its reader sent after reading box e. Epochs are counted on the device, so a replayed CUDA graph continues the
count.

Large sums use collectives/overlapped.

All ranks must launch the same sums in the same order, with the same number of elements and the same schedule. Programs
start in the order of their numbers, so the lowest unfinished one runs on every rank and none waits forever.
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

LEVELS = 4  # at most, of the tree over the ranks
MOST_ELEMENTS = 1 << 30  # offsets have 32 bits
BLOCKS = ((512, 4), (1024, 8), (2048, 8), (4096, 8))  # elements, warps
LINK_BYTES = 4e11  # bytes per second that a GPU sends, roughly; SHOT_SECONDS: of one synchronization
SHOT_SECONDS = 2.5e-6


@dataclass(frozen=True, slots=True)
class ReduceSchedule:
    """How elements are distributed; never affects bits. block: elements of a piece, at most BOX."""

    two_shot: bool
    block: int
    warps: int


def choose_schedule(num_elements: int, num_ranks: int, out_bytes: int) -> ReduceSchedule:
    """Return the likely fastest schedule: one shot synchronizes once less, two shots send less."""
    one = 4 * (num_ranks - 1) * num_elements / LINK_BYTES
    two = (4 + out_bytes) * (num_ranks - 1) / num_ranks * num_elements / LINK_BYTES + SHOT_SECONDS
    return shot_schedule(num_elements, num_ranks, two < one)


class Reduction(NamedTuple):
    """out [M, N] = round(residual + round(partials of all ranks + bias)).

    Attributes:
        partial: this rank's part of the sum, [M, N] float32, contiguous.
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
        """Return the reduction of these tokens only."""
        residual = None if self.residual is None else self.residual[rows]
        return self._replace(partial=self.partial[rows], residual=residual, out=self.out[rows])


def reduce_over_peers(memory: PeerMemory, reduction: Reduction, two_shot: bool | None = None) -> None:
    """Write the sum to ``reduction.out``. two_shot forces a method."""
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
    """Return the kernel arguments for the peer memory, by name."""
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
    """Return the kernel arguments for a reduction, by name."""
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
    """Return the schedule of one method: the smallest blocks whose boxes hold everything at once."""
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
        local = tl.load(partial_ptr + element, mask=element < total, other=0.0)
        for r in tl.static_range(RANKS):
            if r != RANK:
                tl.store(boxes[r] + (box + RANK * BOX) + place, local)
        meet(theirs, mine, epoch, LANES)
        acc = tree_sum(local, boxes[RANK] + box + place, RANK, RANKS, BOX, R0, R1, R2, R3)
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
    """Rank r owns the r-th of every R blocks. The sums use the same boxes, in the dtype of the output."""
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
        local = tl.load(partial_ptr + element, mask=element < total, other=0.0)
        meet(theirs, mine, epoch, LANES)
        acc = tree_sum(local, boxes[RANK] + box + place, RANK, RANKS, BOX, R0, R1, R2, R3)
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
    """Return the program's channel; [LANES] pointers to this rank's flag on every rank, and to every rank's flag here;
    and the epoch after the previous kernels."""
    let_next_start(PDL)
    channel = tl.program_id(0)
    lane = tl.arange(0, LANES)
    rank = tl.where(lane < RANKS, lane, RANK)  # lanes without a rank use this rank's flags
    theirs = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + (channel * LANES + RANK)
    wait_for_earlier(PDL)
    return channel, theirs, flags_ptr + channel * LANES + rank, tl.load(epochs_ptr + channel)


@triton.jit
def meet(theirs, mine, epoch, LANES: tl.constexpr):
    """Signal every rank that its box of this epoch is full, and wait until all of this rank's boxes are.

    The barrier orders all threads' stores and loads before the release by the threads that write the flags. A flag may
    be one epoch ahead.
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
    local, boxes_ptr, RANK: tl.constexpr, RANKS: tl.constexpr, BOX: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
):  # fmt: skip
    """Add this rank's partials and those in its boxes, which are BOX apart, in the tree's order."""
    t0, t1, t2, t3 = local, local, local, local
    for r in tl.static_range(RANKS):
        if r == RANK:
            acc = local
        else:
            acc = tl.load(boxes_ptr + r * BOX)
        t0, t1, t2, t3 = close_leaf(acc, r, t0, t1, t2, t3, R0, R1, R2, R3)
    return root_of(t0, t1, t2, t3, R0, R1, R2)


@triton.jit
def finish(
    acc, element, total, N, bias_ptr, residual_ptr, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """round(residual + round(acc + bias)), like the matmul template's epilogue."""
    inside = element < total
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + element % N, mask=inside, other=0.0).to(tl.float32)
    y = acc.to(DTYPE)
    if HAS_RESIDUAL:
        row = (element // N).to(tl.int64) * residual_stride
        residual = tl.load(residual_ptr + row + element % N, mask=inside, other=0.0)
        y = (widened(residual, DTYPE) + y.to(tl.float32)).to(DTYPE)
    return y
