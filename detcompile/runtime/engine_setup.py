"""Set up an engine over a compiled forward: size the KV cache, and warm up before serving."""

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from detcompile.errors import InvalidInput
from detcompile.gc_pause import without_older_objects
from detcompile.parallel import TensorParallel
from detcompile.progress import shown, stage
from detcompile.runtime.adapters import AdapterSlots
from detcompile.runtime.device_memory import StepMemory, available_memory, gpu_memory
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.kv.kv_cache import KVCache, new_cache
from detcompile.runtime.kv.prefixes import Prefixes
from detcompile.runtime.memory_probe import GraphNeeds, Room, StepNeeds, affordable_states, graph_needs, step_needs
from detcompile.runtime.policies import PROMPT_LOGPROBS_CHUNK
from detcompile.runtime.requests.admission import Admission
from detcompile.runtime.sampling.sampler import Sampler
from detcompile.runtime.speculation.drafter import require_fitting
from detcompile.runtime.speculation.speculator import DRAFT_ROWS, SpeculationConfig
from detcompile.runtime.step.interfaces import StepWorker
from detcompile.runtime.step.layout import graph_layouts
from detcompile.runtime.step.runner import Forward, Runner
from detcompile.runtime.step.warmup import warm_up_kernels, warmup_steps
from detcompile.runtime.step.worker import Worker
from detcompile.step import ModelFacts


class EngineModel(NamedTuple):
    """Facts and functions of a model that an engine needs, wherever its steps run."""

    facts: ModelFacts
    end_tokens: Callable[[], tuple[int, ...]] = tuple  # current end-of-sequence tokens
    weights_version: Callable[..., int] = lambda *, look=False: 0  # LiveWeights.version
    fingerprint: Callable[[], str] = lambda: ""  # of the current weights
    adapters: AdapterSlots | None = None  # None without room for adapters


class Forwards(NamedTuple):
    """Forwards that run a model's steps in this process."""

    plain: Forward
    with_states: Callable[[], Forward] | None = None  # compiles it; None if hidden states are not available


@shown(None)
def new_engine(
    model: EngineModel,
    forwards: Forwards,
    config: EngineConfig,
    tokenizer: Any | None,
    speculation: SpeculationConfig | None = None,
    ranks: TensorParallel | None = None,
) -> Engine:
    """Return an engine with its KV cache, ready to serve.

    Args:
        ranks: the ranks that share the model. All get the same number of blocks, because each schedules on its own.

    Raises:
        InvalidInput: not even one block fits, the block tables do not fit, or the drafter does not match the model.
    """
    require_block_tables(model.facts, config)
    facts, forward = model.facts, _forward(model.facts, forwards, tokenizer, speculation)
    rehearse_steps(facts, forward, config)
    sized = config.num_blocks is None
    room = Room(0)
    if sized or facts.state_shapes:
        room = room_for_cache(facts, forward, config, drafts=speculation is not None)
    num_states = affordable_states(facts, config, room)
    num_blocks = config.num_blocks or affordable_blocks(facts, config, room)
    least = int if ranks is None else ranks.least
    num_blocks = least(num_blocks)
    worker = new_worker(facts, forward, config, num_blocks, num_states, room.step)
    if sized and room.step is not None:
        fitting = least(num_blocks - _blocks_too_many(facts, config, room.step, room.graphs))
        if fitting < num_blocks:  # the graphs took more than estimated
            del worker
            gc.collect()
            num_blocks = _require_some(fitting, facts, config, room)
            worker = new_worker(facts, forward, config, num_blocks, num_states, room.step)
    if worker.memory is not None:
        worker.memory.refill()
    worker.is_alone, worker.head_shares = ranks is None, int(ranks is None)
    return engine_over(worker, num_blocks, model, config, tokenizer, speculation, num_states)


def require_block_tables(facts: ModelFacts, config: EngineConfig) -> None:
    """Raise InvalidInput for a context so long that the block tables of all sequences do not fit the memory."""
    size = 4 * len(facts.kv_groups) * config.max_num_seqs * _longest(facts, config)
    if size > available_memory():
        raise InvalidInput(
            f"block tables of max_num_seqs={config.max_num_seqs} sequences of max_context={facts.max_context} tokens"
            f" take {size / 2**30:.1f} GiB: compile with a smaller max_context, or lower max_num_seqs"
        )


