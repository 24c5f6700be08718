"""Responses to fetch later: running ones, and for an hour finished ones."""

import time
from typing import Any, Protocol

from detcompile.serving.owned_cache import OwnedCache

KEPT_SECONDS = 3600.0
KEPT_BYTES = 64 << 20  # events and prompts of finished responses


class _Kept(Protocol):
    owner: str
    name: str
    ended: float | None
    num_bytes: int


class KeptResponses:
    """Finds responses by owner and id. Over KEPT_BYTES the owner with the most drops its oldest finished ones."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Any] = {}  # and those that ended since the last call
        self._ended: OwnedCache[Any] = OwnedCache(KEPT_BYTES)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all responses."""
        return self._ended.num_bytes + sum(response.num_bytes for response in self._running.values())

    def add(self, response: _Kept) -> None:
        """Add a response; drop finished ones that are too old or exceed the bound."""
        self._running[response.owner, response.name] = response
        self._settle()

    def find(self, owner: str, name: str) -> Any | None:
        """Return an owner's response by its id; None if there is none."""
        self._settle()
        return self._running.get((owner, name)) or self._ended.find(owner, name)

    def drop(self, owner: str, name: str) -> None:
        """Remove a response."""
        self._running.pop((owner, name), None)
        self._ended.drop(owner, name)

    def _settle(self) -> None:
        """Count the responses that have ended since the last call, and drop expired ones."""
        ended = [response for response in self._running.values() if response.ended is not None]
        for response in sorted(ended, key=lambda response: response.ended):
            del self._running[response.owner, response.name]
            self._ended.add(response.owner, response.name, response, response.num_bytes)
        self._ended.drop_oldest(lambda response: time.monotonic() - response.ended > KEPT_SECONDS)
