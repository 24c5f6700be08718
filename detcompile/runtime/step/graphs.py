"""CUDA graphs of steps: captured once, replayed over buffers at fixed addresses."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from detcompile.runtime.step.layout import StepBuffers
from detcompile.templates.device.cuda_graphs import capture, for_graph, warmup
from detcompile.torch_internals.native import storage_at

__all__ = ["Graph", "unowned"]


class Graph:
    """Captured forwards over buffers at fixed addresses.

    The outputs are kept by address only, so that graphs captured later may reuse their memory.
    """

    def __init__(self, forward: Callable[[], Any], buffers: StepBuffers, memory_pool: Any) -> None:
        self.buffers = buffers
        warmup_stream = _warmup_stream(torch.cuda.current_device())
        warmup_stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        with for_graph():
            with torch.cuda.stream(warmup_stream), warmup():
                forward()
            torch.cuda.current_stream().wait_stream(warmup_stream)
            with capture(self.graph, pool=memory_pool):
                output = forward()
            self.output = unowned(output)

    def replay(self) -> Any:
        """Return the forwards' output, which the next replay of any graph of the memory pool overwrites."""
        self.graph.replay()
        return self.output


def unowned(value: Any) -> Any:
    """Return tensors over the same memory, in nested tuples, that do not keep the memory from being reused."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        view = storage_at(storage.data_ptr(), value.device, storage.nbytes())
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(view, *place)
    return tuple(map(unowned, value)) if isinstance(value, tuple) else value


@functools.cache
def _warmup_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all captures: the allocator keeps freed memory for the stream that freed it."""
    return torch.cuda.Stream(device)