def rehearse_steps(facts: ModelFacts, forward: Forward, config: EngineConfig, num_ranks: int = 1) -> None:
    """Compile and check the kernels of an engine's steps on a GPU; other ranks and stages take no part.

    Args:
        num_ranks: processes of the model that share the machine's cores.
    """
    if facts.device.type == "cuda":
        steps = warmup_steps(*_step_sizes(facts, config))
        warm_up_kernels(forward, new_cache(facts, 2, config.block_size), steps, num_ranks)


def _forward(
    facts: ModelFacts, forwards: Forwards, tokenizer: Any | None, speculation: SpeculationConfig | None
) -> Forward:
    """Return the forward that an engine runs: with hidden states if its drafter reads them."""
    if speculation is not None and facts.state_shapes:
        raise InvalidInput(
            "speculation: this model's layers carry a recurrent state, which rejected guesses would corrupt: make the"
            " engine without speculation"
        )
    if speculation is None or not speculation.reads_states:
        return forwards.plain
    require_fitting(speculation.drafter, facts.num_logits, facts.hidden_size, tokenizer)
    return forwards.plain if forwards.with_states is None else forwards.with_states()


def new_worker(
    facts: ModelFacts,
    forward: Forward,
    config: EngineConfig,
    num_blocks: int,
    num_states: int = 0,
    step: StepNeeds | None = None,
) -> Worker:
    """Return a warmed-up worker with its KV cache and states.

    Args:
        step: memory left free for its steps; the worker then stays within it.
    """
    cuda_graphs = _has_graphs(facts, config)
    runner = Runner(forward, new_cache(facts, num_blocks, config.block_size, num_states), cuda_graphs)
    slots = config.max_num_seqs if step else 0
    worker = Worker(runner, Sampler(facts.num_logits, facts.device, penalized_slots=slots, is_exact=facts.is_exact))
    if cuda_graphs:
        worker.warm_up(config.max_num_seqs, config.max_num_batched_tokens, min(num_blocks, _longest(facts, config)))
    if step is not None:
        worker.memory = StepMemory(facts.device, step.block, step.most + step.most // 16)  # half of the spare 1/8
        worker.memory.refill()
    return worker


def engine_over(
    worker: StepWorker,
    num_blocks: int,
    model: EngineModel,
    config: EngineConfig,
    tokenizer: Any | None,
    speculation: SpeculationConfig | None,
    num_states: int = 0,
) -> Engine:
    """Return an engine whose steps ``worker`` runs, over a KV cache of ``num_blocks`` blocks.

    A model with recurrent states serves at most ``num_states`` sequences at a time and has no prefix cache.

    Raises:
        InvalidInput: the drafter does not match the model.
    """
    facts = model.facts
    if speculation is not None and model.adapters is not None:
        raise InvalidInput(
            "speculation: drafts of a model with adapters are not supported: compile without max_lora_rank"
        )
    if speculation is not None:
        require_fitting(speculation.drafter, facts.num_logits, facts.hidden_size, tokenizer)
    pool = BlockPool(num_blocks, config.block_size)
    caches_prefixes = config.prefix_caching and not facts.state_shapes
    blocks = KVBlocks(pool, facts.kv_groups, prefix_caching=caches_prefixes, num_state_slots=num_states)
    sizes = {"max_context": facts.max_context, "vocab_size": facts.num_token_ids, "num_logits": facts.num_logits}
    admission = Admission(tokenizer, **sizes, end_tokens=model.end_tokens)
    overlap = facts.device.type == "cuda" if config.overlap is None else config.overlap
    return Engine(
        worker,
        blocks,
        admission,
        config,
        overlap=overlap,
        max_context=facts.max_context,
        speculation=speculation,
        weights_version=model.weights_version,
        adapters=model.adapters,
        prefixes=lambda turns, follow: Prefixes(blocks, facts, worker, turns, follow, model.fingerprint),
    )


def affordable_blocks(facts: ModelFacts, config: EngineConfig, room: Room, num_sharers: int = 1) -> int:
    """Return the number of blocks that fit beside the states, capped at what max_num_seqs sequences can use.

    Args:
        num_sharers: ranks whose blocks are on this device.

    Raises:
        InvalidInput: not even one block fits.
    """
    per_block = _bytes_per_block(facts, config)
    num_seqs, longest = config.max_num_seqs, -(-facts.max_context // config.block_size)
    if not per_block:  # blocks without content only limit what a step computes
        chunk = -(-max(config.max_num_batched_tokens, facts.max_context) // config.block_size)
        return 3 * num_seqs + 2 * chunk + 2
    useful = num_seqs * longest * len(facts.kv_groups) + 1
    left = room.cache
    if facts.state_shapes:
        left -= affordable_states(facts, config, room) * KVCache.bytes_per_state(facts.state_shapes, facts.dtype)
    return min(_require_some(left // per_block // num_sharers, facts, config, room), useful)


def room_for_cache(
    facts: ModelFacts, forward: Forward, config: EngineConfig, *, drafts: bool, num_sharers: int = 1
) -> Room:
    """Return the memory budget of the KV cache: what memory_fraction leaves beside weights, steps and CUDA graphs.

    Args:
        drafts: steps verify guesses.
        num_sharers: ranks on this device, each with its own step and graphs.
    """
    if facts.device.type != "cuda":
        return Room(int(available_memory() * config.memory_fraction))
    gc.unfreeze()  # an earlier engine may have been dropped while it had requests
    gc.collect()  # a dropped engine in a reference cycle would still hold its memory
    layouts, sequences, tokens, width = _step_sizes(facts, config)
    with stage("measure the memory of steps and graphs"), without_older_objects():
        runner = Runner(forward, new_cache(facts, 2, config.block_size), False)
        step = step_needs(
            runner,
            functools.partial(
                Sampler, facts.num_logits, facts.device, penalized_slots=sequences, is_exact=facts.is_exact
            ),
            num_tokens=max(tokens, facts.max_context) if config.whole_prompts else tokens,
            num_sequences=sequences,
            num_drafts=DRAFT_ROWS if drafts else 0,
            num_prompt_tokens=PROMPT_LOGPROBS_CHUNK,
            width=width,
        )
        runner = Runner(forward, runner.kv_cache, _has_graphs(facts, config))
        worker = Worker(runner, Sampler(facts.num_logits, facts.device, is_exact=facts.is_exact))
        graphs = graph_needs(worker, layouts)
        del runner, worker
        gc.collect()
    memory = gpu_memory(facts.device)
    left = int(memory.total * config.memory_fraction) - memory.used
    return Room(left - num_sharers * (step.total + sum(graphs)), step, graphs)


def _blocks_too_many(facts: ModelFacts, config: EngineConfig, step: StepNeeds, graphs: GraphNeeds) -> int:
    """Return how many KV blocks to give up so that steps and not-yet-captured CUDA graphs still fit in memory."""
    memory = gpu_memory(facts.device)
    excess = memory.used + step.total - step.counts + graphs.later - int(memory.total * config.memory_fraction)
    return max(0, -(-excess // max(1, _bytes_per_block(facts, config))))


def _require_some(num_blocks: int, facts: ModelFacts, config: EngineConfig, room: Room) -> int:
    if num_blocks < 2:
        raise InvalidInput(
            f"memory_fraction={config.memory_fraction} leaves {max(0, room.cache) / 2**30:.2f} GiB for the KV cache,"
            f" too little for blocks of {_bytes_per_block(facts, config) / 2**20:.1f} MiB: raise it, or lower"
            " max_num_batched_tokens or max_num_seqs"
        )
    return num_blocks


def _bytes_per_block(facts: ModelFacts, config: EngineConfig) -> int:
    return KVCache.bytes_per_block(facts.kv_shapes, facts.kv_groups, facts.dtype, config.block_size)


def _longest(facts: ModelFacts, config: EngineConfig) -> int:
    """Return the number of blocks of the longest sequence plus one token."""
    return -(-(facts.max_context + 1) // config.block_size)


def _step_sizes(facts: ModelFacts, config: EngineConfig) -> tuple[list[tuple[int, int, int]], int, int, int]:
    """Return the CUDA graphs' layouts, and tokens, sequences and table width of the largest step."""
    largest = config.max_num_seqs, config.max_num_batched_tokens, _longest(facts, config)
    graphs = graph_layouts(*largest, config.block_size) if _has_graphs(facts, config) else []
    return graphs, *largest


def _has_graphs(facts: ModelFacts, config: EngineConfig) -> bool:
    return facts.device.type == "cuda" if config.cuda_graphs is None else config.cuda_graphs
