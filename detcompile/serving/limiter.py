"""AdmissionLimiter: bounds on what is open and waits. A request beyond them is refused at once, with a Retry-After."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence, Sized

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


class _Held:
    """What is open and waits, of one owner or of all."""

    __slots__ = ("num_open", "num_queued", "num_waiting")

    def __init__(self) -> None:
        self.num_open = self.num_queued = self.num_waiting = 0

    def add(self, *, samples: int = 0, tokens: int = 0, waiting: int = 0) -> None:
        self.num_open += samples
        self.num_queued += tokens
        self.num_waiting += waiting

    @property
    def is_empty(self) -> bool:
        return not (self.num_open or self.num_queued or self.num_waiting)


class Slot:
    """One open answer's share of the bounds. ``AdmissionLimiter.take`` makes it, ``release`` gives it back once."""

    def __init__(self, limiter: "AdmissionLimiter", owner: str, num_samples: int, num_tokens: int) -> None:
        self._limiter = limiter
        self._owner = owner
        self._num_samples = num_samples
        self._num_tokens = num_tokens

    def begin(self) -> None:
        """Count the prompt as read: the answer has its first token."""
        self._limiter.count(self._owner, tokens=-self._num_tokens)
        self._num_tokens = 0

    def release(self) -> None:
        """Give the slot back."""
        self._limiter.count(self._owner, samples=-self._num_samples, tokens=-self._num_tokens)
        self._num_samples = self._num_tokens = 0


class AdmissionLimiter:
    """Admits requests within bounds. Where there are several API keys, each may hold half of a bound.

    Args:
        max_queue: samples that may be open at a time, with the requests that no engine has seen yet.
        max_queued_tokens: prompt tokens of open answers without a first token.
        metrics: counts refusals, estimates how fast prompts are read, and shows what is open.
        keys: the API keys that the server knows now.
    """

    def __init__(self, max_queue: int, max_queued_tokens: int, metrics: Metrics, keys: Sized = ()) -> None:
        self._max_queue = max_queue
        self._max_queued_tokens = max_queued_tokens
        self._metrics = metrics
        self._keys = keys
        self._all = _Held()
        self._owners: dict[str, _Held] = {}  # those that hold anything
        metrics.show("open_slots", "Samples that are open.", lambda: self.num_open)
        metrics.show("queued_tokens", "Prompt tokens that wait.", lambda: self.num_queued)
        metrics.show("waiting_requests", "Requests before their grammar check or tokenizer.", lambda: self.num_waiting)

    @property
    def num_open(self) -> int:
        """Open samples."""
        return self._all.num_open

    @property
    def num_queued(self) -> int:
        """Prompt tokens of answers without a first token."""
        return self._all.num_queued

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a grammar check or for the tokenizer."""
        return self._all.num_waiting

    def require(self, owner: str, num_samples: int, lengths: Sequence[int] = ()) -> None:
        """Refuse a request beyond the bounds.

        A prompt that is longer than the bound of tokens counts as that bound, so it is taken once nothing else waits.

        Args:
            owner: sha256 of the API key that asks; empty where the server has none.
            lengths: tokens of each prompt, where they are known.

        Raises:
            HTTPError: 429, or 400 where it never fits.
        """
        most, most_tokens = self._share(self._max_queue), self._share(self._max_queued_tokens)
        if num_samples > most:
            raise HTTPError(400, f"{num_samples} answers in one request, of {most} at most: ask in parts")
        if len(lengths) > 1 and sum(lengths) > most_tokens:
            raise HTTPError(400, f"{sum(lengths)} prompt tokens in one request, of {most_tokens} at most: ask in parts")
        num_tokens = min(sum(lengths), most_tokens)
        own = self._owners.get(owner, _Held())
        for held, bound, bound_tokens in (
            (self._all, self._max_queue, self._max_queued_tokens),
            (own, most, most_tokens),
        ):
            fits = held.num_open + held.num_waiting + num_samples <= bound
            if not fits or held.num_queued + num_tokens > bound_tokens:
                raise self._refusal(held, bound, bound_tokens)

    @contextlib.contextmanager
    def waiting(self, owner: str, num_alike: int = 0) -> Iterator[None]:
        """Count a request that waits for something else than an engine.

        Args:
            owner: as of ``require``.
            num_alike: requests of the same owner that wait for the same: half of all that may be open, at most.

        Raises:
            HTTPError: 429.
        """
        self.require(owner, 1)
        if num_alike >= max(1, self._max_queue // 2):
            raise self._refusal(self._all, self._max_queue, self._max_queued_tokens)
        self.count(owner, waiting=1)
        try:
            yield
        finally:
            self.count(owner, waiting=-1)

    def take(self, owner: str, num_samples: int, num_tokens: int) -> Slot:
        """Take a slot for an answer.

        Args:
            owner: as of ``require``.
            num_tokens: tokens of its prompt.
        """
        counted = min(num_tokens, self._share(self._max_queued_tokens))
        self.count(owner, samples=num_samples, tokens=counted)
        return Slot(self, owner, num_samples, counted)

    def count(self, owner: str, **more: int) -> None:
        """Add to what an owner and all of them hold; for slots."""
        own = self._owners.setdefault(owner, _Held())
        own.add(**more)
        self._all.add(**more)
        if own.is_empty:
            del self._owners[owner]

    def _share(self, bound: int) -> int:
        """What one owner may hold of a bound."""
        return max(1, bound // 2) if len(self._keys) > 1 else bound

    def _refusal(self, held: _Held, bound: int, bound_tokens: int) -> HTTPError:
        self._metrics.refused.inc()
        wait = max(1, min(MOST_RETRY_SECONDS, math.ceil(held.num_queued / self._metrics.prefill_rate())))
        whose = "" if held is self._all else " of this API key"
        open_now = f"{held.num_open} answers{whose} are open"
        waits = f"{held.num_waiting} requests and {held.num_queued} prompt tokens wait"
        most = f"{bound} and {bound_tokens} at most: try again in {wait} s"
        return HTTPError(429, f"{open_now}, {waits}, of {most}", retry_after=wait)
