"""Outputs of a request."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from detcompile.errors import DetcompileError

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingLogprobs(NamedTuple):
    """Log-probabilities in the distribution that a token was drawn from, after all sampling parameters.

    A greedy token has probability 1.
    """

    logprob: float
    top: dict[int, float]  # logprobs of the most likely tokens, most likely first, without excluded ones
    rank: int


class Logprobs(NamedTuple):
    """Log-probabilities (fp32, natural logarithm) at one position, before any sampling parameter applies."""

    token_id: int  # the token at this position
    logprob: float
    top: dict[int, float]  # logprobs of the most likely tokens, most likely first
    rank: int  # rank of ``token_id``; 1 is the most likely
    sampling: SamplingLogprobs | None = None  # if requested, of a generated token


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request so far.

    Attributes:
        index: index among the request's n samples.
        text: decoded text; "" without a tokenizer.
        token_ids: generated tokens, including a final stop token.
        logprobs: one entry per token, if requested.
        finish_reason: None while running; then "stop", "length", "abort" or "error".
        stop_reason: the stop token id or stop string that ended the sample, if any.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' logprobs in token order, float64."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of a monotonic clock."""

    arrival: float
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)  # of sample 0
    finished: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # accepted draft tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token of sample 0."""
        return self.token_times[0] - self.arrival if self.token_times else None


@dataclass(slots=True)
class RequestOutput:
    """A request and its samples so far.

    Attributes:
        request_id: the id returned by ``add_request``.
        prompt: the prompt's text, if it was given as text.
        prompt_token_ids: tokens of the prompt.
        seed: seed of the random numbers; the same prompt, parameters and seed reproduce the tokens and logprobs.
        prompt_logprobs: one entry per prompt token (None for the first), if requested.
        error: why the request failed or was rejected. ``outputs`` then holds what was generated before; a rejected
            prompt has one empty output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    seed: int | None
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[Logprobs | None] | None = None
    error: DetcompileError | None = None
    metrics: RequestMetrics | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens taken from the prefix cache."""
        return 0 if self.metrics is None else self.metrics.num_cached_tokens
