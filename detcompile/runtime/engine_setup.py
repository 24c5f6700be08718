"""From a compiled forward to an engine: how large the KV cache may be, and what is warmed up before serving."""

import gc
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.parallel import TensorParallel
from detcompile.runtime.block_pool import BlockPool
from detcompile.runtime.drafters import require_fitting
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.intake import Intake
from detcompile.runtime.kv_blocks import KVBlocks
from detcompile.runtime.kv_cache import KVCache, KVShape
from detcompile.runtime.runner import Runner
from detcompile.runtime.sampling import Sampler
from detcompile.runtime.speculation import SpeculationConfig
from detcompile.runtime.worker import Worker
from detcompile.step import KVGroup, StateShape

__all__ = [
    "EngineModel",
    "affordable_blocks",
    "affordable_states",
    "engine_over",
    "new_cache",
    "new_engine",
    "new_worker",
]

GRAPH_BYTES = 2 << 30  # left free for CUDA graphs, whose memory no profile sees
STATE_SHARE = 2  # sequences' states may take one part in so many of the memory that is left


class EngineModel(NamedTuple):
    """What an engine needs to know of a model."""

    forward: Callable[..., Tensor]
    kv_shapes: tuple[KVShape, ...]  # one a layer
    kv_groups: tuple[KVGroup, ...]
    dtype: torch.dtype  # of the KV cache
    device: torch.device
    max_context: int  # tokens a sequence may hold
    num_token_ids: int  # ids that a prompt may hold
    num_logits: int  # ids that may be drawn
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0  # of the states that the head reads; 0 where they cannot be had
    forward_with_states: Callable[[], Callable[..., Any]] | None = None  # compiles it; None where it cannot be had
    state_shapes: tuple[StateShape, ...] = ()  # what its layers carry from token to token


def new_engine(
    model: EngineModel,
    config: EngineConfig,
    tokenizer: Any | None,
    speculation: SpeculationConfig | None = None,
    ranks: TensorParallel | None = None,
) -> Engine:
    """An engine with its KV cache, ready to serve.

    Args:
        ranks: with whom the model is shared. All of them get as many blocks, since each schedules by its own count.

    Raises:
        InvalidInput: the cache would not hold one block, or the drafter is not for this model.
    """
    if speculation is not None and model.state_shapes:
        raise InvalidInput(
            "speculation: this model's layers carry a state from token to token, which rejected guesses would leave in"
            " it: make the engine without speculation"
        )
    if speculation is not None and getattr(speculation.drafter, "reads_states", False):
        require_fitting(speculation.drafter, model.num_logits, model.hidden_size, tokenizer)
        if model.forward_with_states is not None:
            model = model._replace(forward=model.forward_with_states())
    num_blocks = config.num_blocks or affordable_blocks(model, config)
    num_states = affordable_states(model, config)
    if ranks is not None:
        num_blocks = ranks.least(num_blocks)
    worker = new_worker(model, config, num_blocks, num_states)
    return engine_over(worker, num_blocks, model, config, tokenizer, speculation, num_states)


