"""Outputs of LLM: vLLM's fields, plus the seed that reproduces an answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from detcompile.errors import DetcompileError
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position.

    Attributes:
        logprob: fp32, natural logarithm, of the unmodified model.
        rank: rank in the vocabulary from 1; ties are ranked by id.
        decoded_token: the text of the token alone; None without a tokenizer, or if it cannot decode the id.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class LLMCompletion:
    """One sample of a request.

    Attributes:
        index: index among the request's n samples.
        text: the tokens as text, with the markers of reasoning; empty for a rejected prompt.
        token_ids: the sampled tokens, including a final stop token.
        cumulative_logprob: sum of the tokens' logprobs; None if not requested.
        logprobs: for each token a dict by token id, of it and the likeliest tokens; None if not requested.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop token id or stop string that ended it, if any.
        reasoning: the reasoning in the text of an answer from chat(); None without any.
        content: the rest of the text of an answer from chat(), without markers; None from generate().
        sampling_logprobs: logprobs in the distributions that the tokens were drawn from; None if not requested. If all
            alternatives were requested, these are the tokens that the filters left.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    reasoning: str | None = field(default=None, compare=False)
    content: str | None = field(default=None, compare=False)
    sampling_logprobs: list[dict[int, Logprob]] | None = None

    def finished(self) -> bool:
        """Return True if the sample has ended; every returned sample has."""
        return self.finish_reason is not None


@dataclass(slots=True)
class LLMOutput:
    """A request and its samples.

    Attributes:
        request_id: unique within the LLM; empty for a rejected prompt.
        prompt: text of the prompt, if it was passed as text or messages.
        prompt_token_ids: tokens of the prompt.
        prompt_logprobs: a dict per prompt token, None for the first; None if not requested.
        outputs: the n samples; for a rejected prompt one empty sample with finish_reason "error".
        finished: always True.
        metrics: times of the request; None for a rejected prompt.
        num_cached_tokens: tokens of the prompt that came from the prefix cache.
        seed: ``SamplingParams(seed=...)`` that reproduces the answer bit for bit; None for a rejected prompt.
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
    """Convert an engine's output to vLLM's form."""

    def decoded(token: int) -> str | None:
        try:
            return None if tokenizer is None else tokenizer.decode([token])
        except Exception:  # some tokenizers raise for unknown ids, and any id may be among the likeliest
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
    drawn = [(entry.token_id, entry.sampling) for entry in sample.logprobs or () if entry.sampling is not None]
    sampling = [_by_token(Logprobs(token, *entry), decoded) for token, entry in drawn]
    return LLMCompletion(
        index=sample.index,
        text=sample.text,
        token_ids=sample.token_ids,
        cumulative_logprob=sample.cumulative_logprob,
        logprobs=None if sample.logprobs is None else [_by_token(entry, decoded) for entry in sample.logprobs],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        sampling_logprobs=sampling or None,
    )


def _by_token(entry: Logprobs, decoded: Callable[[int], str | None]) -> dict[int, Logprob]:
    """Return logprobs by token id: the sampled token first, then the likeliest."""
    logprobs = {entry.token_id: Logprob(entry.logprob, entry.rank, decoded(entry.token_id))}
    for rank, (token, logprob) in enumerate(entry.top.items(), 1):
        logprobs.setdefault(token, Logprob(logprob, rank, decoded(token)))
    return logprobs
