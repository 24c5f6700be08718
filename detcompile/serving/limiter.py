"""Limits of requests: how many may be open or wait (else 429 with Retry-After), and how long each may take."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence, Sized

from detcompile.serving.engines.answers import Answer, AuxiliaryTask
from detcompile.serving.http_errors import HTTPError, OverdueError
from detcompile.serving.metrics import Metrics

MOST_RETRY_SECONDS = 60


class Reservation:
    """Resources of one request, released together when the request ends.

    The code that runs a request releases its reservation on every exit path. Resources added later are released at
    once, so a coroutine that ignores its cancellation cannot keep a slot.

    Attributes:
        released: the request has ended.
    """

    def __init__(self) -> None:
        self._holds = contextlib.ExitStack()
        self.released = False

    def add(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the request ends; at once if it has ended."""
        if self.released:
            release()
        else:
            self._holds.callback(release)

    def move_to(self, other: "Reservation") -> None:
        """Transfer all resources to another reservation."""
        other.add(self._holds.pop_all().close)

    def release(self) -> None:
        """Release everything. A second call does nothing."""
        self.released = True
        self._holds.close()


class _Held:
    """Open and waiting counts of one owner, or of all together."""

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
    """One open answer's share of the limits. ``AdmissionLimiter.take`` creates it; release it once."""

    def __init__(self, limiter: "AdmissionLimiter", owner: str, num_samples: int, num_tokens: int) -> None:
        self._limiter = limiter
        self._owner = owner
        self._num_samples = num_samples
        self._num_tokens = num_tokens

    def begin(self) -> None:
        """Stop counting the prompt as queued: the answer has its first token."""
        self._limiter.count(self._owner, tokens=-self._num_tokens)
        self._num_tokens = 0

    def release(self) -> None:
        """Release the slot."""
        self._limiter.count(self._owner, samples=-self._num_samples, tokens=-self._num_tokens)
        self._num_samples = self._num_tokens = 0


