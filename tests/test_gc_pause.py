"""Garbage collection stays off until the last of overlapping blocks ends, and off if it was."""

import gc
from contextlib import ExitStack

import pytest

from detcompile.gc_pause import without_collections


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
