"""Calls of a padded batch: checks of Hugging Face's arguments, and the logits from one step of an executor."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.runtime.dense.padded_batch import (
    UnpaddedBatch,
    check_batch,
    dense_step,
    keep_columns,
    language_loss,
    repad,
    require_integers,
)
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.torch_internals.autograd import is_traced

UNTRACED = (
    "torch.func, torch.export, torch.jit and make_fx cannot trace a compiled model or a trainer: call it outside of"
    " them. For gradients, call backward() on a trainer's loss; for a file, detcompile.export(compile(model), 'm.pt2')"
)

IDLE = ("cache_position", "use_cache")  # a call neither keeps nor returns a cache
NO_CACHE = "a call takes no cache: continue a prompt with generate() or an engine"
REFUSED = {
    "cache": NO_CACHE,  # the name of past_key_values from transformers 5.24 on
    "inputs_embeds": "a compiled model reads token ids: pass input_ids",
    "past_key_values": NO_CACHE,
    "output_hidden_states": "the program only returns logits: use the Hugging Face module",
    "output_attentions": "the program only returns logits: use the Hugging Face module",
}
SERVED = "input_ids, attention_mask, position_ids, labels, logits_to_keep and return_dict"


def require_served(keywords: Mapping[str, Any], served: str = SERVED) -> None:
    """Reject keywords of a call that would change its result; ``served`` names the accepted arguments, for the message.

    Raises:
        InvalidInput: names the keyword.
    """
    for name, value in keywords.items():
        is_set = value is not None and value is not False
        if name in REFUSED and is_set:
            raise InvalidInput(f"{name} is not supported: {REFUSED[name]}")
        if name == "cache_position" and is_set:
            raise InvalidInput("cache_position is not supported: pass position_ids, one for each token")
        if name not in REFUSED and name not in IDLE:
            raise InvalidInput(f"{name} is not an argument of a call; use {served}")


def with_config_outputs(config: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call, with the additional outputs that a config asks for, as in transformers."""
    names = ("output_attentions", "output_hidden_states")
    configured = {name: True for name in names if getattr(config, name, False) and keywords.get(name) is None}
    return {**keywords, **configured}


def require_tensors(
    input_ids: object, attention_mask: object, position_ids: object, labels: object
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the first three arguments; reject any that is not a tensor. All but input_ids may be None.

    Raises:
        InvalidInput: names the argument, or the call is traced, where token ids would become constants.
    """
    if is_traced():
        raise InvalidInput(UNTRACED)
    if input_ids is None:
        raise InvalidInput("input_ids is missing: pass token ids, [batch, length]")
    arguments = {
        "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "labels": labels
    }  # fmt: skip
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise InvalidInput(
                f"{name} must be a tensor [batch, length], not {type(value).__name__}: pass torch.tensor(...), or the"
                ' output of a tokenizer with return_tensors="pt"'
            )
    tensors: Any = (input_ids, attention_mask, position_ids)
    return tensors


def padded_output(
    executor: Executor, batch: UnpaddedBatch, labels: Tensor | None, logits_to_keep: int | Tensor
) -> CausalLMOutput:
    """Run one step over its own KV cache; return logits [B, K, V], zeros at padding, and the loss if there are labels.

    Args:
        labels: [B, C], -100 for none.
        logits_to_keep: the number of last columns, or an index tensor [K] of columns; 0 keeps all.

    Raises:
        InvalidInput: a token, length, position, column or label is out of range.
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
    loss = None if labels is None else language_loss(logits, labels, mask, facts.is_exact)
    return CausalLMOutput(loss=loss, logits=logits)
