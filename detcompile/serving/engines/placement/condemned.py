"""Condemned: requests that engines ended with while they had nothing else, and that none is given again for a while.

Clients send again what has failed, OpenAI's own by themselves: every try would cost some more engines, and soon those
that all other clients wait for.
"""

import hashlib
import time
from collections.abc import Callable

import msgspec

from detcompile.runtime.requests.quarantine import ALONE_DEATHS
from detcompile.serving.engines.answers import Answer
from detcompile.serving.http_errors import CondemnedError

__all__ = ["Condemned"]

SECONDS = 600.0
MOST = 10_000


class Condemned:
    """Remembers requests by what they ask, whatever their seed.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes, float] = {}  # when each was condemned, oldest first

    def condemn(self, answer: Answer) -> None:
        """Fail an answer, and those to the same request that come later."""
        self._known[_digest(answer)] = self._clock()
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        answer.fail(CondemnedError(f"{ALONE_DEATHS} engines ended while they served this request alone"))

    def require_other(self, answer: Answer) -> None:
        """Refuse an answer to a request that was condemned a short time ago.

        Raises:
            CondemnedError: it was.
        """
        if not self._known:
            return
        at = self._known.get(_digest(answer))
        if at is not None and self._clock() - at < SECONDS:
            minutes = SECONDS / 60
            raise CondemnedError(
                f"engines ended while they served this request alone; it is not tried again for {minutes:.0f} minutes"
            )


def _digest(answer: Answer) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(answer.asked)).digest()
