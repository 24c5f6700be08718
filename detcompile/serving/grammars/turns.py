"""Turns: one piece of work at a time; whose owner has had the least time goes next, so that nobody keeps others out."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

__all__ = ["Turns"]


class Turns:
    """Lines of those who wait, one an owner. All methods are for the event loop's thread."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # none is empty
        self._seconds: dict[str, float] = {}  # that owners have had since the last time that nobody waited
        self._busy = False

    def num_waiting(self, owner: str) -> int:
        """How many of an owner wait."""
        return len(self._lines.get(owner, ()))

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, seconds: float) -> AsyncIterator[None]:
        """Wait for a turn, and have it until the end of the block. Who is cancelled waits no longer.

        Raises:
            TimeoutError: it took longer than ``seconds``.
        """
        await self._begin(owner, seconds)
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            yield
        finally:
            self._busy = False
            self._seconds[owner] = self._seconds.get(owner, 0.0) + clock() - start
            self._call_next()

    async def _begin(self, owner: str, seconds: float) -> None:
        called = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(called)
        self._call_next()
        try:
            async with asyncio.timeout(seconds):
                await called
        except (TimeoutError, asyncio.CancelledError):
            if called.done() and not called.cancelled():  # the turn came at the same time
                self._busy = False
                self._call_next()
            else:
                self._drop(owner, called)
            raise

    def _drop(self, owner: str, called: asyncio.Future[None]) -> None:
        line = self._lines[owner]
        line.remove(called)
        if not line:
            del self._lines[owner]

    def _call_next(self) -> None:
        if self._busy:
            return
        if not self._lines:
            self._seconds.clear()
            return
        owner = min(self._lines, key=lambda own: self._seconds.get(own, 0.0))
        called = self._lines[owner][0]
        self._drop(owner, called)
        self._busy = True
        called.set_result(None)
