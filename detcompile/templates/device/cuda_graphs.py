"""CUDA graphs: capture without garbage collection, whether a capture is on, and times of launches by replay."""

import contextvars
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "capture",
    "capturing",
    "for_graph",
    "graph_seconds",
    "is_alone",
    "is_for_graph",
    "is_rehearsal",
    "rehearsal",
]

# Ambient, since between a capture and the templates that ask stands a compiled program, whose operators have no
# argument for it: a graph's signature may not depend on how it will be launched.
_FOR_GRAPH = contextvars.ContextVar("for_graph", default=False)
_REHEARSAL = contextvars.ContextVar("rehearsal", default=False)
_ALONE = contextvars.ContextVar("alone", default=False)


def capturing() -> bool:
    """True while a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def for_graph() -> Iterator[None]:
    """What runs here is captured, or warms up what will be: many small launches cost nothing when it is replayed."""
    token = _FOR_GRAPH.set(True)
    try:
        yield
    finally:
        _FOR_GRAPH.reset(token)


def is_for_graph() -> bool:
    """Whether this is inside ``for_graph``."""
    return _FOR_GRAPH.get()


@contextmanager
def rehearsal(*, alone: bool = False) -> Iterator[None]:
    """What runs here is run for its kernels alone, so that they are compiled, gated and loaded: nobody reads the
    results, and of layers that run the same code one is enough.

    Args:
        alone: other ranks do not run it too, so that collectives give zeros and meet nobody.
    """
    tokens = _REHEARSAL.set(True), _ALONE.set(alone)
    try:
        yield
    finally:
        _REHEARSAL.reset(tokens[0])
        _ALONE.reset(tokens[1])


def is_rehearsal() -> bool:
    """Whether this is inside ``rehearsal``."""
    return _REHEARSAL.get()


def is_alone() -> bool:
    """Whether this is inside ``rehearsal(alone=True)``."""
    return _ALONE.get()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """torch.cuda.graph without garbage collection: graphs that it freed in the middle would spoil the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if was_enabled:
            gc.enable()


def graph_seconds(launches: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median seconds of one launch, from replays of one CUDA graph that holds all of them.

    Args:
        launches: the same work over rotated buffers, together larger than the L2 cache.
        repeats: how often the graph is replayed.
    """
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(launches))
    return sorted(times)[len(times) // 2]
