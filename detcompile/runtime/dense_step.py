"""The one step of a dense call: every token of a padded batch, over a KV cache made for it.

Legend: as in runtime/step_builder.py.
"""

import numpy as np
from numpy.typing import NDArray

from detcompile.runtime.block_pool import BLOCK_SIZE, NULL_BLOCK
from detcompile.runtime.padded_batch import UnpaddedBatch
from detcompile.runtime.step_builder import NOT_PENDING, StepArrays

__all__ = ["dense_step"]


def dense_step(batch: UnpaddedBatch, num_groups: int, logits_to_keep: NDArray[np.int64]) -> tuple[StepArrays, int]:
    """What ``build_step`` gives for new sequences, and the blocks of BLOCK_SIZE tokens that the cache needs.

    Args:
        logits_to_keep: [R] indices of packed tokens.
    """
    num_tokens, num_sequences = len(batch.token_ids), len(batch.lengths)
    cu_seqlens = np.zeros(num_sequences + 1, np.int64)
    batch.lengths.cumsum(out=cu_seqlens[1:])
    sequences = np.arange(num_sequences)
    row = sequences.repeat(batch.lengths)
    place = np.arange(num_tokens) - cu_seqlens[row]  # index in its own sequence

    counts = -(-batch.lengths // BLOCK_SIZE)
    ends = counts.cumsum()
    columns = np.arange(counts.max())
    own = (ends - counts)[:, None] + columns + (NULL_BLOCK + 1)
    groups = np.arange(num_groups)[:, None, None] * ends[-1]  # each group's blocks behind those of the one before
    tables = np.where(columns < counts[:, None], own + groups, NULL_BLOCK)
    slots = tables[:, row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
    arrays = StepArrays(
        input_ids=batch.token_ids,
        position_ids=batch.position_ids,
        pending=np.full(num_tokens, NOT_PENDING, np.int64),
        logits_to_keep=logits_to_keep,
        slot_mappings=slots[:, None],
        cu_seqlens=cu_seqlens.astype(np.int32),
        seq_lens=batch.lengths.astype(np.int32),
        block_tables=tables.astype(np.int32),
        state_slots=sequences.astype(np.int32),
    )
    return arrays, int(num_groups * ends[-1]) + 1
