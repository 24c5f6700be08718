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
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}

    def watch(self, answer: Answer) -> None:
        """An answer has begun to wait."""
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self._whole, self._end, answer, "took over", self._whole, 504)]
        if not isinstance(answer, Errand):  # which has no tokens of its own
            timers.append(loop.call_later(self._first, self._end_unless_begun, answer))
        self._timers[answer.request_id] = timers

    def forget(self, answer: Answer) -> None:
        """Nobody waits for an answer any more."""
        for timer in self._timers.pop(answer.request_id, ()):
            timer.cancel()

    def _end_unless_begun(self, answer: Answer) -> None:
        if answer.first_token is None:
            self._end(answer, "waited for its first token for over", self._first, 503)

    def _end(self, answer: Answer, what: str, seconds: float, status: int) -> None:
        if not answer.finished:
            self._cancel(answer)
            answer.fail(OverdueError(f"the request {what} {seconds:g} s", status))
