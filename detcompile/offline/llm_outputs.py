"""Outputs of LLM: vLLM's fields, and beside them what repeats an answer, its seed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from detcompile.errors import DetcompileError
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput

__all__ = ["LLMCompletion", "LLMOutput", "Logprob", "llm_output"]


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: fp32, natural logarithm, under the model itself.
        rank: place among the vocabulary from 1; equal ones are ranked by their ids.
        decoded_token: the token alone as text; None without a tokenizer, and where it cannot read the id.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class LLMCompletion:
    """One sample of a request.

    Attributes:
        index: place among the request's n samples.
        text: the tokens as text; empty of a prompt that was refused.
        token_ids: the tokens drawn, a final stop token included.
        cumulative_logprob: sum of the tokens' logprobs; None if they were not asked for.
        logprobs: one dict a token, of it and of the likeliest, by token id; None if they were not asked for.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop token id or stop string that ended it, if one did.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None

    def finished(self) -> bool:
        """Whether it has ended, as it always has when it is given."""
        return self.finish_reason is not None


@dataclass(slots=True)
class LLMOutput:
    """A request and its samples.

    Attributes:
        request_id: unique within the LLM; empty of a prompt that was refused.
        prompt: text of the prompt, where it was given as text or messages.
        prompt_token_ids: tokens of the prompt.
        prompt_logprobs: one dict a prompt token, None for the first; None if they were not asked for.
        outputs: the n samples; one empty one with finish_reason "error" of a prompt that was refused.
        finished: always true.
        metrics: times of the request; None of a prompt that was refused.
        num_cached_tokens: tokens of the prompt that came from the prefix cache.
        seed: ``SamplingParams(seed=...)`` that repeats the answer bit for bit; None of a prompt that was refused.
        error: why the request ended with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[LLMCompletion]
    finished: bool
    metrics: RequestMetrics | None
    num_cached_tokens: int
    seed: int | None
    error: DetcompileError | None


def llm_output(output: RequestOutput, tokenizer: Any | None) -> LLMOutput:
    """An engine's output in vLLM's form."""

    def decoded(token: int) -> str | None:
        try:
            return None if tokenizer is None else tokenizer.decode([token])
        except Exception:  # some raise at ids that they do not know, and any id may be among the likeliest
            return None

    known = output.prompt_logprobs
    return LLMOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=None if known is None else [entry and _by_token(entry, decoded) for entry in known],
        outputs=[_completion(sample, decoded) for sample in output.outputs],
        finished=output.finished,
        metrics=output.metrics,
        num_cached_tokens=output.num_cached_tokens,
        seed=output.seed,
        error=output.error,
    )


def _completion(sample: CompletionOutput, decoded: Callable[[int], str | None]) -> LLMCompletion:
    return LLMCompletion(
        index=sample.index,
        text=sample.text,
        token_ids=sample.token_ids,
        cumulative_logprob=sample.cumulative_logprob,
        logprobs=None if sample.logprobs is None else [_by_token(entry, decoded) for entry in sample.logprobs],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )


def _by_token(entry: Logprobs, decoded: Callable[[int], str | None]) -> dict[int, Logprob]:
    """The token that stands there first, then the likeliest."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, decoded(entry.token_id))}
    for rank, (token, logprob) in enumerate(entry.top.items(), 1):
        found.setdefault(token, Logprob(logprob, rank, decoded(token)))
    return found
