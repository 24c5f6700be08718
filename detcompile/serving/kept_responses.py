"""Responses to fetch later: running ones, and for an hour finished ones."""

import time
from typing import Any, Protocol

__all__ = ["KeptResponses"]

KEPT_SECONDS = 3600.0
KEPT_BYTES = 64 << 20  # events and prompts of finished responses


class _Kept(Protocol):
    owner: str
    name: str
    ended: float | None
    num_bytes: int


class KeptResponses:
    """Finds responses by owner and id; drops the oldest finished ones over KEPT_BYTES."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Any] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all responses."""
        return sum(response.num_bytes for response in self._kept.values())

    def add(self, response: _Kept) -> None:
        """Add a response; drop finished ones that are too old or exceed the bound."""
        self._kept[response.owner, response.name] = response
        finished = [kept for kept in self._kept.values() if kept.ended is not None]
        room = KEPT_BYTES
        for kept in sorted(finished, key=lambda kept: -kept.ended):
            room -= kept.num_bytes
            if room < 0 or time.monotonic() - kept.ended > KEPT_SECONDS:
                del self._kept[kept.owner, kept.name]

    def find(self, owner: str, name: str) -> Any | None:
        """Return an owner's response by its id; None if there is none."""
        response = self._kept.get((owner, name))
        if response is not None and response.ended is not None and time.monotonic() - response.ended > KEPT_SECONDS:
            del self._kept[owner, name]
            return None
        return response

    def drop(self, owner: str, name: str) -> None:
        """Remove a response."""
        self._kept.pop((owner, name), None)
