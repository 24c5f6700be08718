"""Large sums over peer memory of several GPUs: copy engines send partials while the next ones are multiplied.

Legend: M tokens, N features, R ranks. Rank r owns the r-th share of the tokens of a piece.

    for each share, this rank's own last:   compute its partials, then copy them to its owner in the background
    one kernel:    every rank meets the others, adds the received partials and its own in the tree's order, and writes
                   the rounded sums to all ranks; they meet again, and each reads what the others have written

There are two meetings per piece, whatever its size. Nothing is overwritten too early: if a rank's kernel has ended, the
others have read everything they received before; if it meets the others, it has read all sums.

As in collectives/gpu, all ranks launch the same sums in the same order, and no method affects bits.
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

LEAST_TOKENS = 1024  # of a product; from here on computing a share takes as long as the copies it overlaps
TILE = 128  # tokens: shares are whole tiles of a product if possible
MOST_FEATURES = LANDING // LANES  # so that a share holds at least one row
BLOCK, WARPS = 2048, 8


def reduce_overlapped(
    memory: PeerMemory, landing: Landing, reduction: Reduction, make: Callable[[slice], object] | None = None
) -> None:
    """Write the sum to ``reduction.out``. make(rows) computes these rows of the partial if it is not computed yet."""
    (M, N), num_ranks = reduction.out.shape, len(memory.boxes)
    most_rows = landing.partials[0].shape[1] // N  # of a share
    main, side = torch.cuda.current_stream(reduction.out.device), _side_stream(reduction.out.device)
    for first in range(0, M, most_rows * num_ranks):
        count = min(most_rows * num_ranks, M - first)
        share = min(most_rows, triton.cdiv(triton.cdiv(count, num_ranks), TILE) * TILE)
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
    """Sum one piece whose partials have all been sent. share: elements that a rank owns."""
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
    """Data past a share in the landing buffer is read and ignored: the buffer always extends that far."""
    channel, theirs, mine, epoch = enter(flags_ptr, addresses_ptr, epochs_ptr, RANK, RANKS, LANES, PDL)
    epoch += 1
    meet(theirs, mine, epoch, LANES)
    place = tl.arange(0, BLOCK)
    for start in range(channel * BLOCK, tl.minimum(share, total - RANK * share), tl.num_programs(0) * BLOCK):
        element = RANK * share + start + place
        inside = (start + place < share) & (element < total)
        local = tl.load(partial_ptr + element, mask=inside, other=0.0)
        acc = tree_sum(local, landed_ptr + start + place, RANK, RANKS, PITCH, R0, R1, R2, R3)
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