def new_worker(model: EngineModel, config: EngineConfig, num_blocks: int, num_states: int = 0) -> Worker:
    """What runs an engine's steps, with its KV cache and its states, warmed up."""
    on_gpu = model.device.type == "cuda"
    cuda_graphs = on_gpu if config.cuda_graphs is None else config.cuda_graphs
    runner = Runner(model.forward, new_cache(model, num_blocks, config.block_size, num_states), cuda_graphs)
    worker = Worker(runner, Sampler(model.num_logits, model.device))
    if cuda_graphs:
        longest = min(num_blocks, -(-(model.max_context + 1) // config.block_size))
        worker.warm_up(config.max_num_seqs, config.max_num_batched_tokens, longest)
    return worker


def engine_over(
    worker: Any,
    num_blocks: int,
    model: EngineModel,
    config: EngineConfig,
    tokenizer: Any | None,
    speculation: SpeculationConfig | None,
    num_states: int = 0,
) -> Engine:
    """An engine whose steps ``worker`` runs, here or in other processes, over a KV cache of ``num_blocks`` blocks.

    A model whose layers carry states serves at most ``num_states`` sequences at a time, and finds no cached prefixes.

    Raises:
        InvalidInput: the drafter is not for this model.
    """
    if speculation is not None:
        require_fitting(speculation.drafter, model.num_logits, model.hidden_size, tokenizer)
    pool = BlockPool(num_blocks, config.block_size)
    caches_prefixes = config.prefix_caching and not model.state_shapes
    blocks = KVBlocks(pool, model.kv_groups, prefix_caching=caches_prefixes, num_state_slots=num_states)
    intake = Intake(
        tokenizer,
        max_context=model.max_context,
        vocab_size=model.num_token_ids,
        eos_token_ids=model.eos_token_ids,
    )
    overlap = model.device.type == "cuda" if config.overlap is None else config.overlap
    return Engine(
        worker, blocks, intake, config, overlap=overlap, max_context=model.max_context, speculation=speculation
    )


def affordable_blocks(model: EngineModel, config: EngineConfig, num_sharers: int = 1) -> int:
    """Blocks that memory_fraction leaves after the worst step and the states, and no more than all seats can use.

    Args:
        num_sharers: ranks that have their blocks on this device.

    Raises:
        InvalidInput: not even one.
    """
    per_block = KVCache.bytes_per_block(model.kv_shapes, model.kv_groups, model.dtype, config.block_size)
    seats, longest = config.max_num_seqs, -(-model.max_context // config.block_size)
    if not per_block:  # blocks that hold nothing only count what a step computes
        chunk = -(-max(config.max_num_batched_tokens, model.max_context) // config.block_size)
        return 3 * seats + 2 * chunk + 2
    useful = seats * longest * len(model.kv_groups) + 1
    room = _room(model, config)
    if model.state_shapes:
        room -= affordable_states(model, config) * KVCache.bytes_per_state(model.state_shapes, model.dtype)
    affordable = room // per_block // num_sharers
    if affordable < 2:
        raise InvalidInput(
            f"memory_fraction={config.memory_fraction} leaves {max(0, room) / 2**30:.2f} GiB for the KV cache, whose"
            f" blocks take {per_block / 2**20:.1f} MiB: raise it, or lower max_num_batched_tokens"
        )
    return min(affordable, useful)


def affordable_states(model: EngineModel, config: EngineConfig) -> int:
    """Sequences whose states fit their share of the memory that the worst step leaves, and no more than seats.

    Raises:
        InvalidInput: not even one's.
    """
    if not model.state_shapes:
        return 0
    per_state = KVCache.bytes_per_state(model.state_shapes, model.dtype)
    room = _room(model, config) // STATE_SHARE
    if room < per_state:
        raise InvalidInput(
            f"memory_fraction={config.memory_fraction} leaves {max(0, room) / 2**30:.2f} GiB for states, of which a"
            f" sequence takes {per_state / 2**20:.1f} MiB: raise it, or lower max_num_batched_tokens"
        )
    return min(config.max_num_seqs, room // per_state)


def _room(model: EngineModel, config: EngineConfig) -> int:
    """Bytes that memory_fraction leaves for the KV cache and the states."""
    if model.device.type != "cuda":
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(available * config.memory_fraction)
    gc.unfreeze()  # by an engine that was left with requests
    gc.collect()  # an engine that is gone may hang in a cycle, with all its memory
    runner = Runner(model.forward, new_cache(model, 2, config.block_size), False)
    probe = Worker(runner, Sampler(model.num_logits, model.device))
    tokens = config.max_num_batched_tokens
    if config.scheduler == "prefill_first":
        tokens = max(tokens, model.max_context)
    step = probe.peak_bytes(tokens, config.max_num_seqs)
    free, total = torch.cuda.mem_get_info(model.device)
    reserved = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return int(total * config.memory_fraction) - (total - free - reserved) - step - GRAPH_BYTES


def new_cache(model: EngineModel, num_blocks: int, block_size: int, num_states: int = 0) -> KVCache:
    """An empty KV cache of the model, with the states of so many sequences."""
    return KVCache(
        model.kv_shapes,
        model.kv_groups,
        dtype=model.dtype,
        device=model.device,
        num_blocks=num_blocks,
        block_size=block_size,
        states=model.state_shapes,
        num_state_slots=num_states,
    )
