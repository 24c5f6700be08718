"""Deadlines: answers that wait too long for their first token, or run too long, end with an error."""

import asyncio
from collections.abc import Callable

from detcompile.serving.engines.answers import Answer, AuxiliaryTask
from detcompile.serving.http_errors import OverdueError

__all__ = ["Deadlines"]


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

    def watch(self, answer: Answer) -> None:
        """Start the timer of an answer."""
        has_tokens = not isinstance(answer, AuxiliaryTask)
        seconds = min(self._first, self._whole) if has_tokens else self._whole
        self._schedule(seconds, answer, asyncio.get_running_loop().time())

    def forget(self, answer: Answer) -> None:
        """Stop the timer of an answer."""
        timer = self._timers.pop(answer.request_id, None)
        if timer is not None:
            timer.cancel()

    def _schedule(self, seconds: float, answer: Answer, since: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[answer.request_id] = loop.call_at(since + seconds, self._check, seconds, answer, since)

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
