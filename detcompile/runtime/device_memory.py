"""Total and used memory of a GPU or the host, and detection of out-of-memory errors.

A GPU's total is what this process may use (``torch.cuda.set_per_process_memory_fraction``). The host's is what is
available now, within the limits of every cgroup of the process.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import torch

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Names of limit files, the usage file, and memory.stat's key for reclaimable page cache.
VERSION_1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")
# Messages of CUDA and Triton, of torch's CPU allocator, and of torch if the bytes exceed int64.
SIGNS = ("out of memory", "can't allocate memory", "storage size calculation overflowed")


class GPUMemory(NamedTuple):
    """Bytes of one GPU."""

    total: int  # that this process may use
    used: int  # by all processes, including the allocator's cache
    reserved: int  # by this process's allocator, for tensors and graphs

    @property
    def outside(self) -> int:
        """Bytes that are not this process's tensors: contexts, kernels, CUDA graph nodes, other processes."""
        return self.used - self.reserved


def gpu_memory(device: torch.device) -> GPUMemory:
    """Return a GPU's memory after emptying the allocator's cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(index))
    return GPUMemory(min(total, allowed), total - free, torch.cuda.memory_reserved(device))


class StepMemory:
    """The memory that the allocator of a GPU keeps between steps: one block from which steps' tensors are cut.

    Steps of changing sizes would otherwise leave blocks that fit no later step. If more than ``most`` is kept after a
    step, everything is released and one block is allocated again.

    Args:
        block: bytes of the block.
        most: bytes that may be kept after a step.

    Attributes:
        num_refills: how often the block was allocated.
    """

    def __init__(self, device: torch.device, block: int, most: int) -> None:
        self.device = device
        self.block = block
        self.most = most
        self.num_refills = 0
        torch.cuda.empty_cache()
        self._least = self._fixed = self._kept()  # cannot be released: mainly the graphs' pool

    def tidy(self) -> None:
        """Clean up after a step that allocated, once its tensors are gone. May wait for the device."""
        if self._kept() - self._fixed > self.most:
            self.refill()

    def refill(self) -> None:
        """Allocate and free one block; a smaller one if tensors still hold parts of an earlier block."""
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
    """Return the bytes of host memory that this process can still use."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = cgroup_room()
    return free if room is None else min(free, room)


def cgroup_room(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes left by the tightest limit of this process's cgroups; None without a limit.

    Args:
        root: mount point of cgroups v2, or the folder with v1's controllers.
        membership: the file that lists the process's cgroups.
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
    """Return True if the error means that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def _rooms(mount: Path, path: str, version: tuple[tuple[str, ...], str, str]) -> list[int]:
    """Return the free bytes under each cgroup limit, from the mount point down.

    Inside a container, ``path`` may name ancestors outside it.
    """
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
    """Return the number in a file; None for "max" or a missing file."""
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
