"""Logits of a padded batch through an executor, as Hugging Face's callers give it: one step."""

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.runtime.dense.given_tensors import require_integers
from detcompile.runtime.dense.padded_batch import UnpaddedBatch, check_batch, keep_columns, language_loss, repad
from detcompile.runtime.dense.step import dense_step
from detcompile.runtime.kv.block_pool import BLOCK_SIZE

__all__ = ["padded_output"]


def padded_output(
    executor: Executor, batch: UnpaddedBatch, labels: Tensor | None, logits_to_keep: int | Tensor
) -> CausalLMOutput:
    """Logits [B, K, V] of one step over a KV cache of its own, zeros at padding, and the loss where there are labels.

    Args:
        labels: [B, C], -100 where there is none.
        logits_to_keep: the last so many columns, or those of an index tensor [K]; 0 keeps all.

    Raises:
        InvalidInput: a token, a length, a position, a column or a label out of range.
    """
    rows, mask = keep_columns(batch.mask, logits_to_keep)
    if labels is not None:
        require_integers(labels, "labels")
        if mask is not batch.mask or labels.shape != mask.shape:
            raise InvalidInput("labels need the shape of input_ids and all logits: pass logits_to_keep=0")
    facts = executor.description.facts
    check_batch(batch, facts.num_token_ids, facts.max_context)
    arrays, num_blocks = dense_step(batch, len(facts.kv_groups), rows)
    num_states = len(batch.lengths) if facts.state_shapes else 0
    runner = executor.new_runner(num_blocks, BLOCK_SIZE, False, num_states)
    logits = repad(runner.run(arrays), mask)
    return CausalLMOutput(loss=None if labels is None else language_loss(logits, labels, mask), logits=logits)
