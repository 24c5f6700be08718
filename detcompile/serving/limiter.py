"""Room: how much may be open and wait at a time; what is beyond that is refused at once, with when to come again."""

import contextlib
import math
from collections.abc import Iterator

from detcompile.serving.engines.answers import Answer
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.metrics import Metrics

__all__ = ["Room"]

MOST_RETRY_SECONDS = 60


class Room:
    """Counts what is open.

    Args:
        max_queue: samples that may be open at a time, with the requests that no engine has seen yet.
        max_queued_tokens: prompt tokens, over all open answers without a token yet, beyond which no more are taken.
        metrics: counts those that are refused, and knows how fast prompts are read.

    Attributes:
        num_open: samples.
        num_queued: prompt tokens of answers without a token.
        num_waiting: requests whose grammar waits for its check, or whose text for the tokenizer.
    """

    def __init__(self, max_queue: int, max_queued_tokens: int, metrics: Metrics) -> None:
        self._max_queue = max_queue
        self._max_queued_tokens = max_queued_tokens
        self._metrics = metrics
        self.num_open = self.num_queued = self.num_waiting = 0

    def require(self, num_tokens: int, num_samples: int) -> None:
        """Refuse what is beyond the bounds. Prompts longer than the bound alone are taken where nothing else is open.

        Raises:
            HTTPError: 429, or 400 where it never fits.
        """
        if num_samples > self._max_queue:
            raise HTTPError(400, f"{num_samples} answers in one request, of {self._max_queue} at most: ask in parts")
        num_open = self.num_open + self.num_waiting
        fits = self.num_queued + num_tokens <= self._max_queued_tokens or not self.num_open
        if num_open + num_samples > self._max_queue or not fits:
            raise self._refusal()

    @contextlib.contextmanager
    def waiting(self, num_own: int = 0) -> Iterator[None]:
        """A request waits for something else than an engine.

        Args:
            num_own: requests of the same client that wait for the same: half of all that may be open, at most.

        Raises:
            HTTPError: 429.
        """
        self.require(0, 1)
        if num_own >= max(1, self._max_queue // 2):
            raise self._refusal()
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def take(self, answer: Answer) -> None:
        """An answer is open."""
        self.num_open += answer.params.n
        self.num_queued += len(answer.prompt_ids)

    def begun(self, answer: Answer) -> None:
        """An open answer has its first token."""
        self.num_queued -= len(answer.prompt_ids)

    def leave(self, answer: Answer) -> None:
        """An answer is not open any more."""
        self.num_open -= answer.params.n
        if answer.first_token is None:
            self.num_queued -= len(answer.prompt_ids)

    def _refusal(self) -> HTTPError:
        self._metrics.refused.inc()
        wait = max(1, min(MOST_RETRY_SECONDS, math.ceil(self.num_queued / self._metrics.prefill_rate())))
        held = f"{self.num_open} answers are open, {self.num_waiting} requests and {self.num_queued} prompt tokens wait"
        most = f"{self._max_queue} and {self._max_queued_tokens} at most: try again in {wait} s"
        return HTTPError(429, f"{held}, of {most}", retry_after=wait)
