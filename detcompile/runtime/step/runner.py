"""Runner: one forward step on one device. Uploads arrays, and replays CUDA graphs for recurring shapes.

Legend: G KV groups, T tokens of a step, S sequences, R rows of logits, V vocabulary size, H hidden size, W width of
the block tables.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.adapters import AdaptedForward, Adapter
from detcompile.runtime.kv.kv_cache import KVCache
from detcompile.runtime.sampling.filters import likeliest
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays
from detcompile.runtime.step.layout import (
    MIXED_BUCKETS,
    TOKEN_BUCKETS,
    StepBuffer,
    StepBuffers,
    StepLayout,
    host_tensors,
)
from detcompile.runtime.step.stage_forward import StageForward
from detcompile.step import NO_SLOT, StepInputs
from detcompile.templates.device.cuda_graphs import capture, capture_stream, for_graph, warmup
from detcompile.templates.recorded_calls import RecordedCalls, record
from detcompile.templates.tokens.next_tokens_gpu import fill_pending_cuda
from detcompile.torch_internals.native import storage_at

MOST_SEQUENCES = 4096  # per step
CAPTURE_AFTER = 16  # steps of a layout that replay a graph with wider tables before its exact graph is captured
NUM_STAGING = 3  # staging buffers: one is written while copies from the others may still run
MOST_RECORDED_TOKENS = 16  # of a step on the host; in larger steps the time between kernels does not matter
MOST_RECORDED_BYTES = 1 << 26  # of the results of all recorded steps
MOST_VIEWS = 256  # cached views of staging memory by layout; steps without a graph have unboundedly many layouts

Forward = Callable[[Tensor, Tensor, StepInputs, Tensor], Any]


class Graph:
    """Captured forwards over buffers at fixed addresses.

    The outputs are kept by address only, so that graphs captured later may reuse their memory.
    """

    def __init__(self, forward: Callable[[], Any], buffers: StepBuffers, memory_pool: Any) -> None:
        self.buffers = buffers
        stream = capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        with for_graph():
            with torch.cuda.stream(stream), warmup():
                forward()
            torch.cuda.current_stream().wait_stream(stream)
            with capture(self.graph, pool=memory_pool):
                output = forward()
            self.output = unowned(output)

    def replay(self) -> Any:
        """Return the forwards' output, which the next replay of any graph of the memory pool overwrites."""
        self.graph.replay()
        return self.output


