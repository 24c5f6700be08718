"""One forward step on one device: arrays to the device, and CUDA graphs for the steps whose shapes come back.

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
from detcompile.runtime.kv.kv_cache import KVCache
from detcompile.runtime.sampling.likeliest import likeliest
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays
from detcompile.runtime.step.graphs import Graph
from detcompile.runtime.step.layout import MIXED_BUCKETS, TOKEN_BUCKETS, StepBuffers, StepLayout, host_tensors
from detcompile.runtime.step.stage_forward import StageForward
from detcompile.step import NO_SLOT, StepInputs
from detcompile.templates.device.cuda_graphs import for_graph, rehearsal
from detcompile.templates.tokens.next_tokens_gpu import fill_pending_cuda

__all__ = ["Forward", "MOST_SEQUENCES", "Runner"]

MOST_SEQUENCES = 4096  # of a step
OFTEN = 16  # steps in a graph whose tables are wider than theirs, before they get one of their own
NUM_STAGING = 3  # one being written while the copies of those before may still run
MOST_VIEWS = 256  # of staging memory, by layout: those of steps without a graph never end

Forward = Callable[[Tensor, Tensor, StepInputs, Tensor], Any]


class Runner:
    """Runs steps of ``forward`` over one KV cache.

    With ``cuda_graphs``, a step is padded to a bucket and replayed from a graph: steps of one token a sequence at
    first sight of a bucket, mixed steps of up to 512 tokens at second sight, larger ones never. A graph also serves
    shorter tables than its own, until OFTEN steps had them: then a narrower one is captured, which is faster. Padding
    takes part in no live row's arithmetic, so all give the same bits.

    Args:
        forward: (input_ids [1, T], position_ids [1, T], StepInputs, logits_to_keep [R]) -> logits [R, V], or a pair of
            them and the states [R, H] that they were made of. A StageForward's rows are exchanged with other stages
            around it.
        cuda_graphs: needs a cache on a CUDA device.

    Attributes:
        states: states of the last launch, good until the next one; None if the forward gives none.
        drawn: [R, 2] int64, what ``likeliest`` gives for the logits of the last ``launch``, good until the next one;
            ``sampled`` has these tokens then. None if no graph was replayed, or it gives no logits.
        gives_logits: whether it does; otherwise ``launch`` gives [0, 0].
        replayed: whether the last launch was a graph.

    Raises:
        InvalidInput: CUDA graphs without a CUDA device.
    """

    is_lost = False  # it runs in the caller's process

    def __init__(self, forward: Forward, kv_cache: KVCache, cuda_graphs: bool) -> None:
        if cuda_graphs and kv_cache.device.type != "cuda":
            raise InvalidInput(f"CUDA graphs need a GPU, the KV cache is on {kv_cache.device}: turn them off")
        self.forward = forward
        self._stage = forward if isinstance(forward, StageForward) else None
        self.gives_logits = self._stage is None or self._stage.gives_logits
        self.kv_cache = kv_cache
        self.cuda_graphs = cuda_graphs
        self._on_host = kv_cache.device.type == "cpu"
        self.states: Tensor | None = None
        self.drawn: Tensor | None = None
        self.replayed = False
        self.sampled = torch.zeros(MOST_SEQUENCES, dtype=torch.int64, device=kv_cache.device)
        self._graphs: dict[StepLayout, Graph] = {}
        self._widest = 0  # table among them
        self._chains: dict[tuple[StepLayout, ...], Graph] = {}
        self._missed: Counter[StepLayout] = Counter()  # steps that had no graph of their own
        self._refused: set[StepLayout] = set()
        self._memory_pool = torch.cuda.graph_pool_handle() if cuda_graphs else None
        self._staging: list[_Staging] = []

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that were captured."""
        return len(self._graphs) + len(self._chains)

    def fill_caches(self, value: float) -> None:
        """Write ``value`` into every slot of the KV cache, written before or not, and into every state."""
        for cache in (*self.kv_cache.k_caches, *self.kv_cache.v_caches, *self.kv_cache.states):
            cache.fill_(value)

    def run(self, arrays: StepArrays) -> Tensor:
        """Write the step's keys and values into the cache; return logits [R, V] of the tokens ``logits_to_keep``."""
        logits = self.launch(arrays)
        return logits.clone() if self.cuda_graphs else logits

    def launch(self, arrays: StepArrays) -> Tensor:
        """Run a step as ``run`` does, without waiting for the device; the logits are good until the next launch.

        Pending tokens are those of the launch before, by row of its logits: what ``keep`` was given after it, or else,
        if a graph was replayed, the likeliest.
        """
        if self._stage is not None:
            self._stage.receive(self.layout(arrays).tokens, self.kv_cache.device)
        found, drawn = (self._forward(host_tensors(arrays)), None) if self._on_host else self._launch_on_gpu(arrays)
        if self._stage is not None:
            self._stage.send(found)
        if not self.gives_logits:
            found = found.new_empty(0, 0)
        logits, states = found if isinstance(found, tuple) else (found, None)
        num_rows = len(arrays.logits_to_keep)
        self.states = None if states is None else states[:num_rows]
        self.drawn = None if drawn is None else drawn[:num_rows]
        return logits[:num_rows]

    def rehearse(self, arrays: StepArrays, *, as_graph: bool) -> None:
        """Run a step for its kernels alone, as a capture would launch them or as a step without a graph does.

        Other ranks and stages take no part.
        """
        buffers = self._buffers(StepLayout.of(arrays))
        self._start_upload((arrays,), buffers).record()
        if self._stage is not None:
            self._stage.receive(len(arrays.input_ids), self.kv_cache.device)
        with rehearsal(alone=True), for_graph() if as_graph else contextlib.nullcontext():
            self._drawing(buffers.steps[0].tensors())

    def keep(self, drawn: Tensor) -> None:
        """Put the tokens of ``drawn`` [R, 2] int64 where the next step reads them."""
        self.sampled[: len(drawn)].copy_(drawn[:, 1])

    def launch_chain(self, steps: SequenceOf[StepArrays]) -> Tensor:
        """Launch steps of which each reads, as pending, the likeliest of the one before; with CUDA graphs, in one.

        Every chain of new layouts is captured. Nothing waits for the device.

        Args:
            steps: steps of as many rows of logits each; in the first no token is pending.

        Returns:
            [len(steps), R, 2] int64, what ``likeliest`` gives, and for padding after it; good until the next launch.
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
        found: Tensor = graph.replay()
        uploaded.record()
        return found

    def layout(self, arrays: StepArrays) -> StepLayout:
        """The layout that a step runs in on a GPU, padded for a graph."""
        exact = StepLayout.of(arrays)
        return exact.padded(self.kv_cache.block_size) if self.cuda_graphs else exact

    def _launch_on_gpu(self, arrays: StepArrays) -> tuple[Any, Tensor | None]:
        layout = self.layout(arrays)
        graph = self._graphs.get(layout)
        if graph is None:
            graph = self._wider(layout)
            if self._worth_a_graph(layout, graph is not None):
                self._refused.add(layout)  # a capture that finds no memory is not tried again
                graph = self._graphs[layout] = self._capture(arrays, layout)
                self._refused.remove(layout)
                self._widest = max(self._widest, layout.blocks)
        buffers = self._buffers(layout) if graph is None else graph.buffers
        uploaded = self._start_upload((arrays,), buffers)
        self.replayed = graph is not None
        found, drawn = (self._forward(buffers.steps[0].tensors()), None) if graph is None else graph.replay()
        uploaded.record()  # behind the step, as the device shall begin it first
        return found, drawn

    def _wider(self, layout: StepLayout) -> Graph | None:
        """The graph of the same extents with wider tables, the narrowest of them."""
        graph, width = None, 2 * layout.blocks
        while graph is None and width <= self._widest:
            graph = self._graphs.get(layout._replace(blocks=width))
            width *= 2
        return graph

    def _worth_a_graph(self, layout: StepLayout, is_served: bool) -> bool:
        """Whether a step without a graph of its own is captured now.

        Args:
            is_served: whether a graph of wider tables can run it.
        """
        is_plain = layout.tokens == layout.sequences == layout.rows
        most = TOKEN_BUCKETS[-1] if is_plain else MIXED_BUCKETS[-1]
        if not self.cuda_graphs or layout.tokens > most or layout in self._refused:
            return False
        self._missed[layout] += 1
        return self._missed[layout] >= (OFTEN if is_served else 1 if is_plain else 2)

    def _capture(self, arrays: StepArrays, layout: StepLayout) -> Graph:
        """A graph of this layout; the step runs on the way and writes what its replay will write again.

        States are left as they are, as they would advance twice, and so are the tokens that the step before drew.
        """
        torch.cuda.empty_cache()  # the buffers stay, and the forward's warm-up allocates on a stream of its own
        buffers = self._buffers(layout)
        self._start_upload([_without_states(arrays)], buffers).record()
        drawn_before = self.sampled.clone()
        graph = Graph(lambda: self._drawing(buffers.steps[0].tensors()), buffers, self._memory_pool)
        self.sampled.copy_(drawn_before)
        return graph

    def _buffers(self, *layouts: StepLayout) -> StepBuffers:
        return StepBuffers(layouts, self.kv_cache.device)

    def _chain(self, buffers: StepBuffers) -> Tensor:
        found = [self._drawing(buffer.tensors())[1] for buffer in buffers.steps]
        rows = min(map(len, found))
        return torch.stack([drawn[:rows] for drawn in found])

    def _drawing(self, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
        """What the forward gives, and what is likeliest by it, if it gives logits."""
        found = self._forward(tensors)
        if not self.gives_logits:
            return found, None
        return found, self._draw(found[0] if isinstance(found, tuple) else found)

    def _draw(self, logits: Tensor) -> Tensor:
        return likeliest(logits, sampled=self.sampled)

    @torch.no_grad()
    def _forward(self, t: dict[str, Tensor]) -> Any:
        """The forward of a step whose arrays are these, by their names."""
        if t["block_copies"].shape[1]:
            self.kv_cache.copy_blocks(t["block_copies"])
        input_ids = self._fill_pending(t["input_ids"], t["pending"])
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
        return self.forward(input_ids[None], t["position_ids"][None], step, t["logits_to_keep"])

    def _fill_pending(self, input_ids: Tensor, pending: Tensor) -> Tensor:
        """[T], those that the step before drew in their places."""
        if input_ids.is_cuda:
            return fill_pending_cuda(input_ids, pending, self.sampled)
        if (pending.numpy() == NOT_PENDING).all():
            return input_ids
        return torch.where(pending == NOT_PENDING, input_ids, self.sampled[pending.clamp_min(0)])

    def _start_upload(self, steps: SequenceOf[StepArrays], buffers: StepBuffers) -> torch.cuda.Event:
        """Returns an event that the caller records before the next upload, behind the copy or later."""
        staging = self._staging.pop(0) if len(self._staging) == NUM_STAGING else _Staging()
        self._staging.append(staging)
        return staging.upload(steps, buffers)


class _Staging:
    """Pinned memory that the arrays of steps are copied to the device from."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._read = torch.cuda.Event()
        self._filled: tuple[StepBuffers, SequenceOf[StepArrays]] | None = None  # the last

    def upload(self, steps: SequenceOf[StepArrays], buffers: StepBuffers) -> torch.cuda.Event:
        """Start the copy, once the one before has read this memory: the device may be several steps behind.

        Returns:
            What the next upload from here waits for; the caller records it behind the copy, or behind the whole step.
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
