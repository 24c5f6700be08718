"""The step of two tokens that a packed model is traced with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from detcompile.step import StateShape, StepInputs

__all__ = ["BLOCK_SIZE", "ExampleStep", "example_step"]

BLOCK_SIZE = 16  # of the step's caches; the extent is marked unknown like the others
ExampleStep = tuple[Tensor, Tensor, StepInputs, Tensor]  # what a forward takes


def example_step(
    shapes: Sequence[tuple[int, int, int]],
    num_groups: int,
    states: Sequence[StateShape],
    dtype: torch.dtype,
    device: torch.device,
) -> ExampleStep:
    """A step of two tokens whose extents are marked unknown, so that one graph serves every step.

    Args:
        shapes: kv_heads, head_dim and v_head_dim of each layer. states: of each operation that carries one.
    """
    num_tokens, num_blocks = 2, 2

    def cache(heads: int, dim: int) -> Tensor:
        return torch.zeros(num_blocks, BLOCK_SIZE, heads, dim, dtype=dtype, device=device)

    def metadata(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    step = StepInputs(
        slot_mappings=tuple(metadata([0, 1], torch.int64) for _ in range(num_groups)),
        cu_seqlens=metadata([0, num_tokens]),
        seq_lens=metadata([num_tokens]),
        block_tables=tuple(metadata([[0, 1]]) for _ in range(num_groups)),
        k_caches=tuple(cache(kv_heads, head_dim) for kv_heads, head_dim, _ in shapes),
        v_caches=tuple(cache(kv_heads, v_head_dim) for kv_heads, _, v_head_dim in shapes),
        state_slots=metadata([0]),
        states=tuple(
            torch.zeros(2, *state.shape, dtype=torch.float32 if state.float32 else dtype, device=device)
            for state in states
        ),
    )
    input_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    position_ids = torch.arange(num_tokens, device=device)[None]
    logits_to_keep = torch.arange(num_tokens, device=device)
    for tensor, dims in [
        (input_ids, 1),
        (position_ids, 1),
        (logits_to_keep, 0),
        *((slots, 0) for slots in step.slot_mappings),
        (step.cu_seqlens, 0),
        (step.seq_lens, 0),
        (step.state_slots, 0),
        *((table, [0, 1]) for table in step.block_tables),
    ]:
        mark_unbacked(tensor, dims)
    for tensor in (*step.k_caches, *step.v_caches):
        mark_unbacked(tensor, [0, 1])
    for state in step.states:
        mark_unbacked(state, 0)
    return input_ids, position_ids, step, logits_to_keep
