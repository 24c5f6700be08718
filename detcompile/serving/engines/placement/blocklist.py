"""Blocklist of requests that crashed engines while running alone; refused for 10 minutes.

Clients retry failed requests, OpenAI's client by itself. Each retry would cost more engines, including those that serve
other clients.
"""

import hashlib
import time
from collections.abc import Callable

import msgspec

from detcompile.runtime.requests.poison_guard import ALONE_DEATHS
from detcompile.serving.engines.answers import Answer
from detcompile.serving.http_errors import BlockedRequestError

__all__ = ["Blocklist"]

SECONDS = 600.0
MOST = 10_000


class Blocklist:
    """Remembers requests by content, ignoring the seed.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes, float] = {}  # time of addition, oldest first

    def add(self, answer: Answer) -> None:
        """Fail an answer and block its request."""
        self._known[_digest(answer)] = self._clock()
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        answer.fail(BlockedRequestError(f"{ALONE_DEATHS} engines ended while they served this request alone"))

    def require_unblocked(self, answer: Answer) -> None:
        """Refuse an answer whose request is blocked.

        Raises:
            BlockedRequestError: the request is blocked.
        """
        if not self._known:
            return
        at = self._known.get(_digest(answer))
        if at is not None and self._clock() - at < SECONDS:
            minutes = SECONDS / 60
            raise BlockedRequestError(
                f"engines ended while they served this request alone; it is not tried again for {minutes:.0f} minutes"
            )


def _digest(answer: Answer) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(answer.content)).digest()
