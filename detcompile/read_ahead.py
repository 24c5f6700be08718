"""Files come from the disk into the kernel's page cache while Python does something else.

Weights are mapped, so who is first to read a page of them waits for the disk. A thread here reads the files whole, and
faster than that: the kernel hands them on to nobody, so that nothing is copied, in calls that hold no lock of Python's.
"""

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["THREAD", "read_ahead"]

logger = logging.getLogger(__name__)
THREAD = "detcompile reading ahead"
PIECE = 1 << 28  # bytes a call
MEMORY = Path("/proc/meminfo")


def read_ahead(files: Sequence[Path]) -> None:
    """Start to read files, in their order, and return at once.

    What cannot be read is left to who opens it and says what is wrong. Nothing is read where the files are larger than
    the memory that is available, since they would push each other out, or where the system cannot read so.
    """
    if files:
        threading.Thread(target=_read, args=(files,), name=THREAD, daemon=True).start()


def _read(files: Sequence[Path]) -> None:
    try:
        regular = [file for file in files if file.is_file()]
        if sum(file.stat().st_size for file in regular) > _available():
            return
        with open(os.devnull, "wb") as nowhere:
            for file in regular:
                with file.open("rb") as stream:
                    at = 0
                    while count := os.sendfile(nowhere.fileno(), stream.fileno(), at, PIECE):
                        at += count
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL
        logger.debug("not read ahead: %s", error)


def _available() -> int:
    """Bytes of memory that the page cache may take; 0 where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return 0
