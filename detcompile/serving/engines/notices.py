"""Notices: wakes those who read answers that got longer, some in each turn of the event loop."""

import asyncio
from collections import OrderedDict

__all__ = ["Bell", "Notices"]

TOGETHER = 32  # readers that are woken in one turn; between turns connections are taken, and what came is read


class Bell:
    """What one reader of answers waits at: an asyncio.Event for one, at a third of its memory and time."""

    __slots__ = ("_reader", "_rung")

    def __init__(self) -> None:
        self._rung = False
        self._reader: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """There is news."""
        self._rung = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def wait(self) -> None:
        """Wait for news since the last time."""
        if not self._rung:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._reader = None
        self._rung = False


class Notices:
    """Readers that have news to take, the one that waits for longest first.

    A step gives news of a thousand streams at once. Where all were woken together, a request that arrives would wait
    until all had been sent: uvloop takes one connection a turn. A reader that is not woken before the next step gets
    the news of both at once.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[Bell, None] = OrderedDict()

    def put(self, reader: Bell) -> None:
        """There is news for a reader."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._wake)
        self._due[reader] = None

    def _wake(self) -> None:
        for _ in range(min(TOGETHER, len(self._due))):
            self._due.popitem(last=False)[0].ring()
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake)
