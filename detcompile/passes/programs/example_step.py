"""The step of two tokens that a packed model is traced with."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from detcompile.step import KVShape, StateShape, StepInputs
from detcompile.torch_internals.dynamo import mark_unbacked

__all__ = ["BLOCK_SIZE", "ExampleStep", "NUM_TOKENS", "example_step", "some_layers"]

NUM_TOKENS, NUM_BLOCKS = 2, 2
BLOCK_SIZE = 16  # of the step's caches; the extent is marked unknown like the others
ExampleStep = tuple[Tensor, Tensor, StepInputs, Tensor]  # what a forward takes


def example_step(
    shapes: Sequence[KVShape],
    num_groups: int,
    states: Sequence[StateShape],
    dtype: torch.dtype,
    device: torch.device,
) -> ExampleStep:
    """A step of two tokens whose extents are marked unknown, so that one graph serves every step.

    Args:
        shapes: extents of a cached key and value, one a layer.
        states: what is kept of a sequence, one an operation that carries a state.
    """
    step = _step(shapes, num_groups, states, dtype, device)
    input_ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device=device)
    position_ids = torch.arange(NUM_TOKENS, device=device)[None]
    logits_to_keep = torch.arange(NUM_TOKENS, device=device)
    _mark_unknown([input_ids, position_ids], [1])
    _mark_unknown([logits_to_keep, *step.slot_mappings, step.cu_seqlens, step.seq_lens, step.state_slots], [0])
    _mark_unknown([*step.block_tables, *step.k_caches, *step.v_caches], [0, 1])
    _mark_unknown(step.states, [0])
    return input_ids, position_ids, step, logits_to_keep


def some_layers(example: ExampleStep, layers: range) -> ExampleStep:
    """The step without the caches of the other layers."""
    input_ids, position_ids, step, logits_to_keep = example
    part = slice(layers.start, layers.stop)
    kept = step._replace(k_caches=step.k_caches[part], v_caches=step.v_caches[part])
    return input_ids, position_ids, kept, logits_to_keep


def _step(
    shapes: Sequence[KVShape],
    num_groups: int,
    states: Sequence[StateShape],
    dtype: torch.dtype,
    device: torch.device,
) -> StepInputs:
    def cache(heads: int, dim: int) -> Tensor:
        return torch.zeros(NUM_BLOCKS, BLOCK_SIZE, heads, dim, dtype=dtype, device=device)

    def metadata(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepInputs(
        slot_mappings=tuple(metadata([0, 1], torch.int64) for _ in range(num_groups)),
        cu_seqlens=metadata([0, NUM_TOKENS]),
        seq_lens=metadata([NUM_TOKENS]),
        block_tables=tuple(metadata([[0, 1]]) for _ in range(num_groups)),
        k_caches=tuple(cache(kv_heads, head_dim) for kv_heads, head_dim, _ in shapes),
        v_caches=tuple(cache(kv_heads, v_head_dim) for kv_heads, _, v_head_dim in shapes),
        state_slots=metadata([0]),
        states=tuple(
            torch.zeros(2, *state.shape, dtype=torch.float32 if state.float32 else dtype, device=device)
            for state in states
        ),
    )


def _mark_unknown(tensors: Iterable[Tensor], dims: list[int]) -> None:
    for tensor in tensors:
        mark_unbacked(tensor, dims)
