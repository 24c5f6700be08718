"""Requests that go on where another engine, or this one, left them.

The next token of a sample is a function of the prompt, the parameters, their seed and the tokens drawn so far. So a
sample that begins with those tokens comes to the bits of one that was never interrupted.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.plain_values import kind, shown, token_list, whole_number
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["ModelLimits", "resumed_samples"]


class ModelLimits(Protocol):
    """What a model can hold and draw."""

    max_context: int
    vocab_size: int
    num_logits: int


def resumed_samples(
    resume: Any, params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits
) -> dict[int, list[int]]:
    """The samples to serve, in their order, each with the tokens that it has drawn before.

    Args:
        resume: tokens by the index of their sample; none for one that has not begun. Samples that are not named are not
            served.

    Raises:
        InvalidInput: no sample, one that there is not or that has ended, a token that the model does not draw, or no
            seed where one decides.
    """
    if not isinstance(resume, Mapping) or not resume:
        raise InvalidInput(f"resume {shown(resume)} is {kind(resume)}: give a dict of sample: tokens drawn, not empty")
    if params.seed is None and not params.greedy:
        raise InvalidInput("a request that draws goes on only with the seed it had: give params the output's seed")
    found: dict[int, list[int]] = {}
    for key, value in resume.items():
        index = whole_number(key, "resume: sample")
        if not 0 <= index < params.n or index in found:
            raise InvalidInput(f"resume names sample {index}: give each of 0 to {params.n - 1} once at most")
        found[index] = _drawn(index, value, params, num_prompt_tokens, limits)
    return dict(sorted(found.items()))


def _drawn(
    index: int, value: Any, params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits
) -> list[int]:
    """The tokens of one sample."""
    tokens = token_list(value, f"resume: the tokens of sample {index}")
    most = min(limits.vocab_size, limits.num_logits)
    wrong = next((token for token in tokens if not 0 <= token < most), None)
    if wrong is not None:
        raise InvalidInput(f"resume: sample {index} holds token {wrong}; the model draws 0 to {most - 1}")
    ends = frozenset(params.stop_token_ids)
    end = next((token for token in tokens if token in ends), None)
    room = limits.max_context - num_prompt_tokens
    length = room if params.max_tokens is None else min(room, params.max_tokens)
    if end is not None or len(tokens) >= length:
        why = f"at token {end}" if end is not None else f"after {len(tokens)} tokens, of {length} at most"
        raise InvalidInput(f"resume: sample {index} has ended {why}: resume those that run")
    return tokens
