"""Packing: turn a padded batch into one packed step of whole sequences, and rows of tokens back into padded rows."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from detcompile.runtime.dense.padded_batch import UnpaddedBatch
from detcompile.step import StepInputs, step_leaves
from detcompile.training.blocks import StepTensors

ROWS_AT_ONCE = 2048  # rows of logits; a GPU takes more if they fit in a part of its memory
PARTS_OF_MEMORY = 16


def packed_step(batch: UnpaddedBatch, token_leaf: int, device: torch.device) -> StepTensors:
    """Return the step of a batch's sequences, concatenated."""

    def on_device(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=device)

    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    cu_seqlens = on_device([0, *batch.lengths.cumsum()], torch.int32)
    step = StepInputs((), cu_seqlens, nothing, (), (), (), nothing)
    token_ids = on_device(batch.token_ids[None], torch.int64)
    position_ids = on_device(batch.position_ids[None], torch.int64)
    leaves = step_leaves(token_ids, position_ids, step, nothing)
    return StepTensors(tuple(leaves), on_device(leaf_table(batch.lengths.tolist(), token_leaf), torch.int32))


def predicting_leaves(batch: UnpaddedBatch, token_leaf: int) -> list[int]:
    """Return the leaf table of the rows that predict a token: all but the last of each sequence."""
    return leaf_table((batch.lengths - 1).tolist(), token_leaf)


def leaf_table(lengths: Sequence[int], token_leaf: int) -> list[int]:
    """Return the boundaries of the leaves of concatenated sequences: each is split every ``token_leaf`` tokens."""
    table, at = [0], 0
    for length in lengths:
        table += [at + min(end, length) for end in range(token_leaf, length + token_leaf, token_leaf)]
        at += length
    return table


def pieces(table: Iterable[int], most_rows: int) -> list[list[int]]:
    """Split a leaf table into tables that start at 0, with whole leaves of together at most ``most_rows`` rows.

    A leaf with more rows gets its own table.
    """
    tables: list[list[int]] = [[0]]
    first, *ends = table
    for end in ends:
        if len(tables[-1]) > 1 and end - first > most_rows:
            first += tables[-1][-1]
            tables.append([0])
        tables[-1].append(end - first)
    return tables


def rows_at_once(row_bytes: int, device: torch.device) -> int:
    """Return how many rows of logits to compute at a time. The backward recomputes each piece and adds its gradients.

    It affects no bit: rows are independent, and gradients are exact sums.
    """
    if device.type == "cpu":
        return ROWS_AT_ONCE
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(ROWS_AT_ONCE, memory // PARTS_OF_MEMORY // row_bytes)


def padded(values: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of ``shape``, with ``values`` at ``places``, which are indices into the flattened result."""
    result = values.new_zeros(math.prod(shape))
    result[places] = values
    return result.view(shape)
