"""Responses of running answers: JSON in one piece, or server-sent events.

A request ends when its client disconnects.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from detcompile.errors import DetcompileError
from detcompile.serving.engines.answers import Answer, progress
from detcompile.serving.http_errors import CLIENT_LEFT, FAULT, HTTPError, error_of
from detcompile.serving.limiter import Reservation

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
ANSWERS = "detcompile.answers"  # key of the request's answers in the scope, for outer ASGI layers
DONE = b"data: [DONE]\n\n"


def event(content: Any, name: str = "") -> bytes:
    """Return a server-sent event with a JSON value, and with an id if ``name`` is given."""
    head = f"id: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON value."""
    return Response(msgspec.json.encode(content), media_type=JSON, headers=headers)


class Reserving(Response):
    """A response created when it is sent; its reservation is released afterwards, also after a failure.

    Args:
        make: creates the response, given the request's reservation.
    """

    def __init__(self, make: Callable[[Reservation], Awaitable[Response]]) -> None:
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create the response and send it."""
        reservation = Reservation()
        try:
            response = await self._make(reservation)
            await response(scope, receive, send)
        finally:
            reservation.release()


async def unless_left(request: Request, making: Coroutine[Any, Any, Response]) -> Response:
    """Await a response; cancel it if the client disconnects first.

    Raises:
        HTTPError: the client disconnected, or the coroutine raised it.
    """
    task = asyncio.create_task(making)
    leaving = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HTTPError(400, CLIENT_LEFT)
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # it may still return a response
        del task  # its exception refers to this frame: break the cycle


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class _Awaited(Response, ABC):
    """A response that stops when its client disconnects.

    Args:
        reservation: the request's resources, released when the client disconnects.
        headers: response headers. Entries added while a whole result is built are sent, too.
    """

    def __init__(self, answers: Sequence[Answer], reservation: Reservation, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._answers = answers
        self._reservation = reservation
        self._fields = headers
        self._left = False  # by the client
        self._stops = False  # True if the disconnect has canceled the sending
        self._path = ""  # of the request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; stop if the client disconnects."""
        scope[ANSWERS], self._path = self._answers, scope["path"]
        sending = asyncio.current_task()
        assert sending is not None
        leaving = asyncio.create_task(self._stop_when_left(receive, sending))
        try:
            await self._send(send)
        except asyncio.CancelledError:
            if not self._stops or sending.uncancel():
                raise
        finally:
            leaving.cancel()
            self._reservation.release()

    async def _stop_when_left(self, receive: Receive, sending: asyncio.Task[Any]) -> None:
        """Stop the sending once the client disconnects.

        Answers without other readers fail, which ends the sending. Answers with other readers continue.
        """
        await _disconnected(receive)
        self._left = True
        self._reservation.release()
        if not all(answer.finished for answer in self._answers):
            self._stops = sending.cancel()

    @abstractmethod
    async def _send(self, send: Send) -> None:
        """Send the whole response."""

    async def _begin(self, send: Send, status: int, content_type: str, more: Mapping[str, str]) -> None:
        fields = {"Content-Type": content_type, **more, **self._fields}
        headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _refuse(self, send: Send, error: HTTPError) -> None:
        await self._begin(send, error.status, JSON, error.headers)
        await send({"type": "http.response.body", "body": error.body(self._path)})


class Whole(_Awaited):
    """The result as JSON, after all answers have ended.

    Args:
        result: builds it from the answers; yields to the event loop if that takes long.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        reservation: Reservation,
        headers: Mapping[str, str],
        result: Callable[[], Awaitable[Any]],
    ) -> None:
        super().__init__(answers, reservation, headers)
        self._result = result

    async def _send(self, send: Send) -> None:
        try:
            await self._ended()
            body = msgspec.json.encode(await self._result())
        except DetcompileError as error:
            if not self._left:
                await self._refuse(send, error_of(error))
            return
        await self._begin(send, 200, JSON, {"Content-Length": str(len(body))})
        await send({"type": "http.response.body", "body": body})

    async def _ended(self) -> None:
        """Wait until the result can be built."""
        async for _ in progress(self._answers):
            continue


class Events(_Awaited):
    """Server-sent events as the answers grow.

    The status is sent with the first tokens, so that a request which the engine rejects gets an error status. A client
    that reads slowly gets everything new in one event.

    Args:
        events: yields the event data; the next is requested after the previous was sent.
        last: final event, [DONE] by default.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        reservation: Reservation,
        headers: Mapping[str, str],
        events: AsyncIterator[bytes],
        last: bytes = DONE,
    ) -> None:
        super().__init__(answers, reservation, headers)
        self._events = events
        self._last = last

    async def _send(self, send: Send) -> None:
        begun = False
        try:
            async for data in self._events:
                if self._left:
                    return
                if not begun:
                    begun = True
                    await self._begin(send, 200, EVENT_STREAM, {"Cache-Control": "no-cache"})
                await send(_body(data))
        except (DetcompileError, HTTPError) as error:
            if self._left:
                return
            refusal = error_of(error)
            if not begun:
                await self._refuse(send, refusal)
                return
            await send(_body(refusal.event(self._path)))
        except Exception:  # a bug: report it to the client, then raise
            if begun and not self._left:
                await send(_body(HTTPError(500, FAULT).event(self._path), last=True))
            raise
        if not begun:
            await self._begin(send, 200, EVENT_STREAM, {"Cache-Control": "no-cache"})
        await send(_body(self._last, last=True))


def _body(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}
