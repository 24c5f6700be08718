"""AdmissionLimiter: bounds on what is open and waits. A request beyond them is refused at once, with a Retry-After."""

import contextlib
import math
from collections.abc import Callable, Iterator

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.metrics import Metrics

__all__ = ["AdmissionLimiter", "Reservation", "Slot"]

MOST_RETRY_SECONDS = 60


class Reservation:
    """What one request holds: slots, and whatever else has to be given back when the request is over.

    The code that runs a request releases its reservation on every way out. Anything added later is given back at once,
    so a coroutine that ignores its cancellation cannot keep a slot.

    Attributes:
        released: whether the request is over.
    """

    def __init__(self) -> None:
        self._holds = contextlib.ExitStack()
        self.released = False

    def add(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the request is over; now, if it is over."""
        if self.released:
            release()
        else:
            self._holds.callback(release)

    def move_to(self, other: "Reservation") -> None:
        """Hand everything held so far to another owner."""
        other.add(self._holds.pop_all().close)

    def release(self) -> None:
        """Give everything back. A second call does nothing."""
        self.released = True
        self._holds.close()


class Slot:
    """One open answer's share of the bounds. ``AdmissionLimiter.take`` makes it, ``release`` gives it back once."""

    def __init__(self, limiter: "AdmissionLimiter", num_samples: int, num_tokens: int) -> None:
        self._limiter = limiter
        self._num_samples = num_samples
        self._num_queued = num_tokens

    def begin(self) -> None:
        """Count the prompt as read: the answer has its first token."""
        self._limiter.num_queued -= self._num_queued
        self._num_queued = 0

    def release(self) -> None:
        """Give the slot back."""
        self.begin()
        self._limiter.num_open -= self._num_samples
        self._num_samples = 0


class AdmissionLimiter:
    """Admits requests within bounds.

    Args:
        max_queue: samples that may be open at a time, with the requests that no engine has seen yet.
        max_queued_tokens: prompt tokens of open answers without a first token.
        metrics: counts refusals, estimates how fast prompts are read, and shows what is open.

    Attributes:
        num_open: open samples.
        num_queued: prompt tokens of answers without a first token.
        num_waiting: requests that wait for a grammar check or for the tokenizer.
    """

    def __init__(self, max_queue: int, max_queued_tokens: int, metrics: Metrics) -> None:
        self._max_queue = max_queue
        self._max_queued_tokens = max_queued_tokens
        self._metrics = metrics
        self.num_open = self.num_queued = self.num_waiting = 0
        metrics.show("open_slots", "Samples that are open.", lambda: self.num_open)
        metrics.show("queued_tokens", "Prompt tokens that wait.", lambda: self.num_queued)
        metrics.show("waiting_requests", "Requests before their grammar check or tokenizer.", lambda: self.num_waiting)

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
        """Count a request that waits for something else than an engine.

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

    def take(self, num_samples: int, num_tokens: int) -> Slot:
        """Take a slot for an answer.

        Args:
            num_tokens: tokens of its prompt.
        """
        self.num_open += num_samples
        self.num_queued += num_tokens
        return Slot(self, num_samples, num_tokens)

    def _refusal(self) -> HTTPError:
        self._metrics.refused.inc()
        wait = max(1, min(MOST_RETRY_SECONDS, math.ceil(self.num_queued / self._metrics.prefill_rate())))
        held = f"{self.num_open} answers are open, {self.num_waiting} requests and {self.num_queued} prompt tokens wait"
        most = f"{self._max_queue} and {self._max_queued_tokens} at most: try again in {wait} s"
        return HTTPError(429, f"{held}, of {most}", retry_after=wait)
