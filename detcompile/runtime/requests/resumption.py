"""Resume requests from tokens that were drawn earlier, by this engine or another.

The next token of a sample depends only on the prompt, the parameters, the seed and the tokens drawn so far. A sample
that resumes from those tokens therefore ends in the same bits as an uninterrupted one.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.plain_values import kind, shown, token_list, whole_number
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["ModelLimits", "resumed_samples"]


class ModelLimits(Protocol):
    """Limits of a model."""

    max_context: int
    vocab_size: int
    num_logits: int


def resumed_samples(
    resume: Any, params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits
) -> dict[int, list[int]]:
    """Return the samples to serve, by index, each with the tokens that it has drawn before.

    Args:
        resume: drawn tokens by sample index; an empty list for a sample that has not begun. Other samples are not
            served.

    Raises:
        InvalidInput: no sample is given, an index is out of range, a sample has already ended, a token cannot be drawn
            by the model, or random sampling lacks a seed.
    """
    if not isinstance(resume, Mapping) or not resume:
        raise InvalidInput(f"resume {shown(resume)} is {kind(resume)}: give a non-empty dict of sample: drawn tokens")
    if params.seed is None and not params.greedy:
        raise InvalidInput("resume: a sampled request needs its original seed: set params.seed to the output's seed")
    samples: dict[int, list[int]] = {}
    for key, value in resume.items():
        index = whole_number(key, "resume: sample")
        if not 0 <= index < params.n or index in samples:
            raise InvalidInput(f"resume names sample {index}: give each of 0 to {params.n - 1} at most once")
        samples[index] = _drawn(index, value, params, num_prompt_tokens, limits)
    return dict(sorted(samples.items()))


def _drawn(index: int, value: Any, params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits) -> list[int]:
    """Return the checked tokens of one sample."""
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
        raise InvalidInput(f"resume: sample {index} has already ended {why}: resume only unfinished samples")
    return tokens