class Runner:
    """Runs steps of ``forward`` over one KV cache.

    With ``cuda_graphs``, a step is padded to a bucket and replayed from a graph. Steps of one token per sequence are
    captured the first time a bucket occurs, mixed steps of up to 512 tokens the second time, larger steps never. A
    graph also serves narrower tables; after CAPTURE_AFTER such steps a faster, narrower graph is captured. Padding
    takes no part in the arithmetic of live rows, so the bits are always the same.

    Args:
        forward: (input_ids [1, T], position_ids [1, T], StepInputs, logits_to_keep [R]) -> logits [R, V], or a pair of
            logits and the hidden states [R, H] that they were computed from. The runner exchanges a StageForward's
            rows with the other stages.
        cuda_graphs: needs a cache on a CUDA device.

    Attributes:
        states: hidden states of the last launch, valid until the next one; None if the forward returns none.
        drawn: [R, 2] int64, ``likeliest`` of the last launch's logits, valid until the next one; ``sampled`` then has
            the same tokens. None if no graph was replayed, or there are no logits.
        gives_logits: True if the forward returns logits; otherwise ``launch`` returns [0, 0].
        replayed: True if the last launch replayed a graph, or repeated recorded calls on the host.
        adapter: the adapter of the next launches; None for the plain model.

    Raises:
        InvalidInput: CUDA graphs without a CUDA device.
    """

    is_lost = False  # it runs in the caller's process

    def __init__(self, forward: Forward, kv_cache: KVCache, cuda_graphs: bool) -> None:
        if cuda_graphs and kv_cache.device.type != "cuda":
            raise InvalidInput(f"CUDA graphs need a GPU, but the KV cache is on {kv_cache.device}: turn them off")
        self.forward = forward
        self._stage = forward if isinstance(forward, StageForward) else None
        self._slots = forward.slots if isinstance(forward, AdaptedForward) else None
        self.adapter: Adapter | None = None
        self.gives_logits = self._stage is None or self._stage.gives_logits
        self.kv_cache = kv_cache
        self.cuda_graphs = cuda_graphs
        self._on_host = kv_cache.device.type == "cpu"
        self.states: Tensor | None = None
        self.drawn: Tensor | None = None
        self.replayed = False
        self.sampled = torch.zeros(MOST_SEQUENCES, dtype=torch.int64, device=kv_cache.device)
        self._graphs: dict[StepLayout, Graph] = {}
        self._widest = 0  # widest table among the graphs
        self._chains: dict[tuple[StepLayout, ...], Graph] = {}
        self._missed: Counter[StepLayout] = Counter()  # steps without a graph of exactly their layout
        self._refused: set[StepLayout] = set()
        self._memory_pool = torch.cuda.graph_pool_handle() if cuda_graphs else None
        self._staging: list[_Staging] = []
        self._recorded: dict[StepLayout, _RecordedStep] = {}

    @property
    def num_graphs(self) -> int:
        """Number of captured CUDA graphs."""
        return len(self._graphs) + len(self._chains)

    def fill_caches(self, value: float) -> None:
        """Fill every slot of the KV cache and every state with ``value``."""
        for cache in (*self.kv_cache.k_caches, *self.kv_cache.v_caches, *self.kv_cache.states):
            cache.fill_(value)

    def run(self, arrays: StepArrays) -> Tensor:
        """Write the step's keys and values into the cache. Return logits [R, V] of the tokens ``logits_to_keep``."""
        logits = self.launch(arrays)
        return logits.clone() if self.cuda_graphs or self.replayed else logits

    def launch(self, arrays: StepArrays) -> Tensor:
        """Run a step like ``run``, without waiting for the device; the logits are valid until the next launch.

        Pending tokens come from the previous launch, by row of its logits: the tokens given to ``keep`` after it, or
        the most likely tokens if a graph was replayed.
        """
        if self._slots is None:
            return self._launch(arrays)
        with self._slots.active(self.adapter):
            return self._launch(arrays)

    def _launch(self, arrays: StepArrays) -> Tensor:
        if self._stage is not None:
            self._stage.receive(self.layout(arrays).tokens, self.kv_cache.device)
        output, drawn = (self._launch_on_host(arrays), None) if self._on_host else self._launch_on_gpu(arrays)
        if self._stage is not None:
            self._stage.send(output)
        if not self.gives_logits:
            output = output.new_empty(0, 0)
        logits, states = output if isinstance(output, tuple) else (output, None)
        num_rows = len(arrays.logits_to_keep)
        self.states = None if states is None else states[:num_rows]
        self.drawn = None if drawn is None else drawn[:num_rows]
        return logits[:num_rows]

    def warm_up(self, arrays: StepArrays, *, as_graph: bool) -> None:
        """Run a step only to build its kernels, as a capture or a step without a graph would launch them.

        Other ranks and stages take no part.
        """
        buffers = self._buffers(StepLayout.of(arrays))
        self._start_upload((arrays,), buffers).record()
        if self._stage is not None:
            self._stage.receive(len(arrays.input_ids), self.kv_cache.device)
        with warmup(alone=True), for_graph() if as_graph else contextlib.nullcontext():
            self._drawing(buffers.steps[0].tensors())

    def capture(self, arrays: StepArrays) -> None:
        """Capture the graph of a step's layout, unless there is one, and replay it."""
        self._missed[self.layout(arrays)] = CAPTURE_AFTER
        self.launch(arrays)

    def keep(self, drawn: Tensor) -> None:
        """Store the tokens of ``drawn`` [R, 2] int64 where the next step reads pending tokens."""
        self.sampled[: len(drawn)].copy_(drawn[:, 1])

    def launch_chain(self, steps: SequenceOf[StepArrays]) -> Tensor:
        """Launch steps that each read, as pending tokens, the most likely tokens of the step before.

        With CUDA graphs the chain is one graph; every chain of new layouts is captured. Nothing waits for the device.

        Args:
            steps: steps with the same number of rows of logits; the first has no pending tokens.

        Returns:
            [len(steps), R, 2] int64, the results of ``likeliest``, followed by padding; valid until the next launch.
        """
        if not self.cuda_graphs:
            return torch.stack([self._draw(self.launch(arrays)) for arrays in steps])
        layouts = tuple(self.layout(arrays) for arrays in steps)
        graph = self._chains.get(layouts)
        if graph is None:
            torch.cuda.empty_cache()
            buffers = self._buffers(*layouts)
            self._start_upload([_without_states(arrays) for arrays in steps], buffers).record()
            graph = self._chains[layouts] = Graph(lambda: self._chain(buffers), buffers, self._memory_pool)
        uploaded = self._start_upload(steps, graph.buffers)
        output: Tensor = graph.replay()
        uploaded.record()
        return output

    def layout(self, arrays: StepArrays) -> StepLayout:
        """Return the layout in which a step runs on a GPU, padded if there are graphs."""
        exact = StepLayout.of(arrays)
        return exact.padded(self.kv_cache.block_size) if self.cuda_graphs else exact

    @torch.no_grad()
    def _launch_on_host(self, arrays: StepArrays) -> Any:
        """Run a step, from recorded calls if it has few tokens and its layout was seen before."""
        self.replayed = False
        layout = StepLayout.of(arrays)
        is_plain = layout.tokens == layout.sequences == layout.rows and layout.copies == 1
        if not is_plain or layout.tokens > MOST_RECORDED_TOKENS or self._stage is not None or self.kv_cache.states:
            return self._forward(host_tensors(arrays))
        layout = layout._replace(blocks=layout.padded(self.kv_cache.block_size).blocks)
        self._missed[layout] += 1
        if layout in self._refused or self._missed[layout] == 1:
            return self._forward(host_tensors(arrays))
        recorded = self._recorded.pop(layout, None) or _RecordedStep(layout)
        output = recorded.run(self, arrays)
        if recorded.calls is None:
            self._refused.add(layout)
            return output
        self.replayed = True
        self._recorded[layout] = recorded  # the latest comes last
        while sum(kept.calls.num_bytes for kept in self._recorded.values() if kept.calls) > MOST_RECORDED_BYTES:
            self._recorded.pop(next(iter(self._recorded)))
        return output

    def _launch_on_gpu(self, arrays: StepArrays) -> tuple[Any, Tensor | None]:
        layout = self.layout(arrays)
        graph = self._graphs.get(layout)
        if graph is None:
            graph = self._wider(layout)
            if self._worth_a_graph(layout, graph is not None):
                self._refused.add(layout)  # do not retry a capture that runs out of memory
                graph = self._graphs[layout] = self._capture(arrays, layout)
                self._refused.remove(layout)
                self._widest = max(self._widest, layout.blocks)
        buffers = self._buffers(layout) if graph is None else graph.buffers
        uploaded = self._start_upload((arrays,), buffers)
        self.replayed = graph is not None
        output, drawn = (self._forward(buffers.steps[0].tensors()), None) if graph is None else graph.replay()
        uploaded.record()  # after the step, so that the device can begin it first
        return output, drawn

    def _wider(self, layout: StepLayout) -> Graph | None:
        """Return the graph with the narrowest tables that are wider than the layout's; all else equal."""
        graph, width = None, 2 * layout.blocks
        while graph is None and width <= self._widest:
            graph = self._graphs.get(layout._replace(blocks=width))
            width *= 2
        return graph

    def _worth_a_graph(self, layout: StepLayout, is_served: bool) -> bool:
        """Decide whether to capture a graph for this layout now.

        Args:
            is_served: True if a graph with wider tables can run the step.
        """
        is_plain = layout.tokens == layout.sequences == layout.rows
        most = TOKEN_BUCKETS[-1] if is_plain else MIXED_BUCKETS[-1]
        if not self.cuda_graphs or layout.tokens > most or layout in self._refused:
            return False
        self._missed[layout] += 1
        return self._missed[layout] >= (CAPTURE_AFTER if is_served else 1 if is_plain else 2)

    def _capture(self, arrays: StepArrays, layout: StepLayout) -> Graph:
        """Capture a graph. The step itself runs during capture and writes what its replay will write again.

        Recurrent states are left alone, because they would advance twice, and so are the last step's drawn tokens.
        """
        torch.cuda.empty_cache()  # the buffers stay, and the warmup allocates on its own stream
        buffers = self._buffers(layout)
        self._start_upload([_without_states(arrays)], buffers).record()
        drawn_before = self.sampled.clone()
        graph = Graph(lambda: self._drawing(buffers.steps[0].tensors()), buffers, self._memory_pool)
        self.sampled.copy_(drawn_before)
        return graph

    def _buffers(self, *layouts: StepLayout) -> StepBuffers:
        return StepBuffers(layouts, self.kv_cache.device)

    def _chain(self, buffers: StepBuffers) -> Tensor:
        drawn = [self._drawing(buffer.tensors())[1] for buffer in buffers.steps]
        rows = min(map(len, drawn))
        return torch.stack([part[:rows] for part in drawn])

    def _drawing(self, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
        """Return the forward's output, and ``likeliest`` of its logits if it has any."""
        output = self._forward(tensors)
        if not self.gives_logits:
            return output, None
        return output, self._draw(output[0] if isinstance(output, tuple) else output)

    def _draw(self, logits: Tensor) -> Tensor:
        return likeliest(logits, sampled=self.sampled)

    @torch.no_grad()
    def _forward(self, t: dict[str, Tensor]) -> Any:
        """Run the forward on a step's arrays, given by name."""
        if t["block_copies"].shape[1]:
            self.kv_cache.copy_blocks(t["block_copies"])
        return self.forward(*self.arguments(t, self.fill_pending(t["input_ids"], t["pending"])))

    def arguments(self, t: dict[str, Tensor], input_ids: Tensor) -> tuple[Any, ...]:
        """Return the forward's arguments for a step's arrays, given by name."""
        step = StepInputs(
            slot_mappings=t["slot_mappings"].flatten(1).unbind(),
            cu_seqlens=t["cu_seqlens"],
            seq_lens=t["seq_lens"],
            block_tables=t["block_tables"].unbind(),
            k_caches=self.kv_cache.k_caches,
            v_caches=self.kv_cache.v_caches,
            state_slots=t["state_slots"],
            states=self.kv_cache.states,
        )
        return input_ids[None], t["position_ids"][None], step, t["logits_to_keep"]

    def fill_pending(self, input_ids: Tensor, pending: Tensor) -> Tensor:
        """Return input ids [T] with pending tokens filled in from the previous step."""
        if input_ids.is_cuda:
            return fill_pending_cuda(input_ids, pending, self.sampled)
        if (pending.numpy() == NOT_PENDING).all():
            return input_ids
        return torch.where(pending == NOT_PENDING, input_ids, self.sampled[pending.clamp_min(0)])

    def _start_upload(self, steps: SequenceOf[StepArrays], buffers: StepBuffers) -> torch.cuda.Event:
        """Start an upload. Return an event to record after the copy (or later), before the next upload."""
        staging = self._staging.pop(0) if len(self._staging) == NUM_STAGING else _Staging()
        self._staging.append(staging)
        return staging.upload(steps, buffers)


def unowned(value: Any) -> Any:
    """Return tensors over the same memory, in nested tuples, that do not keep the memory from being reused."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        view = storage_at(storage.data_ptr(), value.device, storage.nbytes())
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(view, *place)
    return tuple(map(unowned, value)) if isinstance(value, tuple) else value


class _RecordedStep:
    """A step of one token per sequence on the host, as recorded calls over arrays at fixed addresses.

    Attributes:
        calls: None before the first step, and if the forward's calls cannot be recorded.
    """

    def __init__(self, layout: StepLayout) -> None:
        self.calls: RecordedCalls | None = None
        self._buffer = StepBuffer(layout, torch.device("cpu"))
        self._tensors = self._buffer.tensors()
        self._filled: StepArrays | None = None  # what the buffer holds

    def run(self, runner: Runner, arrays: StepArrays) -> Any:
        """Run a step. Its output is valid until the next step."""
        t = self._tensors
        self._buffer.fill(arrays, self._filled)
        self._filled = arrays
        input_ids = runner.fill_pending(t["input_ids"], t["pending"])
        if input_ids is not t["input_ids"]:
            t["input_ids"].copy_(input_ids)
            self._filled = None
        if self.calls is not None and self.calls.repeat():
            return self.calls.output
        output, self.calls = record(functools.partial(runner.forward, *runner.arguments(t, t["input_ids"])))
        return output


class _Staging:
    """Pinned memory from which steps' arrays are copied to the device."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._read = torch.cuda.Event()
        self._filled: tuple[StepBuffers, SequenceOf[StepArrays]] | None = None  # the last upload

    def upload(self, steps: SequenceOf[StepArrays], buffers: StepBuffers) -> torch.cuda.Event:
        """Start a copy once the previous one has read this memory: the device may be several steps behind.

        Returns:
            The event that the next upload from here waits for; record it after the copy or after the whole step.
        """
        self._read.synchronize()
        size = len(buffers.bytes)
        if len(self._memory) < size:
            self._memory = torch.empty(2 * size, dtype=torch.uint8, device="cpu", pin_memory=True)
            views = functools.partial(StepBuffers, device=torch.device("cpu"), memory=self._memory)
            self._host = functools.lru_cache(maxsize=MOST_VIEWS)(views)
            self._filled = None
        host = self._host(buffers.layouts)
        filled, self._filled = self._filled, None
        host.fill(steps, filled[1] if filled is not None and filled[0] is host else None)
        self._filled = host, tuple(steps)
        buffers.bytes.copy_(host.bytes, non_blocking=True)
        return self._read


def _without_states(arrays: StepArrays) -> StepArrays:
    return arrays._replace(state_slots=np.full_like(arrays.state_slots, NO_SLOT))
