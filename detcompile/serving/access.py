"""API keys: an ASGI layer around all routes that requires one."""

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

OWNER = "detcompile.owner"  # key of the scope; the value is the sha256 of the request's API key in hex

DIGEST_LETTERS = 64  # of sha256 in hex
NO_LETTERS = hashlib.sha256(b"").hexdigest()
NO_KEY = "missing or unknown API key: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`"


class Access:
    """Pass requests with a known key on; without configured keys, pass all.

    GET / needs no key: browsers load pages without one, and the page contains nothing about this server. The page asks
    the user for the key and sends it with its other requests.

    Args:
        inside: the application.
        digests: sha256 of each known key, read at every request.
    """

    def __init__(self, inside: ASGIApp, digests: Sequence[bytes]) -> None:
        self._inside = inside
        self._digests = digests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
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
        """Return the sha256 of the request's key in hex; None for an unknown key.

        All digests are compared, each in constant time.
        """
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes as sent
        is_known = sum(hmac.compare_digest(digest, known) for known in self._digests) > 0
        return digest.hex() if is_known else None


class KeyFile:
    """API keys from a file, which can be reloaded while the server runs.

    Args:
        path: see ``read_keys``; None means no keys.

    Attributes:
        digests: sha256 of each key.

    Raises:
        InvalidInput: see ``read_keys``.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.digests: list[bytes] = [] if path is None else read_keys(path)

    def read_again(self) -> None:
        """Reload the file. If it cannot be read, the previous keys stay valid.

        Raises:
            InvalidInput: see ``read_keys``.
        """
        if self._path is not None:
            self.digests[:] = read_keys(self._path)


def owner_of(request: Request) -> str:
    """Return the sha256 of the request's API key in hex; empty if the server has no keys."""
    owner: str = request.scope[OWNER]
    return owner


def read_keys(path: Path) -> list[bytes]:
    """Return the digests of a key file. Each line is ``name:sha256 of the key in hex``; # starts a comment.

    Raises:
        InvalidInput: the file cannot be read, has a malformed line, or contains no key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--api-keys {path}: {error}") from error
    digests = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, digest = text.rpartition(":")
        if not name or len(digest) != DIGEST_LETTERS or set(digest.lower()) - set("0123456789abcdef"):
            raise InvalidInput(f"--api-keys {path}, line {number}: write name:DIGEST, with the key's sha256 in hex")
        if digest.lower() == NO_LETTERS:
            raise InvalidInput(f"--api-keys {path}, line {number}: this is the digest of an empty key; choose another")
        digests.append(bytes.fromhex(digest))
    if not digests:
        raise InvalidInput(f"--api-keys {path}: the file contains no key")
    return digests
