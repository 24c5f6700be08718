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

API_KEYS = "--api-keys"
DIGEST_LETTERS = 64  # of sha256 in hex
NO_LETTERS = hashlib.sha256(b"").hexdigest()
NO_KEY = "missing or unknown API key: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`"

NO_ADMIN = "this route needs an admin key"
OTHER_ORIGIN = "control routes without an admin key do not answer pages in browsers"


class Access:
    """Pass requests with a known key on; without configured keys, pass all.

    GET / needs no key: browsers load pages without one, and the page contains nothing about this server. The page asks
    the user for the key and sends it with its other requests.

    Admin keys are API keys, too. Without any, control routes are open to whoever may use the server, but not to pages
    of other origins.

    Args:
        inside: the application.
        digests: sha256 of each known key, read at every request.
        admin: sha256 of the admin keys.
        control: paths that need an admin key.
    """

    def __init__(
        self,
        inside: ASGIApp,
        digests: Sequence[bytes],
        admin: Sequence[bytes] = (),
        control: frozenset[str] = frozenset(),
    ) -> None:
        self._inside = inside
        self._digests = digests
        self._admin = admin
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        owner = self._admitted(scope)
        if not isinstance(owner, HTTPError):
            scope[OWNER] = owner
            await self._inside(scope, receive, send)
            return
        error = owner
        headers = {"content-type": JSON, **error.headers}
        fields = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": fields})
        await send({"type": "http.response.body", "body": error.body(scope["path"])})

    def _admitted(self, scope: Scope) -> str | HTTPError:
        """Return the sha256 of the request's key in hex, empty if it needs none; or the refusal."""
        headers = Headers(scope=scope)
        controls = scope["path"] in self._control
        is_page = scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if is_page or not (self._digests or (controls and self._admin)):
            if controls and "origin" in headers:
                return HTTPError(403, OTHER_ORIGIN, code="forbidden")
            return ""
        digest = _digest_of(headers)
        is_admin, is_known = _is_one_of(digest, self._admin), _is_one_of(digest, self._digests)
        if controls and self._admin and is_known and not is_admin:
            return HTTPError(403, NO_ADMIN, code="forbidden")
        return digest.hex() if is_admin or (is_known and not (controls and self._admin)) else HTTPError(401, NO_KEY)


def _digest_of(headers: Headers) -> bytes:
    """Return the sha256 of a request's key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes as sent


def _is_one_of(digest: bytes, digests: Sequence[bytes]) -> bool:
    """Compare all digests, each in constant time."""
    return sum(hmac.compare_digest(digest, known) for known in digests) > 0


class KeyFile:
    """API keys from a file, which can be reloaded while the server runs.

    Args:
        path: see ``read_keys``; None means no keys.
        option: the option that names the file, for error messages.

    Attributes:
        digests: sha256 of each key.

    Raises:
        InvalidInput: see ``read_keys``.
    """

    def __init__(self, path: Path | None, option: str = API_KEYS) -> None:
        self._path, self._option = path, option
        self.digests: list[bytes] = [] if path is None else read_keys(path, option)

    def read_again(self) -> None:
        """Reload the file. If it cannot be read, the previous keys stay valid.

        Raises:
            InvalidInput: see ``read_keys``.
        """
        if self._path is not None:
            self.digests[:] = read_keys(self._path, self._option)


def owner_of(request: Request) -> str:
    """Return the sha256 of the request's API key in hex; empty if the server has no keys."""
    owner: str = request.scope[OWNER]
    return owner


def read_keys(path: Path, option: str = API_KEYS) -> list[bytes]:
    """Return the digests of a key file. Each line is ``name:sha256 of the key in hex``; # starts a comment.

    Raises:
        InvalidInput: the file cannot be read, has a malformed line, or contains no key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{option} {path}: {error}") from error
    digests = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, digest = text.rpartition(":")
        if not name or len(digest) != DIGEST_LETTERS or set(digest.lower()) - set("0123456789abcdef"):
            raise InvalidInput(f"{option} {path}, line {number}: write name:DIGEST, with the key's sha256 in hex")
        if digest.lower() == NO_LETTERS:
            raise InvalidInput(f"{option} {path}, line {number}: this is the digest of an empty key; choose another")
        digests.append(bytes.fromhex(digest))
    if not digests:
        raise InvalidInput(f"{option} {path}: the file contains no key")
    return digests
