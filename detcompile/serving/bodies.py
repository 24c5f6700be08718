"""Bodies of requests: JSON, each of a bounded size, and all that are held within a common bound."""

import asyncio
import gc
from collections.abc import Sized

from starlette.requests import ClientDisconnect, Request

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.limiter import Reservation
from detcompile.serving.metrics import Metrics
from detcompile.serving.responses import JSON

__all__ = ["BodyLimiter", "MAX_BODY"]

MAX_BODY = 4 << 20  # bytes of a body
MOST_HELD = 64  # bodies of the largest size
SHORT = 1 << 16  # bytes; a body of up to so many is never refused for what others hold
COLLECTION_BYTES = 64 << 20  # of bodies given back, after which cycles of objects are looked for
RETRY_SECONDS = 1


class _Body:
    """A body that is held."""

    def __init__(self, owner: str, deadline: asyncio.Timeout) -> None:
        self.owner = owner
        self.deadline = deadline
        self.num_bytes = 0


class BodyLimiter:
    """Reads bodies, and counts their bytes as long as they are held.

    Beyond the bound those go first that arrive and have not grown for the longest time, so a client that sends slowly
    gives way to others. Where there are several API keys, each may hold half of the bound.

    Args:
        max_body: bytes of one body.
        metrics: shows the bytes that are held.
        keys: the API keys that the server knows now.

    Attributes:
        num_bytes: bytes that are held.
    """

    def __init__(self, max_body: int, metrics: Metrics, keys: Sized = ()) -> None:
        self._max_body = max_body
        self._most = MOST_HELD * max_body
        self._keys = keys
        self._arriving: dict[_Body, None] = {}  # the one that has not grown for the longest time first
        self._owners: dict[str, int] = {}  # bytes that each holds
        self._since_collection = 0
        self.num_bytes = 0
        metrics.show("body_bytes", "Bytes of requests' bodies that are held.", lambda: self.num_bytes)

    async def read(self, request: Request, owner: str, reservation: Reservation) -> bytes:
        """Return the body of a request that sends JSON.

        A page in a browser cannot send this type to another site unasked, which keeps pages from using a server on
        loopback.

        Args:
            owner: sha256 of the API key that asks; empty where the server has none.
            reservation: holds the body's bytes.

        Raises:
            HTTPError: another type, a body that is compressed, too many bytes, or bodies of others take their place.
        """
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            said = f"Content-Encoding {coding[:40]!r} is not read: send the body as it is"
            raise HTTPError(415, said, code="unsupported_media_type")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise HTTPError(415, f"send the body as `Content-Type: {JSON}`", code="unsupported_media_type")
        parts: list[bytes] = []
        body = _Body(owner, asyncio.timeout(None))
        reservation.add(lambda: self._give_back(body))
        try:
            async with body.deadline:
                async for part in request.stream():
                    self._grow(body, len(part))
                    parts.append(part)
        except ClientDisconnect as error:
            raise HTTPError(400, "the client left before its body had come") from error
        except TimeoutError as error:
            raise self._refusal() from error
        finally:
            self._arriving.pop(body, None)
        return b"".join(parts)

    def _grow(self, body: _Body, num_bytes: int) -> None:
        """Count a part that has come.

        Raises:
            HTTPError: 413, or 429 where others hold all that may be held.
        """
        self._count(body, num_bytes)
        if body.num_bytes > self._max_body:
            raise HTTPError(413, f"the body is over {self._max_body} bytes")
        self._arriving.pop(body, None)
        self._arriving[body] = None
        if not self._is_over(body.owner):
            return
        for other in list(self._arriving):
            if other is not body and self._is_over(body.owner if other.owner == body.owner else None):
                self._give_back(other)
                del self._arriving[other]
                other.deadline.reschedule(asyncio.get_running_loop().time())
        if body.num_bytes > SHORT and self._is_over(body.owner):
            raise self._refusal()

    def _is_over(self, owner: str | None) -> bool:
        """Whether more is held than may be, by all or by this owner."""
        share = self._most // 2 if len(self._keys) > 1 else self._most
        return self.num_bytes > self._most or (owner is not None and self._owners.get(owner, 0) > share)

    def _give_back(self, body: _Body) -> None:
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
        said = f"bodies of requests hold {self.num_bytes} bytes, of {self._most} at most: try again"
        return HTTPError(429, said, retry_after=RETRY_SECONDS)
