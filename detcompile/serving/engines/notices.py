"""Notices: wakes those who read answers that got longer, some in each turn of the event loop."""

import asyncio
from collections import OrderedDict

__all__ = ["News", "Notices"]

TOGETHER = 32  # readers that are woken in one turn; between turns connections are taken, and what came is read


class News:
    """Tells any number of readers that there is news; none of them misses any."""

    __slots__ = ("_readers", "count")

    def __init__(self) -> None:
        self.count = 0  # how often there was some; look at it before at what there is, then wait for more
        self._readers: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """There is news."""
        self.count += 1
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    async def wait(self, seen: int) -> None:
        """Wait until there is more than ``count`` said when the reader looked."""
        if self.count == seen:
            self._readers.append(asyncio.get_running_loop().create_future())
            await self._readers[-1]


class Notices:
    """Readers that have news to take, the one that waits for longest first.

    A step gives news of a thousand streams at once. Where all were woken together, a request that arrives would wait
    until all had been sent: uvloop takes one connection a turn. A reader that is not woken before the next step gets
    the news of both at once.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[News, None] = OrderedDict()

    def put(self, news: News) -> None:
        """There is news to tell."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._wake)
        self._due[news] = None

    def _wake(self) -> None:
        for _ in range(min(TOGETHER, len(self._due))):
            self._due.popitem(last=False)[0].tell()
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake)
