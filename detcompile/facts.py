"""ModelFacts: the sizes of a compiled model, wherever it runs: what its caches, prompts and draws have to fit."""

from dataclasses import dataclass

import torch

from detcompile.step import KVGroup, KVShape, StateShape

__all__ = ["ModelFacts"]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The sizes of a compiled model. Ranks that share one differ in ``kv_shapes`` and ``device`` alone.

    Attributes:
        kv_shapes: extents of a cached key and value, one a layer.
        kv_groups: layers that share a block table.
        state_shapes: one an operation that carries a state from token to token.
        dtype: dtype of weights, activations and KV cache.
        device: where the weights live.
        max_context: tokens a sequence may hold.
        num_token_ids: ids that a prompt may hold; the embedding has a row for each.
        num_logits: ids that may be drawn; the head may be wider than the embedding.
        hidden_size: features that the head reads; 0 where hidden states cannot be had.
    """

    kv_shapes: tuple[KVShape, ...]
    kv_groups: tuple[KVGroup, ...]
    state_shapes: tuple[StateShape, ...] = ()
    dtype: torch.dtype
    device: torch.device
    max_context: int
    num_token_ids: int
    num_logits: int
    hidden_size: int = 0
