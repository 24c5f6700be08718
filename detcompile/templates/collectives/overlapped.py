"""Large sums over the memory of several GPUs: copy engines carry the partials while the next ones are multiplied.

Legend: M tokens, N features, R ranks. Rank r owns the r-th share of the tokens of a piece.

    for each share, the own one last:   its partials are made, then copied to its owner beside what follows
    one kernel:    every rank meets the others, adds what has landed and its own partials in the tree's order, and
                   writes the rounded sums to all; they meet again, and each takes what the others have written

There are two meetings a piece, however large it is. Nothing is overwritten too early: that a rank's kernel has ended
says that the others have read all that landed before, and that it meets the others says that it has taken all sums.

As in collectives/gpu, all ranks launch the same sums in the same order; no way of travelling moves a bit.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from detcompile.templates.collectives.gpu import (
    Reduction,
    enter,
    finish,
    launch_arguments,
    meet,
    memory_arguments,
    tree_sum,
)
from detcompile.templates.collectives.peer_memory import CHANNELS, LANDING, LANES, Landing, PeerMemory
from detcompile.templates.device.launcher import launcher

__all__ = ["LEAST_TOKENS", "MOST_FEATURES", "reduce_overlapped"]

LEAST_TOKENS = 1024  # of a product; from here on its shares take as long as the copies beside them
TILE = 128  # tokens: shares are whole tiles of a product, where they can be
MOST_FEATURES = LANDING // LANES  # a share has room for a row
BLOCK, WARPS = 2048, 8


def reduce_overlapped(
    memory: PeerMemory, landing: Landing, reduction: Reduction, make: Callable[[slice], object] | None = None
) -> None:
    """Write the sum to ``reduction.out``. make(rows) writes these rows of the partial, where it is not filled yet."""
    (M, N), num_ranks = reduction.out.shape, len(memory.boxes)
    room = landing.partials[0].shape[1] // N  # rows of a share
    main, side = torch.cuda.current_stream(reduction.out.device), _side_stream(reduction.out.device)
    for first in range(0, M, room * num_ranks):
        count = min(room * num_ranks, M - first)
        share = min(room, triton.cdiv(triton.cdiv(count, num_ranks), TILE) * TILE)
        for turn in range(num_ranks):
            owner = (memory.rank + 1 + turn) % num_ranks
            rows = slice(first + min(owner * share, count), first + min((owner + 1) * share, count))
            if make is not None and rows.start < rows.stop:
                make(rows)
            if owner != memory.rank:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    sent = reduction.partial[rows].view(-1)
                    landing.partials[owner][memory.rank, : len(sent)].copy_(sent)
        main.wait_stream(side)
        _gather(memory, landing, reduction.piece(slice(first, first + count)), share * N)


def _gather(memory: PeerMemory, landing: Landing, reduction: Reduction, share: int) -> None:
    """Of one piece, whose partials have all been sent. share: elements that a rank owns."""
    launcher(gather_kernel)[(min(CHANNELS, triton.cdiv(share, BLOCK)),)](
        landed_ptr=landing.partials[memory.rank], sums=landing.sums, share=share,
        PITCH=landing.partials[0].shape[1], BLOCK=BLOCK, num_warps=WARPS,
        **memory_arguments(memory), **launch_arguments(reduction),
    )  # fmt: skip


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@triton.jit
def gather_kernel(
    partial_ptr, landed_ptr, sums, flags_ptr, addresses_ptr, epochs_ptr, out_ptr, bias_ptr, residual_ptr,
    total, N, share, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What lies past a share in the landing is read and thrown away: there is always memory."""
    channel, theirs, mine, epoch = enter(flags_ptr, addresses_ptr, epochs_ptr, RANK, RANKS, LANES, PDL)
    epoch += 1
    meet(theirs, mine, epoch, LANES)
    place = tl.arange(0, BLOCK)
    for start in range(channel * BLOCK, tl.minimum(share, total - RANK * share), tl.num_programs(0) * BLOCK):
        element = RANK * share + start + place
        inside = (start + place < share) & (element < total)
        own = tl.load(partial_ptr + element, mask=inside, other=0.0)
        acc = tree_sum(own, landed_ptr + start + place, RANK, RANKS, PITCH, R0, R1, R2, R3)
        y = finish(
            acc, element, total, N, bias_ptr, residual_ptr, residual_stride,
            HAS_BIAS, HAS_RESIDUAL, out_ptr.dtype.element_ty,
        )  # fmt: skip
        tl.store(out_ptr + element, y, mask=inside)
        for r in tl.static_range(RANKS):
            if r != RANK:
                there = sums[r].to(tl.pointer_type(out_ptr.dtype.element_ty)) + RANK * PITCH + start + place
                tl.store(there, y, mask=inside)
    epoch += 1
    meet(theirs, mine, epoch, LANES)
    for r in tl.static_range(RANKS):
        if r != RANK:
            for start in range(channel * BLOCK, tl.minimum(share, total - r * share), tl.num_programs(0) * BLOCK):
                element = r * share + start + place
                inside = (start + place < share) & (element < total)
                here = sums[RANK].to(tl.pointer_type(out_ptr.dtype.element_ty)) + r * PITCH + start + place
                tl.store(out_ptr + element, tl.load(here, mask=inside), mask=inside)
    tl.store(epochs_ptr + channel, epoch)
