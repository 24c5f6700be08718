"""How much memory there is, how much of it is taken, and whether an error says that it ran out.

A GPU has what this process may take of it (``torch.cuda.set_per_process_memory_fraction``); a CPU has what is available
now, within the limits of every cgroup that the process is in.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["GPUMemory", "StepMemory", "available_memory", "cgroup_room", "gpu_memory", "ran_out_of_memory"]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# Limits, bytes in use, and the key of memory.stat for cached pages of files, which give way to other uses.
VERSION_1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
# In messages of CUDA and Triton, of torch's CPU allocator, and of torch where the bytes are no int64.
SIGNS = ("out of memory", "can't allocate memory", "storage size calculation overflowed")


class GPUMemory(NamedTuple):
    """Bytes of one GPU."""

    total: int  # bytes that this process may take
    used: int  # bytes that all processes hold, the allocator's cache included
    reserved: int  # bytes that this process's allocator holds, for tensors and graphs

    @property
    def outside(self) -> int:
        """Bytes that are no tensors of this process: contexts, kernels, CUDA graphs' nodes, other processes."""
        return self.used - self.reserved


def gpu_memory(device: torch.device) -> GPUMemory:
    """What a GPU holds now. What the allocator only keeps for later is given back first."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(index))
    return GPUMemory(min(total, allowed), total - free, torch.cuda.memory_reserved(device))


class StepMemory:
    """What the allocator of a GPU keeps between steps: one block that their tensors are cut from.

    Steps of ever other sizes would each leave blocks that fit no later one. Where more than ``most`` is kept after a
    step, everything is given back, and one block taken anew.

    Args:
        block: bytes of the block that is kept.
        most: bytes that may be kept after a step.

    Attributes:
        num_refills: times that a block was taken.
    """

    def __init__(self, device: torch.device, block: int, most: int) -> None:
        self.device = device
        self.block = block
        self.most = most
        self.num_refills = 0
        torch.cuda.empty_cache()
        self._least = self._fixed = self._kept()  # what cannot be given back: of the graphs' pool, above all

    def tidy(self) -> None:
        """Tidy up once the tensors of a step that allocated are gone. Waits for the device where too much is kept."""
        if self._kept() - self._fixed > self.most:
            self.refill()

    def refill(self) -> None:
        """Keep one block, or less where others' tensors hold on to an earlier one."""
        torch.cuda.empty_cache()
        self.num_refills += 1
        self._fixed = self._kept()
        size = self.block - max(0, self._fixed - self._least)
        if size > 0:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(size, dtype=torch.uint8, device=self.device)

    def _kept(self) -> int:
        statistics = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved: int = statistics["reserved_bytes"]["all"]["current"]
        allocated: int = statistics["allocated_bytes"]["all"]["current"]
        return reserved - allocated


def available_memory() -> int:
    """Bytes of the host's memory that this process can still take."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = cgroup_room()
    return free if room is None else min(free, room)


def cgroup_room(root: Path = CGROUPS, membership: Path = OWN_CGROUPS) -> int | None:
    """Bytes that the limits of this process's cgroups leave, the tightest of all levels; None where there is none.

    Args:
        root: where cgroups are mounted: version 2's, or version 1's controllers in folders by their names.
        membership: the file that names the process's cgroups.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            rooms += _rooms(root, path, VERSION_2)
        elif "memory" in controllers.split(","):
            rooms += _rooms(root / "memory", path, VERSION_1)
    return min(rooms, default=None)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that a device or the host has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def _rooms(mount: Path, path: str, version: tuple[tuple[str, ...], str, str]) -> list[int]:
    """What each level from the mount to the cgroup leaves; inside a container the path may name levels above it."""
    limits, usage, cached = version
    folder = mount / path.lstrip("/")
    rooms = []
    for level in (folder, *folder.parents[: len(folder.relative_to(mount).parts)]):
        used = _number(level / usage)
        if used is not None:
            used = max(0, used - _statistic(level / "memory.stat", cached))
            rooms += [max(0, limit - used) for name in limits if (limit := _number(level / name)) is not None]
    return rooms


def _number(file: Path) -> int | None:
    """What the file says; None for "max", and where there is no such file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, key: str) -> int:
    try:
        entries = dict(line.split() for line in file.read_text().splitlines())
        return int(entries.get(key, 0))
    except (OSError, ValueError):
        return 0
