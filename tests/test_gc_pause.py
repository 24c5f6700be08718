"""Collection stays off until the last of overlapping blocks ends, and off if it was; older objects can be left out."""

import gc
import weakref
from contextlib import ExitStack

import pytest

from detcompile.gc_pause import without_collections, without_older_objects


@pytest.mark.parametrize("collects", [True, False])
def test_gc_resumes_after_last_overlapping_block(collects: bool):
    """Threads end their blocks in any order: an import in one, a capture in another."""
    assert gc.isenabled()
    try:
        if not collects:
            gc.disable()
        first, second = ExitStack(), ExitStack()
        for block in (first, second):
            block.enter_context(without_collections())
        first.close()
        assert not gc.isenabled()
        second.close()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_older_garbage_is_collected_after_the_block_and_new_garbage_inside() -> None:
    with without_collections():
        older = weakref.ref(Cycle())
        with pytest.raises(RuntimeError), without_older_objects():
            newer = weakref.ref(Cycle())
            gc.collect()
            assert newer() is None and older() is not None
            raise RuntimeError
        gc.collect()
        assert older() is None
