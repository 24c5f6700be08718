"""Turn garbage collection off inside a block, or restrict it to new objects."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.RLock()  # a finalizer may open a block, too
_num_open = 0  # blocks, of all threads
_was_enabled = False  # before the first open block


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Turn garbage collection off inside the block, where a finalizer could do harm or there is nothing to collect.

    Blocks of several threads may overlap; collection resumes when the last block ends.
    """
    global _num_open, _was_enabled
    with _LOCK:
        if not _num_open:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_open += 1
    try:
        yield
    finally:
        with _LOCK:
            _num_open -= 1
            if not _num_open and _was_enabled:
                gc.enable()


@contextlib.contextmanager
def without_older_objects() -> Iterator[None]:
    """Let collections inside the block visit only objects that were made inside it; unfreeze every object after it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
