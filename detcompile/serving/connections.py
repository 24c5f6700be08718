"""Connections that make no progress are closed: requests that do not arrive whole, and answers that nobody reads."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["bounded_protocol"]

MOST_HEAD = 1 << 16  # bytes of a request's head, or between two parts of its body; the last read may bring more
LOOKS = 4  # at a connection, in the time that it may stand still


def bounded_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with an end for connections that stand still.

    One is closed whose request, from its first byte or, where it is the first, from the connection's beginning, did not
    arrive whole in this time; and one that took none of the bytes that lay ready for it. Its request is then cancelled,
    as that of any client that leaves. A head that is longer than MOST_HEAD is refused before it has come.
    """
    return type("BoundedProtocol", (_Connection,), {"stall": seconds})


_BASE: Any = AutoHTTPProtocol
_COUNTS = hasattr(_BASE, "on_body")  # httptools, which keeps heads of any length; h11 bounds them itself


class _Connection(_BASE):
    """A connection that is looked at from time to time.

    Attributes:
        stall: seconds that it may stand still.
    """

    stall = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to look."""
        super().connection_made(transport)
        self._begun: tuple[Any, ...] = ()
        self._reads = False  # whether a request has begun, and is not whole
        self._unread = 0  # bytes since a head, a part of a body or a request was whole
        self._seen = (None, 0)
        self._still = 0
        self._timer = asyncio.get_running_loop().call_later(self.stall / LOOKS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self._timer.cancel()
        super().connection_lost(exc)
        self._leave()

    def data_received(self, data: bytes) -> None:
        """Read, as long as something becomes whole."""
        self._unread += len(data)
        super().data_received(data)
        if _COUNTS and self._unread > MOST_HEAD and not self.transport.is_closing():
            if any(not cycle.response_complete for cycle in self._begun):
                self.transport.abort()  # nothing can be said in the middle of an answer
            else:
                self.send_400_response(f"The head of a request may have {MOST_HEAD} bytes.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._reads = True
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """A part of a body is there."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is there."""
        self._reads, self._unread = False, 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Remember the request: uvicorn knows the newest one alone, and an earlier one may be answered still."""
        self._unread = 0
        super().on_headers_complete()
        begun = (*self._begun, self.cycle)
        self._begun = tuple(cycle for cycle in begun if cycle is not None and not cycle.response_complete)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, and close the connection."""
        super().send_400_response(msg)
        self._leave()

    def _leave(self) -> None:
        """Whatever is answered on this connection has no client any more."""
        for cycle in self._begun:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def _look(self) -> None:
        cycle, buffered = self.cycle, self.transport.get_write_buffer_size()
        answering = cycle is not None and not cycle.response_complete
        idle = cycle is not None and cycle.response_complete and not self._reads  # uvicorn's keep-alive ends it
        arrives = not idle and (not answering or cycle.more_body)
        stuck = buffered > 0 and (self.flow.write_paused or not answering)  # nothing is added to the buffer
        seen = (cycle, buffered if stuck else 0)
        self._still = self._still + 1 if (arrives or stuck) and seen == self._seen else 0
        self._seen = seen
        if self._still >= LOOKS:
            self.transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self.stall / LOOKS, self._look)
