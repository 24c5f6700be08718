"""Wakes readers of answers that have grown, a few per turn of the event loop."""

import asyncio
from collections import OrderedDict

__all__ = ["News", "Notices"]

TOGETHER = 32  # readers to wake per turn; between turns the event loop accepts connections and reads


class News:
    """Signals progress to any number of readers; none misses any."""

    __slots__ = ("_readers", "count")

    def __init__(self) -> None:
        self.count = 0  # signals so far; read it before reading the answer, then wait for more
        self._readers: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """Signal progress."""
        self.count += 1
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    async def wait(self, seen: int) -> None:
        """Wait until ``count`` exceeds ``seen``."""
        if self.count == seen:
            self._readers.append(asyncio.get_running_loop().create_future())
            await self._readers[-1]


class Notices:
    """Signals to send, in order of arrival.

    A step extends a thousand answers at once. If all readers were woken together, a new connection would wait until all
    had sent their data, because uvloop accepts one connection per turn. A reader not woken before the next step handles
    both steps at once.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[News, None] = OrderedDict()

    def put(self, news: News) -> None:
        """Queue a signal."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._wake)
        self._due[news] = None

    def _wake(self) -> None:
        for _ in range(min(TOGETHER, len(self._due))):
            self._due.popitem(last=False)[0].tell()
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake)
