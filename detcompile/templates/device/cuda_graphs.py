"""CUDA graphs: capture without garbage collection, capture state, and launch times measured by replay."""

import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from detcompile.gc_pause import without_collections

# Context variables, because a compiled program is called between the capture and the templates that read them, and its
# operators must have no arguments for how they are launched.
_FOR_GRAPH = contextvars.ContextVar("for_graph", default=False)
_WARMUP = contextvars.ContextVar("warmup", default=False)
_ALONE = contextvars.ContextVar("alone", default=False)
_CONSTANTS: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("constants", default=frozenset())


def capturing() -> bool:
    """True while a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def for_graph() -> Iterator[None]:
    """Mark launches that are captured or warm up a capture: many small launches cost nothing on replay."""
    token = _FOR_GRAPH.set(True)
    try:
        yield
    finally:
        _FOR_GRAPH.reset(token)


def is_for_graph() -> bool:
    """Return True inside ``for_graph``."""
    return _FOR_GRAPH.get()


@contextmanager
def constants(weights: Iterable[object]) -> Iterator[None]:
    """Mark tensors that no kernel launched inside the block writes.

    This has an effect only inside ``for_graph``: a CUDA graph starts after all earlier work in the stream has ended.
    """
    storages = set()
    if is_for_graph():
        storages = {_storage(weight) for weight in weights if isinstance(weight, Tensor)}
    token = _CONSTANTS.set(frozenset(storages))
    try:
        yield
    finally:
        _CONSTANTS.reset(token)


def is_constant(tensor: Tensor) -> bool:
    """Return True if a kernel launched now may read the tensor before earlier kernels have ended."""
    known = _CONSTANTS.get()
    return bool(known) and _storage(tensor) in known


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def warmup(*, alone: bool = False) -> Iterator[None]:
    """Mark a run that only compiles, gates and loads kernels.

    Its results are not used. Of layers that run the same code, it needs to run only one.

    Args:
        alone: other ranks do not take part, so collectives return zeros without communicating.
    """
    tokens = _WARMUP.set(True), _ALONE.set(alone)
    try:
        yield
    finally:
        _WARMUP.reset(tokens[0])
        _ALONE.reset(tokens[1])


def is_warmup() -> bool:
    """Return True inside ``warmup``."""
    return _WARMUP.get()


def is_alone() -> bool:
    """Return True inside ``warmup(alone=True)``."""
    return _ALONE.get()


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which graphs of a device are warmed up and captured.

    One stream serves all captures, because the allocator keeps freed memory for the stream that freed it. The default
    stream of torch.cuda.graph belongs to the GPU of the process's first capture.
    """
    return torch.cuda.Stream(device)


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture like torch.cuda.graph, with garbage collection off: freeing a graph would invalidate the capture."""
    stream = capture_stream(torch.cuda.current_device())
    with without_collections(), torch.cuda.graph(graph, pool=pool, stream=stream):
        yield


def graph_seconds(launches: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of one launch, from replays of one CUDA graph that holds all launches.

    Args:
        launches: the same work over rotating buffers, together larger than the L2 cache.
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
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(launches))
    return sorted(times)[len(times) // 2]
