"""StepInputs, every tensor that one forward step reads, and ModelFacts, the sizes that passes and runtime share.

Legend: T tokens of this step, S sequences, R rows whose logits are wanted, C sequences that one token may belong to.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PADDING_SLOT = -1  # a token whose key and value are not written
NO_SLOT = -1  # a sequence that starts from a zero state and stores none


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
    """The state that one operation keeps of a sequence from step to step."""

    shape: tuple[int, ...]
    float32: bool  # whatever the model's dtype is


class StepInputs(NamedTuple):
    """Packed tokens of a step, and where their keys and values are stored.

    The tokens of sequence s are rows ``cu_seqlens[s]:cu_seqlens[s + 1]``; they are the LAST tokens of that sequence,
    which has ``seq_lens[s]`` keys after this step's writes. For layers of KV group g, key p of sequence s is in slot
    ``block_tables[g][s, p // block_size] * block_size + p % block_size``. Rows past ``cu_seqlens[S]`` are padding.
    Token t is written to slots t, T + t, … of a slot mapping: C is above 1 if branches of a draft tree share tokens,
    which are computed in one branch.
    """

    slot_mappings: tuple[Tensor, ...]  # per KV group: [C * T] int64, PADDING_SLOT writes nowhere
    cu_seqlens: Tensor  # [S + 1] int32, ascending from 0
    seq_lens: Tensor  # [S] int32, keys of each sequence after this step's writes
    block_tables: tuple[Tensor, ...]  # per KV group: [S, max_blocks] int32
    k_caches: tuple[Tensor, ...]  # per layer: [num_blocks, block_size, kv_heads, head_dim]
    v_caches: tuple[Tensor, ...]  # per layer: [num_blocks, block_size, kv_heads, v_head_dim]
    state_slots: Tensor  # [S] int32: the sequence's row of the states, or NO_SLOT
    states: tuple[Tensor, ...] = ()  # per operation with a state: [num_slots, *StateShape.shape]


def step_leaves(input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> list[Tensor]:
    """Return all tensors of a forward step in a fixed order, which compiled programs rely on."""
    parts = (part if isinstance(part, tuple) else (part,) for part in step)
    return [input_ids, position_ids, logits_to_keep, *itertools.chain.from_iterable(parts)]


def kv_groups(windows: Sequence[int], shapes: Sequence[Hashable]) -> tuple[KVGroup, ...]:
    """Group layers by the keys that they see, so that a block of any group takes the same memory.

    ``windows`` and ``shapes`` have one entry per layer. If kinds of layers differ, each kind is split into groups as
    large as the rarest kind; layer i of every group then shares one tensor with layer i of the others. Layers of
    unequal shapes cannot share: they form one group without a window, and keep keys that some no longer see.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if not kinds:  # no layer stores keys: blocks only count positions, and are freed once these are computed
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
    """The sizes of a compiled model. Ranks that share a model differ only in ``kv_shapes`` and ``device``.

    Attributes:
        kv_shapes: extents of a cached key and value, one per layer.
        kv_groups: layers that share a block table.
        state_shapes: one per operation that carries a state from token to token.
        dtype: dtype of weights, activations and KV cache.
        device: device of the weights.
        max_context: maximum number of tokens of a sequence.
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
