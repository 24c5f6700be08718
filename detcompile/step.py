"""StepInputs, every tensor that one forward step reads, and ModelFacts, the sizes that passes and runtime share.

Legend: T tokens of this step, S sequences, R rows whose logits are wanted, C sequences that one token may belong to.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PADDING_SLOT = -1  # a token whose key and value are written nowhere
NO_SLOT = -1  # a sequence that starts from a state of zeros and keeps none


class KVGroup(NamedTuple):
    """Layers that share a block table, because they see the same keys."""

    layers: tuple[int, ...]
    window: int  # tokens that a query sees, itself included; 0 for all before it


class KVShape(NamedTuple):
    """One layer's share of a cache slot."""

    kv_heads: int
    head_dim: int
    v_head_dim: int


class StateShape(NamedTuple):
    """What one operation keeps of a sequence from step to step."""

    shape: tuple[int, ...]
    float32: bool  # whatever the model's dtype is


class StepInputs(NamedTuple):
    """Packed tokens of a step, and where their keys and values live.

    The tokens of sequence s are rows ``cu_seqlens[s]:cu_seqlens[s + 1]``; they are the LAST tokens of that sequence,
    which holds ``seq_lens[s]`` keys once this step has written its own. For the layers of KV group g, key p of sequence
    s lives in slot ``block_tables[g][s, p // block_size] * block_size + p % block_size``. Rows past ``cu_seqlens[S]``
    are padding. Token t is written to slots t, T + t, … of a slot mapping: C is above 1 where branches of a draft tree
    share tokens, which are computed in one of them.
    """

    slot_mappings: tuple[Tensor, ...]  # one a KV group: [C * T] int64, PADDING_SLOT writes nowhere
    cu_seqlens: Tensor  # [S + 1] int32, ascending from 0
    seq_lens: Tensor  # [S] int32, keys of each sequence after this step's writes
    block_tables: tuple[Tensor, ...]  # one a KV group: [S, max_blocks] int32
    k_caches: tuple[Tensor, ...]  # one a layer: [num_blocks, block_size, kv_heads, head_dim]
    v_caches: tuple[Tensor, ...]  # one a layer: [num_blocks, block_size, kv_heads, v_head_dim]
    state_slots: Tensor  # [S] int32: row of the states that is the sequence's, NO_SLOT for none
    states: tuple[Tensor, ...] = ()  # one an operation that keeps a state: [num_slots, *StateShape.shape]


def step_leaves(input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> list[Tensor]:
    """Every tensor that a forward step takes, in one fixed order: by it, compiled programs know their arguments."""
    parts = (part if isinstance(part, tuple) else (part,) for part in step)
    return [input_ids, position_ids, logits_to_keep, *itertools.chain.from_iterable(parts)]


def kv_groups(windows: Sequence[int], shapes: Sequence[Hashable]) -> tuple[KVGroup, ...]:
    """Layers by what they see, in groups of about one size, so that a block of any group takes the same memory.

    ``windows`` and ``shapes`` have one entry a layer. Where kinds of layers differ, each kind is split into groups as
    large as the rarest kind; layer i of every group then shares one tensor with layer i of the others. Layers of
    unequal shapes cannot share: they form one group, without a window, and keep keys that some no longer see.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if not kinds:  # nothing is kept a token: blocks count positions, and are free again once these are computed
        return (KVGroup((), 1),)
    if len(kinds) == 1 or len(set(shapes)) > 1:
        return (KVGroup(tuple(range(len(windows))), windows[0] if len(kinds) == 1 else 0),)
    size = min(len(layers) for layers in kinds.values())
    return tuple(
        KVGroup(tuple(layers[start : start + size]), window)
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    )


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The sizes of a compiled model. Ranks that share one differ in ``kv_shapes`` and ``device`` alone.

    Attributes:
        kv_shapes: extents of a cached key and value, one per layer.
        kv_groups: layers that share a block table.
        state_shapes: one per operation that carries a state from token to token.
        dtype: dtype of weights, activations and KV cache.
        device: where the weights live.
        max_context: most tokens of a sequence.
        num_token_ids: ids that a prompt may hold: rows of the embedding.
        num_logits: ids that may be drawn; the head may be wider than the embedding.
        hidden_size: features that the head reads; 0 if hidden states are not available.
        is_exact: True if the logits have the same bits on every machine (Numerics.arithmetic).
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
    is_exact: bool = False
