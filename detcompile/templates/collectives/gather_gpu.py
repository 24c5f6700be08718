"""Gathers of columns and embedding rows over peer memory of the GPUs of a group: bytes move, nothing is summed.

Legend: M tokens, n columns of each rank, R ranks, v rows of a table on each rank, D features.

    columns  every rank sends its [M, n] to all ranks, and places what it receives side by side
    rows     the rank that holds a token's row sends it to all ranks, which read only that rank's box

Boxes, flags and epochs are those of collectives/gpu: sums and gathers may follow each other in any order that is the
same on all ranks. Elements travel as integers of their size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.templates.collectives import gpu as collectives_gpu
from detcompile.templates.collectives.gpu import ReduceSchedule, enter, meet, memory_arguments, shot_schedule
from detcompile.templates.collectives.peer_memory import PeerMemory
from detcompile.templates.device.launcher import launcher

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # element sizes that fit in boxes of float32


def columns_over_peers(memory: PeerMemory, x: Tensor, columns: int) -> Tensor | None:
    """Gather x [M, n] of every rank, contiguous -> [M, columns], in the order of the ranks, without padding.

    Returns None if there are too many elements, or elements are too large, for this method.
    """
    M, n = x.shape
    num_ranks = len(memory.boxes)
    if not _fits(x, num_ranks * x.numel()):
        return None
    out = x.new_empty((M, columns))
    schedule = shot_schedule(x.numel(), num_ranks, two_shot=False)
    launcher(columns_kernel)[(min(collectives_gpu.CHANNELS, triton.cdiv(x.numel(), schedule.block)),)](
        x_ptr=_integers(x), out_ptr=_integers(out), total=x.numel(), n=n, columns=columns,
        **_box_arguments(memory, schedule),
    )  # fmt: skip
    return out


def rows_over_peers(memory: PeerMemory, weight: Tensor, ids: Tensor) -> Tensor | None:
    """Look up ids [...] int64 in a table whose rows from r v on are rank r's contiguous weight [v, D] -> [..., D].

    Ids outside the table give zeros. Returns None like ``columns_over_peers``.
    """
    assert weight.is_contiguous(), "the choice of method must not depend on what only one rank knows"
    v, D = weight.shape
    total = ids.numel() * D
    if not _fits(weight, total):
        return None
    out = weight.new_empty((*ids.shape, D))
    schedule = shot_schedule(total, len(memory.boxes), two_shot=False)
    launcher(rows_kernel)[(min(collectives_gpu.CHANNELS, triton.cdiv(total, schedule.block)),)](
        ids_ptr=ids.contiguous(), weight_ptr=_integers(weight), out_ptr=_integers(out), total=total, v=v, D=D,
        **_box_arguments(memory, schedule),
    )  # fmt: skip
    return out


def _fits(tensor: Tensor, num_elements: int) -> bool:
    return tensor.itemsize in INTEGERS and 0 < num_elements <= collectives_gpu.MOST_ELEMENTS


def _box_arguments(memory: PeerMemory, schedule: ReduceSchedule) -> dict[str, Any]:
    boxes = {"boxes": memory.boxes, "BOX": collectives_gpu.BOX}
    return boxes | {"BLOCK": schedule.block, "num_warps": schedule.warps} | memory_arguments(memory)


def _integers(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.itemsize])


@triton.jit
def columns_kernel(
    x_ptr, boxes, flags_ptr, addresses_ptr, epochs_ptr, out_ptr, total, n, columns,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BOX: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    channel, theirs, mine, epoch = enter(flags_ptr, addresses_ptr, epochs_ptr, RANK, RANKS, LANES, PDL)
    place = tl.arange(0, BLOCK)
    for start in range(channel * BLOCK, total, tl.num_programs(0) * BLOCK):
        epoch += 1
        box = (channel * 2 + (epoch & 1)) * (RANKS * BOX)
        element = start + place
        inside = element < total
        local = tl.load(x_ptr + element, mask=inside)
        for r in tl.static_range(RANKS):
            if r != RANK:
                tl.store((boxes[r] + (box + RANK * BOX)).to(out_ptr.dtype) + place, local, mask=inside)
        meet(theirs, mine, epoch, LANES)
        row, column = element // n, element % n
        for r in tl.static_range(RANKS):
            if r == RANK:
                got = local
            else:
                got = tl.load((boxes[RANK] + (box + r * BOX)).to(out_ptr.dtype) + place, mask=inside)
            whole = r * n + column
            tl.store(out_ptr + row * columns + whole, got, mask=inside & (whole < columns))
    tl.store(epochs_ptr + channel, epoch)


@triton.jit
def rows_kernel(
    ids_ptr, weight_ptr, boxes, flags_ptr, addresses_ptr, epochs_ptr, out_ptr, total, v, D,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, BOX: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    channel, theirs, mine, epoch = enter(flags_ptr, addresses_ptr, epochs_ptr, RANK, RANKS, LANES, PDL)
    place = tl.arange(0, BLOCK)
    for start in range(channel * BLOCK, total, tl.num_programs(0) * BLOCK):
        epoch += 1
        box = (channel * 2 + (epoch & 1)) * (RANKS * BOX)
        element = start + place
        inside = element < total
        row_id = tl.load(ids_ptr + element // D, mask=inside, other=-1)
        owner = tl.where(row_id < 0, -1, row_id // v)
        held = owner == RANK
        row = tl.load(weight_ptr + (row_id - RANK * v) * D + element % D, mask=held, other=0)
        for r in tl.static_range(RANKS):
            if r != RANK:
                tl.store((boxes[r] + (box + RANK * BOX)).to(out_ptr.dtype) + place, row, mask=held)
        meet(theirs, mine, epoch, LANES)
        for r in tl.static_range(RANKS):
            if r != RANK:
                sent = (boxes[RANK] + (box + r * BOX)).to(out_ptr.dtype) + place
                row = tl.where(owner == r, tl.load(sent, mask=owner == r, other=0), row)
        tl.store(out_ptr + element, row, mask=inside)
    tl.store(epochs_ptr + channel, epoch)
