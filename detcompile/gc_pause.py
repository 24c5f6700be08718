"""Garbage collection off inside a block."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.RLock()  # a finalizer may open a block, too
_open = 0  # blocks of all threads
_collected = False  # before the first of them


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage inside the block, where a finalizer would do harm or nothing is garbage.

    Blocks of several threads may overlap: collections begin again with the end of the last one.
    """
    global _open, _collected
    with _LOCK:
        if not _open:
            _collected = gc.isenabled()
            gc.disable()
        _open += 1
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            if not _open and _collected:
                gc.enable()
