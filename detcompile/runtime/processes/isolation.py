"""Isolation: serve requests that crashed workers one at a time, until the culprit is known."""

from collections.abc import Callable, Iterable

from detcompile.runtime.requests.poison_guard import PoisonRequestGuard
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sequence import Sequence

__all__ = ["Isolation"]


class Isolation:
    """Makes an engine serve the suspects of a PoisonRequestGuard one after another.

    Args:
        serve_alone: makes the engine plan only these sequences; None: all.
        block: ends a request that crashed workers too often.
    """

    def __init__(
        self, serve_alone: Callable[[frozenset[Sequence] | None], None], block: Callable[[Request], None]
    ) -> None:
        self._serve_alone = serve_alone
        self._guard = PoisonRequestGuard(block)
        self._under_way = False  # other sequences are held back

    def died_with(self, requests: Iterable[Request]) -> None:
        """Count a crash of the workers against these requests."""
        for request in requests:
            self._guard.died_with(request)

    def update(self) -> None:
        """Before each step: once the isolated request is cleared, isolate the next suspect, or serve all again."""
        guard = self._guard
        if guard.isolated is not None and not guard.clears(guard.isolated):
            return
        if guard.suspects:
            self._under_way = True
            self._serve_alone(frozenset(guard.isolate_next().sequences))
        elif self._under_way:
            self._under_way = False
            self._serve_alone(None)

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._guard.forget(request)
