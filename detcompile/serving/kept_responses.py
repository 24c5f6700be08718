"""KeptResponses: responses for whoever asks for them later: those that run, and for an hour those that have ended."""

import time
from typing import Any, Protocol

__all__ = ["KeptResponses"]

KEPT_SECONDS = 3600.0
KEPT_BYTES = 64 << 20  # of responses that have ended: their events and their prompts


class _Kept(Protocol):
    owner: str
    name: str
    ended: float | None
    num_bytes: int


class KeptResponses:
    """Finds responses by their owners and ids; the oldest go first where there are too many."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Any] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the responses that are kept."""
        return sum(own.num_bytes for own in self._kept.values())

    def add(self, response: _Kept) -> None:
        """Keep one, and let go of those that are too old or too many."""
        self._kept[response.owner, response.name] = response
        over = [own for own in self._kept.values() if own.ended is not None]
        room = KEPT_BYTES
        for own in sorted(over, key=lambda own: -own.ended):
            room -= own.num_bytes
            if room < 0 or time.monotonic() - own.ended > KEPT_SECONDS:
                del self._kept[own.owner, own.name]

    def find(self, owner: str, name: str) -> Any | None:
        """A response of this owner by its id; None where it is not kept."""
        found = self._kept.get((owner, name))
        if found is not None and found.ended is not None and time.monotonic() - found.ended > KEPT_SECONDS:
            del self._kept[owner, name]
            return None
        return found

    def drop(self, owner: str, name: str) -> None:
        """Keep it no longer."""
        self._kept.pop((owner, name), None)
