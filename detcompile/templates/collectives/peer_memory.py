"""PeerMemory: memory on every GPU of a group into which the kernels of all its ranks write.

Legend: R ranks, C channels: program c of a kernel communicates only with program c of the other ranks' kernels.

    boxes [C, 2, R, BOX] float32   data from rank r to channel c; two, so that one is read while the next is filled
    flags [C, LANES] int32         the epoch of the last box that rank r has sent
    epochs [C] int32               private to this rank: how many boxes it has sent

    landing: partials [R, P] float32 by sender, and sums [R, P] of up to 32 bits by owner; P = LANDING / R

Boxes and flags are allocated once per group, at its first use, and the landing buffer at the first sum that is large
enough for it. Their size does not depend on shapes: larger data goes through piece by piece.
"""

import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from detcompile.config import peer_memory_allowed, settle_symmetric_memory
from detcompile.errors import ScheduleError
from detcompile.templates.device.cuda_graphs import capturing
from detcompile.torch_internals import symmetric_memory
from detcompile.torch_internals.distributed import process_group

CHANNELS = 256
BOX = 4096  # float32 elements
LANDING = 1 << 25  # elements of all senders together: 134 MB, and the same for the sums
LANES = 8  # maximum of ranks; a power of two
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_MEMORIES: dict[tuple[str, Callable[..., Any]], tuple[dist.ProcessGroup, Any]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """One rank's view of a group's memory.

    Attributes:
        rank: number of this process in the group. boxes: every rank's box, mapped on this GPU.
        flags: this rank's flags. flag_addresses: [R] int64, every rank's flags, mapped on this GPU.
        owner: keeps the memory mapped.
    """

    rank: int
    boxes: tuple[Tensor, ...]
    flags: Tensor
    flag_addresses: Tensor
    epochs: Tensor
    owner: Any = None


@dataclass(frozen=True, slots=True)
class Landing:
    """Buffers that receive large sums.

    Attributes:
        partials: [R, P] float32 of every rank, mapped on this GPU. sums: likewise, 32 bits per element.
        owner: keeps the memory mapped.
    """

    partials: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    owner: Any = None


def peer_memory(group: str, device: torch.device) -> PeerMemory | None:
    """Return the memory of the named group, or None if its GPUs cannot map it. All ranks get it, or none does.

    Raises:
        ScheduleError: the first call is during a CUDA graph capture.
    """
    memory: PeerMemory | None = _opened(group, device, _open)
    return memory


def landing_of(group: str, device: torch.device) -> Landing | None:
    """Return the landing of a group with ``peer_memory``; None if memory is short. All ranks get it, or none does."""
    landing: Landing | None = _opened(group, device, _open_landing)
    return landing


def _opened(group: str, device: torch.device, open_memory: Callable[[dist.ProcessGroup, torch.device], Any]) -> Any:
    ranks = process_group(group)
    opened = _MEMORIES.get((group, open_memory))
    if opened is None or opened[0] is not ranks:  # an earlier group may have had the same name
        if capturing():
            raise ScheduleError(
                "detcompile's collectives: the ranks have not mapped each other's memory, which is impossible during "
                "a CUDA graph capture; run the model once before capturing"
            )
        opened = _MEMORIES[group, open_memory] = (ranks, _agreed(ranks, device, open_memory))
    return opened[1]


def _agreed(
    ranks: dist.ProcessGroup, device: torch.device, open_memory: Callable[[dist.ProcessGroup, torch.device], Any]
) -> Any:
    """Return open_memory's result if it succeeds on every rank of a group on one machine, else None."""
    if not 2 <= ranks.size() <= LANES:
        return None
    here = (socket.gethostname(), BOOT_ID.read_text() if BOOT_ID.exists() else "", peer_memory_allowed())
    if any(there != here or not there[2] for there in _exchange(here, ranks)):
        return None
    memory, problem = None, ""
    try:
        memory = open_memory(ranks, device)
    except RuntimeError as error:  # the driver's errors have no common type
        problem = str(error).strip().splitlines()[0]
    problems = {rank: text for rank, text in enumerate(_exchange(problem, ranks)) if text}
    if problems:
        warnings.warn(f"GPUs cannot map each other's memory, so collectives are slower: {problems}", stacklevel=2)
        return None
    return memory


def _open(ranks: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    settle_symmetric_memory()
    num_ranks, rank = ranks.size(), ranks.rank()
    num_flags, num_boxes = CHANNELS * LANES, CHANNELS * 2 * num_ranks * BOX
    memory = symmetric_memory.empty(num_flags + num_boxes, dtype=torch.float32, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(memory, ranks.group_name)
    flags = [handle.get_buffer(other, (num_flags,), torch.int32) for other in range(num_ranks)]
    return PeerMemory(
        rank=rank,
        boxes=tuple(handle.get_buffer(r, (num_boxes,), torch.float32, num_flags) for r in range(num_ranks)),
        flags=flags[rank],
        flag_addresses=torch.tensor([there.data_ptr() for there in flags], dtype=torch.int64, device=device),
        epochs=torch.zeros(CHANNELS, dtype=torch.int32, device=device),
        owner=(memory, handle),
    )


def _open_landing(ranks: dist.ProcessGroup, device: torch.device) -> Landing:
    num_ranks = ranks.size()
    shape = (num_ranks, LANDING // num_ranks)
    memory = symmetric_memory.empty(2 * LANDING, dtype=torch.float32, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(memory, ranks.group_name)
    partials, sums = (
        tuple(handle.get_buffer(rank, shape, torch.float32, first) for rank in range(num_ranks))
        for first in (0, LANDING)
    )
    return Landing(partials, sums, (memory, handle))


def _exchange(mine: Any, ranks: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * ranks.size()
    dist.all_gather_object(everyone, mine, group=ranks)
    return everyone
