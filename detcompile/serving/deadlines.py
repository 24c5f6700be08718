"""Deadlines: answers that wait too long for their first token, or take too long as a whole, end with an error."""

import asyncio
from collections.abc import Callable

from detcompile.serving.engines.answers import Answer, Errand
from detcompile.serving.http_errors import OverdueError

__all__ = ["Deadlines"]


class Deadlines:
    """Timers of answers. What is overdue is no shorter answer: that would be another one than the same request gives.

    Args:
        first: seconds for the first token.
        whole: seconds for all of an answer.
        cancel: called with an answer that is overdue, before it is told so.
    """

    def __init__(self, first: float, whole: float, cancel: Callable[[Answer], None]) -> None:
        self._first = first
        self._whole = whole
        self._cancel = cancel
        self._timers: dict[str, asyncio.TimerHandle] = {}  # one an answer: there are many

    def watch(self, answer: Answer) -> None:
        """An answer has begun to wait."""
        has_tokens = not isinstance(answer, Errand)
        seconds = min(self._first, self._whole) if has_tokens else self._whole
        self._look_after(seconds, answer, asyncio.get_running_loop().time())

    def forget(self, answer: Answer) -> None:
        """Nobody waits for an answer any more."""
        timer = self._timers.pop(answer.request_id, None)
        if timer is not None:
            timer.cancel()

    def _look_after(self, seconds: float, answer: Answer, since: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[answer.request_id] = loop.call_at(since + seconds, self._look, seconds, answer, since)

    def _look(self, seconds: float, answer: Answer, since: float) -> None:
        if seconds >= self._whole:
            self._end(answer, "took over", self._whole, 504)
        elif answer.first_token is None:
            self._end(answer, "waited for its first token for over", self._first, 503)
        else:
            self._look_after(self._whole, answer, since)

    def _end(self, answer: Answer, what: str, seconds: float, status: int) -> None:
        if not answer.finished:
            self._cancel(answer)
            answer.fail(OverdueError(f"the request {what} {seconds:g} s", status))
