"""Connections that make no progress are closed: requests that do not arrive whole, and answers that nobody reads."""

import asyncio
import contextlib
import importlib
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
    Offers to go on by another protocol (RFC 9110, section 7.8), such as h2c, are ignored.
    """
    return type("BoundedProtocol", (_Connection,), {"stall": seconds})


_BASE: Any = AutoHTTPProtocol
_COUNTS = hasattr(_BASE, "on_body")  # httptools, which keeps heads of any length; h11 bounds them itself
_HTTPTOOLS: Any = importlib.import_module("httptools") if _COUNTS else None


class _Connection(_BASE):
    """A connection that is looked at from time to time.

    Attributes:
        stall: seconds that it may stand still.
    """

    stall = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to look."""
        super().connection_made(transport)
        self._unfed: list[Any] = []  # what the parser is to read next, the first of it last
        self._offers = False  # whether the request that is read offers another protocol
        if _COUNTS:
            self.parser = _new_parser(self)
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
        self._unfed = [data]
        while self._unfed and not self.transport.is_closing():
            super().data_received(self._unfed.pop())
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
        if self._offers:
            return  # without its body: ``decline`` has it read once more
        self._reads, self._unread = False, 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Remember the request: uvicorn knows the newest one alone, and an earlier one may be answered still."""
        if _COUNTS and self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers = True
            return
        self._unread = 0
        super().on_headers_complete()
        begun = (*self._begun, self.cycle)
        self._begun = tuple(cycle for cycle in begun if cycle is not None and not cycle.response_complete)

    def decline(self, rest: memoryview) -> bool:
        """Have a request read without its offer, if it makes one: at such heads httptools stops, and takes no body.

        Args:
            rest: what came behind the head.
        """
        if not self._offers:
            return False
        self._offers = False
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = _new_parser(self)
        self._unfed += [rest, b"\r\n".join([*lines, b"\r\n"])]
        return True

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


class _Parser(_HTTPTOOLS.HttpRequestParser if _COUNTS else object):  # type: ignore[misc]
    """httptools' parser, which asks its connection to decline what would end the reading of HTTP."""

    def __init__(self, connection: _Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: bytes | memoryview) -> None:
        """Read."""
        try:
            super().feed_data(data)
        except _HTTPTOOLS.HttpParserUpgrade as offer:
            if not self._connection.decline(memoryview(data)[offer.args[0] :]):
                raise


def _new_parser(connection: _Connection) -> _Parser:
    """A parser as uvicorn makes them."""
    parser = _Parser(connection)
    with contextlib.suppress(AttributeError):  # httptools before 0.6.3
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
