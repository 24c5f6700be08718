"""Blocklist: requests that crashed engines while they were the only ones running, refused for a while.

Clients send again what has failed, OpenAI's own by themselves: every try would cost some more engines, and soon those
that all other clients wait for.
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
    """Remember requests by what they ask, whatever their seed.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes, float] = {}  # when each was added, oldest first

    def add(self, answer: Answer) -> None:
        """Fail an answer, and those to the same request that come later."""
        self._known[_digest(answer)] = self._clock()
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        answer.fail(BlockedRequestError(f"{ALONE_DEATHS} engines ended while they served this request alone"))

    def require_unblocked(self, answer: Answer) -> None:
        """Refuse an answer to a request that is on the list.

        Raises:
            BlockedRequestError: it is.
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
    return hashlib.sha256(msgspec.msgpack.encode(answer.asked)).digest()
