"""Measure what an engine needs of a GPU beside its weights and KV cache: the largest step and the CUDA graphs.

Steps run over a cache of a few blocks, because what they allocate does not depend on its size. Every kernel has been
checked and loaded before the measurement.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from detcompile.errors import InvalidInput
from detcompile.runtime.device_memory import StepMemory, gpu_memory
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.kv_cache import KVCache
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from detcompile.runtime.step.layout import StepBuffers, StepLayout, first_layouts
from detcompile.runtime.step.runner import Runner
from detcompile.runtime.step.worker import PromptRows, StepWork, Worker, idle_arrays
from detcompile.step import ModelFacts
from detcompile.templates.device.cuda_graphs import warmup

STATE_SHARE = 2  # recurrent states may take 1 / STATE_SHARE of the remaining memory
PARTS = (8, 5, 3)  # eighths of the rows: the allocator may keep blocks that fit only one size of step
NUM_LOGPROBS = 20  # per token
NUM_SAMPLED_GRAPHS = 4  # besides those of the largest size
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=NUM_LOGPROBS, logit_bias={0: 1.0}, seed=0)
PENALIZED = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=NUM_LOGPROBS,
    logit_bias={0: 1.0},
    seed=0,
)


class StepNeeds(NamedTuple):
    """Bytes of GPU memory that steps need beside weights, caches and graphs."""

    counts: int  # the sampler's penalty counts, allocated from the start
    block: int  # needed by the largest step if the allocator keeps nothing
    most: int  # needed by steps of other sizes if the allocator keeps one such block

    @property
    def total(self) -> int:
        """Bytes to leave free, with a margin for orders of steps that were not tried."""
        return self.counts + self.most + self.most // 8


def step_needs(
    runner: Runner,
    new_sampler: Callable[[], Sampler],
    *,
    num_tokens: int,
    num_sequences: int,
    num_drafts: int,
    num_prompt_tokens: int,
    width: int,
) -> StepNeeds:
    """Measure the largest step, with all sampling features in use.

    Args:
        runner: a runner without CUDA graphs.
        new_sampler: makes a sampler like the engine's.
        num_tokens: tokens of the largest step.
        num_sequences: sequences of the largest step.
        num_drafts: most rows of draft trees, besides one row per sequence.
        num_prompt_tokens: most prompt tokens whose logprobs are wanted.
        width: blocks of the widest table.
    """
    rows = num_sequences, num_drafts, num_prompt_tokens
    steps = [_busiest(runner, num_tokens, width, *(-(-part * most // PARTS[0]) for most in rows)) for part in PARTS]
    with warmup():
        _peak(runner, new_sampler(), steps[:1])  # loads kernels, whose memory is not the step's
    before = gpu_memory(runner.kv_cache.device).reserved
    sampler = new_sampler()
    counts = gpu_memory(runner.kv_cache.device).reserved - before
    block = _peak(runner, sampler, steps[:1])
    return StepNeeds(counts, block, max(block, _peak(runner, sampler, steps, block)))


def _peak(runner: Runner, sampler: Sampler, steps: list[StepWork], block: int = 0) -> int:
    """Return the peak of reserved bytes over these steps, if the allocator keeps a block of ``block`` bytes before."""
    device = runner.kv_cache.device
    before = gpu_memory(device).reserved
    if block:
        StepMemory(device, block, block).refill()
    torch.cuda.reset_peak_memory_stats(device)
    worker = Worker(runner, sampler)
    for work in steps:
        worker.collect(worker.launch(work))
        for row in work.rows:
            sampler.forget(row.key)
    return torch.cuda.max_memory_reserved(device) - before


class GraphNeeds(NamedTuple):
    """Bytes of GPU memory that CUDA graphs need."""

    first: int = 0  # graphs captured before serving, and the shared pool
    later: int = 0  # graphs captured while serving


def graph_needs(worker: Worker, layouts: list[tuple[int, int, int]]) -> GraphNeeds:
    """Estimate the memory of the CUDA graphs of ``layouts``: their pool, their inputs, and the driver's share.

    Captures some of them: all of the largest bucket, which give the pool its full size, and some of every other size.

    Args:
        worker: a worker whose runner has captured nothing yet.
        layouts: tokens, sequences and table width of each graph, from ``graph_layouts``.
    """
    if not layouts:
        return GraphNeeds()
    device, num_groups = worker.runner.kv_cache.device, len(worker.runner.kv_cache.groups)
    largest = [layout for layout in layouts if layout[:2] == layouts[0][:2]]
    others = layouts[len(largest) :]
    sampled = largest + others[:: max(1, len(others) // NUM_SAMPLED_GRAPHS)]
    before = gpu_memory(device)
    for layout in sampled:
        worker.capture(*layout)
    after = gpu_memory(device)
    each = max(0, after.outside - before.outside) / len(sampled)

    def bytes_of(some: list[tuple[int, int, int]]) -> int:
        shapes = [StepLayout(tokens, sequences, sequences, width, num_groups) for tokens, sequences, width in some]
        inputs = sum(len(StepBuffers((shape,), torch.device("meta")).bytes) for shape in shapes)
        return int(each * len(some)) + inputs

    first = first_layouts(layouts)
    later = [layout for layout in layouts if layout not in first]
    return GraphNeeds(max(0, after.reserved - before.reserved) + bytes_of(first), bytes_of(later))


class Room(NamedTuple):
    """Memory budget of a device, in bytes."""

    cache: int  # for the KV cache and the states
    step: StepNeeds | None = None  # left free for steps; None if not measured
    graphs: GraphNeeds = GraphNeeds()


def affordable_states(facts: ModelFacts, config: EngineConfig, room: Room) -> int:
    """Return how many sequences' states fit in their share of the memory, at most max_num_seqs.

    Raises:
        InvalidInput: not even one state fits.
    """
    if not facts.state_shapes:
        return 0
    per_state = KVCache.bytes_per_state(facts.state_shapes, facts.dtype)
    share = room.cache // STATE_SHARE
    if share < per_state:
        raise InvalidInput(
            f"memory_fraction={config.memory_fraction} leaves {max(0, share) / 2**30:.2f} GiB for recurrent states of"
            f" {per_state / 2**20:.1f} MiB per sequence: raise it, or lower max_num_batched_tokens"
        )
    return min(config.max_num_seqs, share // per_state)


def _busiest(
    runner: Runner, num_tokens: int, width: int, num_sequences: int, num_drafts: int, num_prompt_tokens: int
) -> StepWork:
    """Return a step whose rows use every sampling feature, with as many rows of each kind as its tokens allow."""
    decodes = min(num_sequences, num_tokens)
    drafts = min(num_drafts, num_tokens - decodes)
    prompt = min(num_prompt_tokens, num_tokens - decodes - drafts)
    arrays = idle_arrays(num_tokens, decodes, len(runner.kv_cache.groups), width)
    rows = [SampleRow(PENALIZED, 1, key=index, token_ids=(0,)) for index in range(decodes)]
    rows += [SampleRow(FILTERED, 1, key=decodes + index) for index in range(drafts)]
    prompts = (PromptRows(len(rows), (0,) * prompt, NUM_LOGPROBS),) if prompt else ()
    return StepWork(arrays._replace(logits_to_keep=np.arange(len(rows) + prompt)), tuple(rows), prompts)
