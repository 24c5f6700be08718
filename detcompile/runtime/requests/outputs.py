"""What a request gives back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from detcompile.errors import DetcompileError
from detcompile.runtime.requests.sequence import FinishReason

__all__ = ["CompletionOutput", "Logprobs", "RequestMetrics", "RequestOutput"]


class Logprobs(NamedTuple):
    """Log-probabilities (fp32, natural logarithm) at one position, under the model itself."""

    token_id: int  # the token that stands there
    logprob: float
    top: dict[int, float]  # the likeliest tokens, likeliest first
    rank: int  # of the token that stands there: 1 is the likeliest


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request, as far as it has come.

    Attributes:
        index: place among the request's n samples.
        text: the tokens as text; "" without a tokenizer.
        token_ids: the tokens drawn, a final stop token included.
        logprobs: one entry a token, if they were asked for.
        finish_reason: None while it runs; "stop", "length", "abort" or "error".
        stop_reason: the stop token id or stop string that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' logprobs in the order of the tokens, float64."""
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
    num_accepted_tokens: int = 0  # drafts that were right

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token of sample 0."""
        return self.token_times[0] - self.arrival if self.token_times else None


@dataclass(slots=True)
class RequestOutput:
    """A request and its samples so far.

    Attributes:
        request_id: the id that ``add_request`` gave back.
        prompt: text of the prompt, where it was given as text.
        prompt_token_ids: tokens of the prompt.
        seed: seed of the random numbers; the same prompt, parameters and seed give the same tokens and logprobs again.
        prompt_logprobs: one entry a prompt token, None for the first, if they were asked for.
        error: why the request ended with finish_reason "error", or was refused; its outputs hold what came before, one
            empty one of a prompt that was refused.
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
        """Tokens of the prompt that came from the prefix cache."""
        return 0 if self.metrics is None else self.metrics.num_cached_tokens
