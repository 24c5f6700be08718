"""Answers over HTTP that take a while: JSON in one piece, or events. A client that leaves ends its request."""

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

__all__ = ["ANSWERS", "Events", "JSON", "Reserving", "Whole", "event", "unless_left"]

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
ANSWERS = "detcompile.answers"  # of a request, in its scope, for layers around the routes
DONE = b"data: [DONE]\n\n"


def event(content: Any, name: str = "") -> bytes:
    """A server-sent event of one JSON value, with an id where it has a name."""
    head = f"id: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"


class Reserving(Response):
    """A response that is made when it is sent. What the request holds is given back once it is sent, or cannot be.

    Args:
        make: makes the response, given the reservation of the request.
    """

    def __init__(self, make: Callable[[Reservation], Awaitable[Response]]) -> None:
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the response and send it."""
        reservation = Reservation()
        try:
            response = await self._make(reservation)
            await response(scope, receive, send)
        finally:
            reservation.release()


async def unless_left(request: Request, making: Coroutine[Any, Any, Response]) -> Response:
    """The response to a request whose body has come; its making ends where its client leaves.

    Raises:
        HTTPError: it has left; or what the making raises.
    """
    task = asyncio.create_task(making)
    leaving = asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HTTPError(400, CLIENT_LEFT)
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # it may end with a response all the same
        del task  # its exception refers to this frame: no cycle


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class _Awaited(Response, ABC):
    """A response whose making stops when the client is gone.

    Args:
        reservation: what the request holds, given back when the client leaves.
        headers: fields of the response; what the making of a whole one adds to them is sent, too.
    """

    def __init__(self, answers: Sequence[Answer], reservation: Reservation, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._answers = answers
        self._reservation = reservation
        self._fields = headers
        self._left = False  # by the client
        self._path = ""  # that was asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, or stop where the client leaves first."""
        scope[ANSWERS], self._path = self._answers, scope["path"]
        leaving = asyncio.create_task(self._release_when_left(receive))
        try:
            await self._send(send)
        finally:
            leaving.cancel()
            self._reservation.release()

    async def _release_when_left(self, receive: Receive) -> None:
        """The answers fail once the client is gone, which ends the sending, too."""
        await _left(receive)
        self._left = True
        self._reservation.release()

    @abstractmethod
    async def _send(self, send: Send) -> None:
        """Send all of it."""

    async def _begin(self, send: Send, status: int, content_type: str, more: Mapping[str, str]) -> None:
        every = {"Content-Type": content_type, **more, **self._fields}
        own = [(name.lower().encode(), value.encode()) for name, value in every.items()]
        await send({"type": "http.response.start", "status": status, "headers": own})

    async def _refuse(self, send: Send, error: HTTPError) -> None:
        await self._begin(send, error.status, JSON, error.headers)
        await send({"type": "http.response.body", "body": error.body(self._path)})


class Whole(_Awaited):
    """The result as JSON, once all answers have ended.

    Args:
        result: makes it of the answers; others are to be served meanwhile where that takes long.
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
        """Wait for the end of what the result is made of."""
        async for _ in progress(self._answers):
            continue


class Events(_Awaited):
    """Server-sent events as the answers get longer.

    The status waits for the first tokens, so that a request which the engine refuses has a status of its own. A client
    that reads slowly gets what has come meanwhile in one event.

    Args:
        events: gives the contents; each is sent before the next is asked for.
        last: comes behind them, [DONE] by default.
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
        except Exception:  # a fault of this program: the client hears of it before it is raised on
            if begun and not self._left:
                await send(_body(HTTPError(500, FAULT).event(self._path), last=True))
            raise
        if not begun:
            await self._begin(send, 200, EVENT_STREAM, {"Cache-Control": "no-cache"})
        await send(_body(self._last, last=True))


def _body(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}
