"""A uvicorn protocol that closes stalled connections: slow requests, and responses that nobody reads."""

import asyncio
import contextlib
import importlib
from collections import deque
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.flow_control import FlowControl

MOST_HEAD = 1 << 16  # bytes of a request's head, or between two parts of its body
MOST_AHEAD = 16  # pipelined requests of a connection; no more are parsed before one is answered
SLICE = 4096  # bytes to parse at a time
CHECKS = 4  # per stall time


def bounded_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with a bound on stalls.

    A connection is closed and its request canceled if the request does not arrive completely within ``seconds`` of its
    first byte (for the first request: of the connection's start), or if the client reads nothing of a waiting response
    for so long. A head longer than MOST_HEAD is rejected before it is complete. While pipelined requests wait, no more
    are read. Offers to upgrade the protocol (RFC 9110, section 7.8), such as h2c, are ignored.
    """
    return type("BoundedProtocol", (_Connection,), {"stall": seconds})


_BASE: Any = AutoHTTPProtocol
_COUNTS = hasattr(_BASE, "on_body")  # httptools does not bound heads; h11 does
_HTTPTOOLS: Any = importlib.import_module("httptools") if _COUNTS else None


class _Connection(_BASE):
    """A connection with a stall timer.

    Attributes:
        stall: seconds without progress before it is closed.
    """

    stall = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the stall timer."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._unparsed: deque[Any] = deque()  # bytes
        self._offers = False  # the current request offers to upgrade the protocol
        if _COUNTS:
            self.parser = _new_parser(self)
        self._unanswered: deque[Any] = deque()  # uvicorn's request cycles, oldest first
        self._reads = False  # a request is incomplete
        self._unread = 0  # bytes since the last complete head, body part or request
        self._seen = (None, 0)
        self._still = 0
        self._timer = asyncio.get_running_loop().call_later(self.stall / CHECKS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the stall timer."""
        self._timer.cancel()
        super().connection_lost(exc)
        self._leave()

    def data_received(self, data: bytes) -> None:
        """Parse new bytes unless too many requests are unanswered."""
        self._unparsed.append(data)
        self._parse()

    def on_response_complete(self) -> None:
        """Continue with buffered bytes: the oldest request has its response."""
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
                    self.transport.abort()  # in the middle of a response: no error can be sent
                else:
                    self.send_400_response(f"The head of a request may have {MOST_HEAD} bytes.")
        if self.transport.is_closing():
            self._unparsed.clear()
        self.flow.held = bool(self._unparsed)
        if self.flow.held:
            self.flow.pause_reading()
        elif not self._unanswered and not self.transport.is_closing():  # else the newest request's reader resumes
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        """Note that a request is incomplete."""
        self._reads = True
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Reset the count of unread bytes."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        if self._offers:
            return  # its body is missing: ``decline`` parses it again
        self._reads, self._unread = False, 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Store the request's cycle: uvicorn keeps only the newest, but earlier ones may still be unanswered."""
        if _COUNTS and self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers = True
            return
        self._unread = 0
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def decline(self, rest: memoryview) -> bool:
        """Re-parse a request without its Upgrade header; httptools stops at it and would drop the body.

        Args:
            rest: the bytes after the head.
        """
        if not self._offers:
            return False
        self._offers, self._unread = False, 0
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = _new_parser(self)
        self._unparsed.extendleft([rest, b"\r\n".join([*lines, b"\r\n"])])  # extendleft reverses: the head comes first
        return True

    def send_400_response(self, msg: str) -> None:
        """Reject malformed bytes and close the connection."""
        super().send_400_response(msg)
        self._leave()

    def _leave(self) -> None:
        """Mark all unanswered requests as disconnected."""
        self._unparsed.clear()
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def _check(self) -> None:
        cycle, buffered = self.cycle, self.transport.get_write_buffer_size()
        answering = cycle is not None and not cycle.response_complete
        idle = cycle is not None and cycle.response_complete and not self._reads  # uvicorn's keep-alive ends it
        arrives = not idle and not self._unparsed and (not answering or cycle.more_body)
        stuck = buffered > 0 and (self.flow.write_paused or not answering)  # no bytes are added to the buffer
        seen = (cycle, buffered if stuck else 0)
        self._still = self._still + 1 if (arrives or stuck) and seen == self._seen else 0
        self._seen = seen
        if self._still >= CHECKS:
            self.transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self.stall / CHECKS, self._check)


class _Flow(FlowControl):
    """uvicorn's flow control, which stays paused while received bytes are ``held`` back."""

    held = False

    def resume_reading(self) -> None:
        """Resume unless bytes are held back."""
        if not self.held:
            super().resume_reading()


class _Parser(_HTTPTOOLS.HttpRequestParser if _COUNTS else object):  # type: ignore[misc]
    """httptools' parser, which lets its connection decline protocol upgrades."""

    def __init__(self, connection: _Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: bytes | memoryview) -> None:
        """Parse, declining an upgrade."""
        try:
            super().feed_data(data)
        except _HTTPTOOLS.HttpParserUpgrade as offer:
            if not self._connection.decline(memoryview(data)[offer.args[0] :]):
                raise


def _new_parser(connection: _Connection) -> _Parser:
    """Return a parser configured as uvicorn's."""
    parser = _Parser(connection)
    with contextlib.suppress(AttributeError):  # httptools before 0.6.3
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
