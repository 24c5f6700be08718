"""Blocks of a KV cache outside of an engine: nothing is found in them that another sequence has left."""

from collections.abc import Sequence

import torch

from detcompile.runtime.kv.block_pool import BLOCK_SIZE, BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.step import ModelFacts


def plain_blocks(
    facts: ModelFacts,
    num_tokens: int,
    block_size: int = BLOCK_SIZE,
    order: Sequence[int] | torch.Generator | None = None,
    num_sequences: int | None = None,
) -> KVBlocks:
    """Return the blocks of a KV cache for at least ``num_tokens`` tokens.

    Args:
        num_tokens: tokens of all sequences together, each rounded up to whole blocks by the caller.
        order: the pool hands out its blocks in this order.
        num_sequences: sequences that have a state at a time; None takes as many as there are blocks.
    """
    whole = max(1, -(-num_tokens // block_size))
    pool = BlockPool(whole * len(facts.kv_groups) + 1, block_size, order)
    num_states = (num_sequences or whole) if facts.state_shapes else 0
    return KVBlocks(pool, facts.kv_groups, prefix_caching=False, num_state_slots=num_states)
