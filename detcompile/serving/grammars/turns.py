"""Turns: one piece of work at a time; whose owner has had the least time goes next, so that nobody keeps others out."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

__all__ = ["Turns"]


class Turns:
    """A fair lock. Each owner has a queue; the owner with the least time so far goes next. For the event loop's thread
    only."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # no empty queues
        self._seconds: dict[str, float] = {}  # used by owners since all queues were last empty
        self._busy = False

    def num_waiting(self, owner: str) -> int:
        """Return how many tasks of an owner wait."""
        return len(self._queues.get(owner, ()))

    @contextlib.asynccontextmanager
    async def turn(self, owner: str, seconds: float) -> AsyncIterator[None]:
        """Wait for the lock and hold it within the context.

        Raises:
            TimeoutError: waited longer than ``seconds``.
        """
        await self._begin(owner, seconds)
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            yield
        finally:
            self._busy = False
            self._seconds[owner] = self._seconds.get(owner, 0.0) + clock() - start
            self._grant_next()

    async def _begin(self, owner: str, seconds: float) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(granted)
        self._grant_next()
        try:
            async with asyncio.timeout(seconds):
                await granted
        except (TimeoutError, asyncio.CancelledError):
            if granted.done() and not granted.cancelled():  # it got the lock at the same time
                self._busy = False
                self._grant_next()
            else:
                self._drop(owner, granted)
            raise

    def _drop(self, owner: str, granted: asyncio.Future[None]) -> None:
        queue = self._queues[owner]
        queue.remove(granted)
        if not queue:
            del self._queues[owner]

    def _grant_next(self) -> None:
        if self._busy:
            return
        if not self._queues:
            self._seconds.clear()
            return
        owner = min(self._queues, key=lambda waiter: self._seconds.get(waiter, 0.0))
        granted = self._queues[owner][0]
        self._drop(owner, granted)
        self._busy = True
        granted.set_result(None)
