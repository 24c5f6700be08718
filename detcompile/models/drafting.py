"""Drafters made from a model, or from some of its layers."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.runtime.kv.block_pool import whole_blocks
from detcompile.runtime.kv.kv_blocks import plain_blocks
from detcompile.runtime.requests.plain_values import flag, or_none, token_list, whole_number
from detcompile.runtime.speculation.model_drafter import ModelDrafter

CACHE_TOKENS = 1 << 17  # default limit of a draft model's KV cache


def draft_with(
    executor: Executor,
    layers: int | SequenceOf[int] | None,
    num_sequences: int,
    cache_tokens: int | None,
    cuda_graphs: bool | None,
    tokenizer: Any | None,
    shape: Mapping[str, Any],
) -> ModelDrafter:
    """Create a drafter over its own KV cache; arguments as in ``CompiledModel.drafter``.

    Args:
        shape: the ModelDrafter's arguments for the shape of drafts.
    """
    facts = executor.description.facts
    if facts.state_shapes:
        raise InvalidInput("this model's layers carry a state, which cannot roll back guesses: use another drafter")
    numbers = {name: whole_number(shape[name], f"drafter: {name}") for name in ("num_tokens", "siblings", "max_nodes")}
    if numbers["max_nodes"] < 1:
        raise InvalidInput(f"drafter: max_nodes={numbers['max_nodes']} must be at least 1")
    num_sequences = whole_number(num_sequences, "drafter: num_sequences")
    cache_tokens = or_none(whole_number)(cache_tokens, "drafter: cache_tokens")
    cuda_graphs = or_none(flag)(cuda_graphs, "drafter: cuda_graphs")
    if num_sequences < 1 or (cache_tokens is not None and cache_tokens < 1):
        raise InvalidInput(f"drafter: num_sequences={num_sequences} and cache_tokens={cache_tokens} must be at least 1")
    source = executor.drafting(_chosen(layers))
    if cache_tokens is None:
        longest = whole_blocks(facts.max_context)
        cache_tokens = min(num_sequences * longest, max(longest, CACHE_TOKENS))
    blocks = plain_blocks(source.description.facts, cache_tokens)
    graphs = facts.device.type == "cuda" if cuda_graphs is None else cuda_graphs
    runner = source.new_runner(blocks.pool.num_blocks, blocks.pool.block_size, graphs)
    return ModelDrafter(
        runner,
        blocks,
        vocab_size=facts.num_logits,
        max_context=facts.max_context,
        num_sequences=num_sequences,
        tokenizer=tokenizer,
        tree=shape["tree"],
        **numbers,
    )


def _chosen(layers: Any) -> tuple[int, ...] | None:
    """Return the indices of the first layers or of the listed layers; None for all."""
    if layers is None:
        return None
    if isinstance(layers, int):
        return tuple(range(whole_number(layers, "drafter: layers")))
    return tuple(token_list(layers, "drafter: layers"))
