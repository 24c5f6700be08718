"""Logits of a padded batch through an executor, as Hugging Face's callers give it: one step."""

from torch import Tensor

from detcompile.executors.executor import Executor
from detcompile.runtime.dense.padded_batch import UnpaddedBatch, check_batch, keep_columns, repad
from detcompile.runtime.dense.step import dense_step
from detcompile.runtime.kv.block_pool import BLOCK_SIZE

__all__ = ["padded_logits"]


def padded_logits(executor: Executor, batch: UnpaddedBatch, logits_to_keep: int | Tensor) -> Tensor:
    """Logits [B, K, V] of one step over a KV cache of its own, zeros at padding.

    Args:
        logits_to_keep: the last so many columns, or those of an index tensor [K]; 0 keeps all.

    Raises:
        InvalidInput: a token, a length or a position out of range.
    """
    facts = executor.description.facts
    check_batch(batch, facts.num_token_ids, facts.max_context)
    rows, mask = keep_columns(batch.mask, logits_to_keep)
    arrays, num_blocks = dense_step(batch, len(facts.kv_groups), rows)
    num_states = len(batch.lengths) if facts.state_shapes else 0
    runner = executor.new_runner(num_blocks, BLOCK_SIZE, False, num_states)
    return repad(runner.run(arrays), mask)
