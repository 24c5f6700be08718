"""Request bodies: JSON of a bounded size, within a bound on all bodies in memory."""

import asyncio
import gc
from collections.abc import Sized

from starlette.requests import ClientDisconnect, Request

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.limiter import Reservation
from detcompile.serving.metrics import Metrics
from detcompile.serving.responses import JSON

MAX_BODY = 4 << 20  # bytes of a body
MOST_HELD = 64  # bodies of the maximum size that may be in memory
SHORT = 1 << 16  # bytes; bodies up to this size are accepted however much others hold
COLLECTION_BYTES = 64 << 20  # released bytes after which the garbage collector runs
RETRY_SECONDS = 1


class _Body:
    """A body in memory."""

    def __init__(self, owner: str, deadline: asyncio.Timeout) -> None:
        self.owner = owner
        self.deadline = deadline
        self.num_bytes = 0


class BodyLimiter:
    """Reads bodies and counts their bytes until they are released.

    Over the bound, the arriving bodies that have not grown for the longest time are dropped first, so slow senders
    yield to others. With several API keys, each may hold half of the bound.

    Args:
        max_body: bytes of one body.
        metrics: gets a gauge of the bytes in memory.
        keys: the current API keys.

    Attributes:
        num_bytes: bytes in memory.
    """

    def __init__(self, max_body: int, metrics: Metrics, keys: Sized = ()) -> None:
        self._max_body = max_body
        self._most = MOST_HELD * max_body
        self._keys = keys
        self._arriving: dict[_Body, None] = {}  # least recently grown first
        self._owners: dict[str, int] = {}  # bytes held, by owner
        self._since_collection = 0
        self.num_bytes = 0
        metrics.add_gauge("body_bytes", "Bytes of requests' bodies that are held.", lambda: self.num_bytes)

    async def read(self, request: Request, owner: str, reservation: Reservation) -> bytes:
        """Return the body of a JSON request.

        Browsers cannot send this content type to another origin without a preflight request, so pages cannot use a
        server on loopback.

        Args:
            owner: sha256 of the request's API key; empty if the server has none.
            reservation: holds the body's bytes.

        Raises:
            HTTPError: another content type, a compressed body, or no room for it.
        """
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            message = f"Content-Encoding {coding[:40]!r} is not supported: send the body uncompressed"
            raise HTTPError(415, message, code="unsupported_media_type")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise HTTPError(415, f"send the body as `Content-Type: {JSON}`", code="unsupported_media_type")
        parts: list[bytes] = []
        body = _Body(owner, asyncio.timeout(None))
        reservation.add(lambda: self._release(body))
        try:
            async with body.deadline:
                async for part in request.stream():
                    self._grow(body, len(part))
                    parts.append(part)
        except ClientDisconnect as error:
            raise HTTPError(400, "the client disconnected before sending the whole body") from error
        except TimeoutError as error:
            raise self._refusal() from error
        finally:
            self._arriving.pop(body, None)
        return b"".join(parts)

    def _grow(self, body: _Body, num_bytes: int) -> None:
        """Count newly arrived bytes."""
        self._count(body, num_bytes)
        if body.num_bytes > self._max_body:
            raise HTTPError(413, f"the body is over {self._max_body} bytes")
        self._arriving.pop(body, None)
        self._arriving[body] = None
        if not self._is_over(body.owner):
            return
        for other in list(self._arriving):
            if other is not body and self._is_over(body.owner if other.owner == body.owner else None):
                self._release(other)
                del self._arriving[other]
                other.deadline.reschedule(asyncio.get_running_loop().time())
        if body.num_bytes > SHORT and self._is_over(body.owner):
            raise self._refusal()

    def _is_over(self, owner: str | None) -> bool:
        """Return True if all bodies, or those of ``owner``, exceed their bound."""
        share = self._most // 2 if len(self._keys) > 1 else self._most
        return self.num_bytes > self._most or (owner is not None and self._owners.get(owner, 0) > share)

    def _release(self, body: _Body) -> None:
        self._since_collection += body.num_bytes
        self._count(body, -body.num_bytes)
        if self._since_collection > COLLECTION_BYTES:
            self._since_collection = 0
            gc.collect()

    def _count(self, body: _Body, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._owners[body.owner] = self._owners.get(body.owner, 0) + num_bytes
        if not self._owners[body.owner]:
            del self._owners[body.owner]

    def _refusal(self) -> HTTPError:
        message = f"request bodies use {self.num_bytes} of {self._most} bytes: try again"
        return HTTPError(429, message, retry_after=RETRY_SECONDS)