class AdmissionLimiter:
    """Admits requests within limits. With several API keys, each may use half of a limit.

    Args:
        max_queue: open samples, plus requests that no engine has seen yet.
        max_queued_tokens: prompt tokens of open answers without a first token.
        metrics: counts refusals, estimates the prefill rate, and exports the limiter's gauges.
        keys: the current API keys.
    """

    def __init__(self, max_queue: int, max_queued_tokens: int, metrics: Metrics, keys: Sized = ()) -> None:
        self._max_queue = max_queue
        self._max_queued_tokens = max_queued_tokens
        self._metrics = metrics
        self._keys = keys
        self._all = _Held()
        self._owners: dict[str, _Held] = {}  # without empty entries
        metrics.add_gauge("open_slots", "Open samples.", lambda: self.num_open)
        metrics.add_gauge("queued_tokens", "Prompt tokens of answers without a first token.", lambda: self.num_queued)
        waiting = "Requests that wait for a grammar check or the tokenizer."
        metrics.add_gauge("waiting_requests", waiting, lambda: self.num_waiting)

    @property
    def num_open(self) -> int:
        """Return the number of open samples."""
        return self._all.num_open

    @property
    def num_queued(self) -> int:
        """Return the prompt tokens of answers without a first token."""
        return self._all.num_queued

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for a grammar check or the tokenizer."""
        return self._all.num_waiting

    def require(self, owner: str, num_samples: int, lengths: Sequence[int] = ()) -> None:
        """Refuse a request beyond the limits.

        A prompt longer than the token limit counts as the limit, so it is admitted once nothing else waits.

        Args:
            owner: sha256 of the request's API key; empty if the server has none.
            lengths: tokens of each prompt, if known.

        Raises:
            HTTPError: 429, or 400 if the request can never fit.
        """
        most, most_tokens = self._share(self._max_queue), self._share(self._max_queued_tokens)
        if num_samples > most:
            raise HTTPError(400, f"{num_samples} answers in one request, at most {most} are allowed: split it")
        if len(lengths) > 1 and sum(lengths) > most_tokens:
            message = f"{sum(lengths)} prompt tokens in one request, at most {most_tokens} are allowed: split it"
            raise HTTPError(400, message)
        num_tokens = min(sum(lengths), most_tokens)
        of_owner = self._owners.get(owner, _Held())
        for held, bound, bound_tokens in (
            (self._all, self._max_queue, self._max_queued_tokens),
            (of_owner, most, most_tokens),
        ):
            fits = held.num_open + held.num_waiting + num_samples <= bound
            if not fits or held.num_queued + num_tokens > bound_tokens:
                raise self._refusal(held, bound, bound_tokens)

    @contextlib.contextmanager
    def waiting(self, owner: str, num_alike: int = 0) -> Iterator[None]:
        """Count a request while it waits before it reaches an engine.

        Args:
            owner: see ``require``.
            num_alike: requests of the same owner that wait for the same resource; at most half of ``max_queue``.

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
            owner: see ``require``.
            num_tokens: tokens of its prompt.
        """
        counted = min(num_tokens, self._share(self._max_queued_tokens))
        self.count(owner, samples=num_samples, tokens=counted)
        return Slot(self, owner, num_samples, counted)

    def count(self, owner: str, **more: int) -> None:
        """Add to the counts of an owner and of all owners; called by slots."""
        of_owner = self._owners.setdefault(owner, _Held())
        of_owner.add(**more)
        self._all.add(**more)
        if of_owner.is_empty:
            del self._owners[owner]

    def _share(self, bound: int) -> int:
        """Return one owner's share of a limit."""
        return max(1, bound // 2) if len(self._keys) > 1 else bound

    def _refusal(self, held: _Held, bound: int, bound_tokens: int) -> HTTPError:
        self._metrics.refused.inc()
        wait = max(1, min(MOST_RETRY_SECONDS, math.ceil(held.num_queued / self._metrics.prefill_rate())))
        whose = "" if held is self._all else " of this API key"
        open_now = f"{held.num_open} answers{whose} are open"
        waits = f"{held.num_waiting} requests and {held.num_queued} prompt tokens wait"
        limits = f"limits are {bound} answers and requests, {bound_tokens} tokens"
        return HTTPError(429, f"{open_now}, {waits} ({limits}): try again in {wait} s", retry_after=wait)


class Deadlines:
    """Per-answer timers. A late answer fails; it is never truncated, because a truncated answer would not reproduce.

    Args:
        first: seconds until the first token.
        whole: seconds until the end.
        cancel: called with a late answer before it fails.
    """

    def __init__(self, first: float, whole: float, cancel: Callable[[Answer], None]) -> None:
        self._first = first
        self._whole = whole
        self._cancel = cancel
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by request_id
        self._watched: dict[str, tuple[float, Answer, float]] = {}  # arguments of _schedule, by request_id
        self._stopped: float | None = None  # time at which the clock was stopped; None while it runs

    def watch(self, answer: Answer) -> None:
        """Start the timer of an answer."""
        has_tokens = not isinstance(answer, AuxiliaryTask)
        seconds = min(self._first, self._whole) if has_tokens else self._whole
        now = asyncio.get_running_loop().time() if self._stopped is None else self._stopped
        self._schedule(seconds, answer, now)

    def forget(self, answer: Answer) -> None:
        """Stop the timer of an answer."""
        self._watched.pop(answer.request_id, None)
        timer = self._timers.pop(answer.request_id, None)
        if timer is not None:
            timer.cancel()

    def pause(self) -> None:
        """Stop the clock of all answers until ``resume``: time in which no answer can run does not count."""
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().time()
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    def resume(self) -> None:
        """Restart the clock if it was stopped."""
        if self._stopped is not None:
            passed, self._stopped = asyncio.get_running_loop().time() - self._stopped, None
            for seconds, answer, since in list(self._watched.values()):
                self._schedule(seconds, answer, since + passed)

    def _schedule(self, seconds: float, answer: Answer, since: float) -> None:
        self._watched[answer.request_id] = seconds, answer, since
        if self._stopped is None:
            timer = asyncio.get_running_loop().call_at(since + seconds, self._check, seconds, answer, since)
            self._timers[answer.request_id] = timer

    def _check(self, seconds: float, answer: Answer, since: float) -> None:
        if seconds >= self._whole:
            self._end(answer, "took over", self._whole, 504)
        elif answer.first_token is None:
            self._end(answer, "waited for its first token for over", self._first, 503)
        else:
            self._schedule(self._whole, answer, since)

    def _end(self, answer: Answer, what: str, seconds: float, status: int) -> None:
        if not answer.finished:
            self._cancel(answer)
            answer.fail(OverdueError(f"the request {what} {seconds:g} s", status))
