"""Access: one ASGI layer around all routes that asks for API keys."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from detcompile.errors import InvalidInput
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.responses import JSON

__all__ = ["Access", "KeyFile", "owner_of", "read_keys"]

OWNER = "detcompile.owner"  # of a request, in its scope: sha256 of its key in hex

DIGEST_LETTERS = 64  # of sha256 in hex
NO_LETTERS = hashlib.sha256(b"").hexdigest()
NO_KEY = "no API key, or none that is known: send `Authorization: Bearer KEY`, or `X-Api-Key: KEY`"


class Access:
    """Lets requests through that bring a key; without keys, all.

    The page at / is a file that says nothing of this server, and browsers open pages without a key: it needs none, and
    asks for the key that all else needs.

    Args:
        digests: sha256 of each key that is known, looked at for each request.
        inside: what they reach.
    """

    def __init__(self, inside: ASGIApp, digests: Sequence[bytes]) -> None:
        self._inside = inside
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 401."""
        free = scope["type"] != "http" or not self._digests
        free = free or (scope["path"] == "/" and scope["method"] in ("GET", "HEAD"))
        owner = "" if free else self._owner(Headers(scope=scope))
        if owner is not None:
            scope[OWNER] = owner
            await self._inside(scope, receive, send)
            return
        error = HTTPError(401, NO_KEY)
        headers = {"content-type": JSON, **error.headers}
        fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 401, "headers": fields})
        await send({"type": "http.response.body", "body": error.body(scope["path"])})

    def _owner(self, headers: Headers) -> str | None:
        """sha256 of the key that a request brings, in hex; None where it is not known.

        Every known digest is compared, each in a time that says nothing of where it differs.
        """
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes that were sent
        known = sum(hmac.compare_digest(digest, own) for own in self._digests) > 0
        return digest.hex() if known else None


class KeyFile:
    """The keys of a file, which may be read again while the server runs.

    Args:
        path: a file as ``read_keys`` takes it; None knows no keys.

    Attributes:
        digests: sha256 of each key.

    Raises:
        InvalidInput: as ``read_keys``.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.digests: list[bytes] = [] if path is None else read_keys(path)

    def read_again(self) -> None:
        """Know the keys that the file has now, and those of before where it cannot be read.

        Raises:
            InvalidInput: as ``read_keys``.
        """
        if self._path is not None:
            self.digests[:] = read_keys(self._path)


def owner_of(request: Request) -> str:
    """sha256 of the API key that a request has come with, in hex; empty where the server has no keys."""
    owner: str = request.scope[OWNER]
    return owner


def read_keys(path: Path) -> list[bytes]:
    """The digests of a file of keys: a line ``name:sha256 of the key in hex`` each; # begins a comment.

    Raises:
        InvalidInput: the file cannot be read, holds a line of another form, or none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--api-keys {path}: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, digest = text.rpartition(":")
        if not name or len(digest) != DIGEST_LETTERS or set(digest.lower()) - set("0123456789abcdef"):
            raise InvalidInput(f"--api-keys {path}, line {number}: give name:sha256, the digest of the key in hex")
        if digest.lower() == NO_LETTERS:
            raise InvalidInput(f"--api-keys {path}, line {number}: this is the digest of an empty key: give it letters")
        found.append(bytes.fromhex(digest))
    if not found:
        raise InvalidInput(f"--api-keys {path} holds no key")
    return found
