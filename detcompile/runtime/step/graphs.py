"""CUDA graphs of steps: captured once, replayed over buffers whose addresses never change."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from detcompile.runtime.step.layout import StepBuffers
from detcompile.templates.device.cuda_graphs import capture, for_graph, rehearsal

__all__ = ["Graph", "unowned"]


class Graph:
    """Captured forwards over buffers whose addresses never change.

    What they give is kept by address alone, so that the graphs captured after it may write theirs to the same memory.
    """

    def __init__(self, forward: Callable[[], Any], buffers: StepBuffers, memory_pool: Any) -> None:
        self.buffers = buffers
        warmup_stream = _warmup_stream(torch.cuda.current_device())
        warmup_stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        with for_graph():
            with torch.cuda.stream(warmup_stream), rehearsal():
                forward()
            torch.cuda.current_stream().wait_stream(warmup_stream)
            with capture(self.graph, pool=memory_pool):
                found = forward()
            self.found = unowned(found)

    def replay(self) -> Any:
        """What the forwards give for the layouts, overwritten by the next replay of any graph of the memory pool."""
        self.graph.replay()
        return self.found


def unowned(value: Any) -> Any:
    """The tensors of a nest of tuples over the same memory, which they do not keep from being used again."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        found = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), value.device, storage.nbytes())
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(found, *place)
    return tuple(map(unowned, value)) if isinstance(value, tuple) else value


@functools.cache
def _warmup_stream(device: int) -> torch.cuda.Stream:
    """One for all captures, since the allocator keeps what was freed for the stream that it was freed on."""
    return torch.cuda.Stream(device)
