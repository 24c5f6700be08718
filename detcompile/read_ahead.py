"""Read files into the kernel's page cache in a thread while Python does something else.

Weights are memory-mapped, so the first access to a page waits for the disk. The thread asks the kernel to read whole
files. It copies nothing and holds no Python lock while the disk is slow.
"""

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)
THREAD = "detcompile reading ahead"
MEMORY = Path("/proc/meminfo")
DEVICES = Path("/sys/class/bdi")
LEAST_PIECE = 1 << 17  # bytes; Linux's default read-ahead of a device


def read_ahead(files: Sequence[Path]) -> None:
    """Start to read files, in their order, and return at once.

    Errors are ignored: whoever opens the file reports them. Nothing is read if the files are larger than the available
    memory, because they would evict each other, or if the system takes no advice on files.
    """
    if files:
        threading.Thread(target=_read, args=(files,), name=THREAD, daemon=True).start()


def _read(files: Sequence[Path]) -> None:
    try:
        regular = [file for file in files if file.is_file()]
        if sum(file.stat().st_size for file in regular) > _available():
            return
        for file in regular:
            with file.open("rb") as stream:
                status = os.fstat(stream.fileno())
                piece = _piece(status.st_dev)
                for at in range(0, status.st_size, piece):
                    os.posix_fadvise(stream.fileno(), at, piece, os.POSIX_FADV_WILLNEED)
    except (OSError, ValueError, AttributeError) as error:  # ValueError: a path that contains NUL
        logger.debug("not read ahead: %s", error)


def _available() -> int:
    """Return bytes of memory that the page cache may take; 0 if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return 0


def _piece(device: int) -> int:
    """Return the bytes that one call of advice makes Linux read of a device; it ignores the rest of a request."""
    try:
        name = f"{os.major(device)}:{os.minor(device)}"
        return max(LEAST_PIECE, int((DEVICES / name / "read_ahead_kb").read_text()) << 10)
    except (OSError, ValueError):
        return LEAST_PIECE
