"""The single step of a dense call: every token of a padded batch, over a new KV cache.

Legend: as in runtime/step/builder.py.
"""

import numpy as np
from numpy.typing import NDArray

from detcompile.runtime.dense.padded_batch import UnpaddedBatch
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, NULL_BLOCK
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays, token_places


def dense_step(batch: UnpaddedBatch, num_groups: int, logits_to_keep: NDArray[np.int64]) -> tuple[StepArrays, int]:
    """Return what ``build_step`` gives for new sequences, and the number of blocks of BLOCK_SIZE that the cache needs.

    Args:
        logits_to_keep: [R] indices of packed tokens.
    """
    counts = -(-batch.lengths // BLOCK_SIZE)
    ends = counts.cumsum()
    columns = np.arange(counts.max())
    blocks = (ends - counts)[:, None] + columns + (NULL_BLOCK + 1)
    groups = np.arange(num_groups)[:, None, None] * ends[-1]  # offset of each group's blocks
    tables = np.where(columns < counts[:, None], blocks + groups, NULL_BLOCK).astype(np.int32)
    cu_seqlens, _, slots = token_places(np.zeros_like(batch.lengths), batch.lengths, tables, BLOCK_SIZE)
    arrays = StepArrays(
        input_ids=batch.token_ids,
        position_ids=batch.position_ids,
        pending=np.full(len(batch.token_ids), NOT_PENDING, np.int64),
        logits_to_keep=logits_to_keep,
        slot_mappings=slots[:, None],
        cu_seqlens=cu_seqlens.astype(np.int32),
        seq_lens=batch.lengths.astype(np.int32),
        block_tables=tables,
        state_slots=np.arange(len(batch.lengths), dtype=np.int32),
    )
    return arrays, int(num_groups * ends[-1]) + 1


def two_way_step(
    batch: UnpaddedBatch, num_groups: int, logits_to_keep: NDArray[np.int64]
) -> tuple[StepArrays, int]:
    """Return ``dense_step`` for a model with bidirectional attention.

    Each token becomes its own sequence, which shares its row's blocks and ends at the row's end. Keys are written
    before any token attends, so each token sees all keys, in the order in which a last token would.
    """
    arrays, num_blocks = dense_step(batch, num_groups, logits_to_keep)
    row = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    apart = arrays._replace(
        cu_seqlens=np.arange(len(row) + 1, dtype=np.int32),
        seq_lens=arrays.seq_lens[row],
        block_tables=np.ascontiguousarray(arrays.block_tables[:, row]),
        state_slots=np.arange(len(row), dtype=np.int32),
    )
    return apart, num_blocks
