"""Bounded caches by owner and name: of any values, and of responses to fetch later."""

import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Value = TypeVar("Value")
KEPT_SECONDS = 3600.0  # of a finished response
KEPT_BYTES = 64 << 20  # events and prompts of finished responses


class OwnedCache(Generic[Value]):
    """Keeps values within a number of bytes. Over the bound the owner with the most bytes drops its oldest values.

    A client of one API key cannot evict what clients of other keys come back for.

    Args:
        most_bytes: bound on the bytes of all values.

    Attributes:
        num_bytes: bytes of all values.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: dict[str, dict[str, tuple[Value, int]]] = {}  # by owner and name, the oldest first
        self._sizes: dict[str, int] = {}  # bytes of each owner
        self.num_bytes = 0

    def add(self, owner: str, name: str, value: Value, num_bytes: int) -> None:
        """Add a value of this size as the owner's newest, and evict values over the bound."""
        self.drop(owner, name)
        self._values.setdefault(owner, {})[name] = value, num_bytes
        self._count(owner, num_bytes)
        while self.num_bytes > self._most_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.drop(largest, next(iter(self._values[largest])))

    def find(self, owner: str, name: str) -> Value | None:
        """Return a value; None if there is none."""
        value, _ = self._values.get(owner, {}).get(name, (None, 0))
        return value

    def drop(self, owner: str, name: str) -> None:
        """Remove a value, if it is there."""
        _, num_bytes = self._values.get(owner, {}).pop(name, (None, 0))
        self._count(owner, -num_bytes)

    def drop_oldest(self, is_old: Callable[[Value], bool]) -> None:
        """Drop the oldest values of each owner while they are old."""
        for owner in list(self._values):
            while kept := self._values.get(owner):
                name, (value, _) = next(iter(kept.items()))
                if not is_old(value):
                    break
                self.drop(owner, name)

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._sizes[owner] = self._sizes.get(owner, 0) + num_bytes
        if not self._values.get(owner):
            self._values.pop(owner, None)
            del self._sizes[owner]


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
