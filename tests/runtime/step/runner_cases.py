"""A model of one layer whose attention reads StepInputs token by token, with its cache and blocks."""

import torch

from detcompile.runtime.kv.block_pool import BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.kv.kv_cache import KVCache, KVShape
from detcompile.step import PADDING_SLOT, KVGroup

__all__ = ["BLOCK_SIZE", "ONE_GROUP", "VOCAB_SIZE", "forward", "make_blocks", "make_cache"]

VOCAB_SIZE, DIM, NUM_BLOCKS, BLOCK_SIZE = 50, 4, 16, 16
GENERATOR = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(VOCAB_SIZE, DIM, dtype=torch.float64, generator=GENERATOR)
HEAD = torch.randn(DIM, 7, dtype=torch.float64, generator=GENERATOR)


def forward(input_ids, position_ids, step, logits_to_keep):
    """Causal attention of one head over the paged cache, then the head at ``logits_to_keep``."""
    hidden = EMBEDDING[input_ids[0]] + position_ids[0].unsqueeze(1) * 0.01
    keys = step.k_caches[0].view(-1, DIM)
    values = step.v_caches[0].view(-1, DIM)
    for t, slot in enumerate(step.slot_mappings[0].tolist()):
        if slot != PADDING_SLOT:
            keys[slot], values[slot] = hidden[t % len(hidden)], -hidden[t % len(hidden)]
    attended = torch.zeros_like(hidden)
    cu_seqlens, seq_lens = step.cu_seqlens.tolist(), step.seq_lens.tolist()
    for s, num_keys in enumerate(seq_lens):
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            position = num_keys - cu_seqlens[s + 1] + t
            blocks = step.block_tables[0][s].tolist()
            slots = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(position + 1)]
            weights = torch.softmax((keys[slots] * hidden[t]).sum(1), 0)
            attended[t] = (values[slots] * weights.unsqueeze(1)).sum(0)
    return torch.stack([((hidden + attended)[t].unsqueeze(1) * HEAD).sum(0) for t in logits_to_keep.tolist()])


ONE_GROUP = [KVGroup((0,), 0)]


def make_cache(value=float("nan")):
    cache = KVCache(
        [KVShape(1, DIM, DIM)],
        ONE_GROUP,
        dtype=torch.float64,
        device="cpu",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    for tensor in cache.k_caches + cache.v_caches:
        tensor.fill_(value)
    return cache


def make_blocks(num_blocks=NUM_BLOCKS, order=None):
    return KVBlocks(BlockPool(num_blocks, BLOCK_SIZE, order), ONE_GROUP, prefix_caching=False)
