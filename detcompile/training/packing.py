"""Packing: a padded batch becomes one packed step of whole sequences, and rows of tokens become padded again."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from detcompile.runtime.dense.padded_batch import UnpaddedBatch
from detcompile.step import StepInputs, step_leaves
from detcompile.training.blocks import StepTensors

__all__ = ["leaf_table", "packed_step", "padded", "pieces", "predicting_leaves", "rows_at_once"]

ROWS_AT_ONCE = 2048  # of logits; a GPU takes more where they fit into a part of its memory
PARTS_OF_MEMORY = 16


def packed_step(batch: UnpaddedBatch, token_leaf: int, device: torch.device) -> StepTensors:
    """The step of a batch's sequences, one behind the other."""

    def on_device(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=device)

    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    cu_seqlens = on_device([0, *batch.lengths.cumsum()], torch.int32)
    step = StepInputs((), cu_seqlens, nothing, (), (), (), nothing)
    token_ids = on_device(batch.token_ids[None], torch.int64)
    position_ids = on_device(batch.position_ids[None], torch.int64)
    leaves = step_leaves(token_ids, position_ids, step, nothing)
    return StepTensors(tuple(leaves), on_device(leaf_table(batch.lengths.tolist(), token_leaf), torch.int32))


def predicting_leaves(batch: UnpaddedBatch, token_leaf: int, device: torch.device) -> Tensor:
    """The leaf table of the rows that predict a token: all but the last of each sequence."""
    return torch.tensor(leaf_table((batch.lengths - 1).tolist(), token_leaf), dtype=torch.int32, device=device)


def leaf_table(lengths: Sequence[int], token_leaf: int) -> list[int]:
    """Offsets of the leaves of sequences that lie behind each other: each is cut every ``token_leaf`` tokens."""
    table, at = [0], 0
    for length in lengths:
        table += [at + min(end, length) for end in range(token_leaf, length + token_leaf, token_leaf)]
        at += length
    return table


def pieces(table: Iterable[int], most_rows: int) -> list[list[int]]:
    """A leaf table in pieces of whole leaves, of up to ``most_rows`` rows where a leaf has no more; each from 0."""
    found: list[list[int]] = [[0]]
    first, *ends = table
    for end in ends:
        if len(found[-1]) > 1 and end - first > most_rows:
            first += found[-1][-1]
            found.append([0])
        found[-1].append(end - first)
    return found


def rows_at_once(row_bytes: int, device: torch.device) -> int:
    """How many rows of logits are made together. In pieces the head's gradients are added up and its rows recomputed.

    No bit follows it: rows are independent, and gradients exact sums.
    """
    if device.type == "cpu":
        return ROWS_AT_ONCE
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(ROWS_AT_ONCE, memory // PARTS_OF_MEMORY // row_bytes)


def padded(values: Tensor, places: Tensor) -> Tensor:
    """Zeros of the shape of ``places``, with ``values`` where it is true."""
    found = values.new_zeros(places.shape)
    found[places] = values
    return found
