"""Connections that make no progress are closed: requests that do not arrive whole, and answers that nobody reads."""

import asyncio
import contextlib
import importlib
from collections import deque
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.flow_control import FlowControl

__all__ = ["bounded_protocol"]

MOST_HEAD = 1 << 16  # bytes of a request's head, or between two parts of its body
MOST_AHEAD = 16  # unanswered requests of a connection, beyond which no more are parsed
SLICE = 4096  # bytes that are parsed at a time
LOOKS = 4  # at a connection, in the time that it may stand still


def bounded_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with an end for connections that stand still.

    One is closed whose request, from its first byte or, where it is the first, from the connection's beginning, did not
    arrive whole in this time; and one that took none of the bytes that lay ready for it. Its request is then cancelled,
    as that of any client that leaves. A head that is longer than MOST_HEAD is refused before it has come. A client that
    sends requests without waiting for answers is read no further once some wait.
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
        self.flow = _Flow(transport)
        self._unparsed: deque[Any] = deque()  # bytes
        self._offers = False  # whether the request that is read offers another protocol
        if _COUNTS:
            self.parser = _new_parser(self)
        self._unanswered: deque[Any] = deque()  # uvicorn's cycles of requests, oldest first
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
        """Parse what has come, unless too many requests wait for their answers."""
        self._unparsed.append(data)
        self._parse()

    def on_response_complete(self) -> None:
        """Go on with what was held back: the oldest request has its answer."""
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()
        self._parse()

    def _parse(self) -> None:
        while self._unparsed and len(self._unanswered) <= MOST_AHEAD and not self.transport.is_closing():
            data = self._unparsed.popleft()
            if len(data) > SLICE:
                self._unparsed.appendleft(memoryview(data)[SLICE:])
            self._unread += len(data[:SLICE])
            super().data_received(data[:SLICE])
            if _COUNTS and self._unread > MOST_HEAD and not self.transport.is_closing():
                if self._unanswered:
                    self.transport.abort()  # nothing can be said in the middle of an answer
                else:
                    self.send_400_response(f"The head of a request may have {MOST_HEAD} bytes.")
        if self.transport.is_closing():
            self._unparsed.clear()
        self.flow.held = bool(self._unparsed)
        if self.flow.held:
            self.flow.pause_reading()
        elif not self._unanswered and not self.transport.is_closing():  # else who reads the newest request resumes
            self.flow.resume_reading()

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
        self._unanswered.append(self.cycle)

    def decline(self, rest: memoryview) -> bool:
        """Have a request read without its offer, if it makes one: at such heads httptools stops, and takes no body.

        Args:
            rest: what came behind the head.
        """
        if not self._offers:
            return False
        self._offers, self._unread = False, 0
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = _new_parser(self)
        self._unparsed.extendleft([rest, b"\r\n".join([*lines, b"\r\n"])])  # the last of these comes first
        return True

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, and close the connection."""
        super().send_400_response(msg)
        self._leave()

    def _leave(self) -> None:
        """Whatever is answered on this connection has no client any more."""
        self._unparsed.clear()
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def _look(self) -> None:
        cycle, buffered = self.cycle, self.transport.get_write_buffer_size()
        answering = cycle is not None and not cycle.response_complete
        idle = cycle is not None and cycle.response_complete and not self._reads  # uvicorn's keep-alive ends it
        arrives = not idle and not self._unparsed and (not answering or cycle.more_body)
        stuck = buffered > 0 and (self.flow.write_paused or not answering)  # nothing is added to the buffer
        seen = (cycle, buffered if stuck else 0)
        self._still = self._still + 1 if (arrives or stuck) and seen == self._seen else 0
        self._seen = seen
        if self._still >= LOOKS:
            self.transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self.stall / LOOKS, self._look)


class _Flow(FlowControl):
    """uvicorn's flow control, which does not read while bytes that have come are ``held`` back."""

    held = False

    def resume_reading(self) -> None:
        """Read again."""
        if not self.held:
            super().resume_reading()


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
