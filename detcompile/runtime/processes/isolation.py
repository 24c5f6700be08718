"""Isolation: serve requests that workers were lost with alone, until it is known which of them crashes workers."""

from collections.abc import Callable, Iterable

from detcompile.runtime.requests.poison_guard import PoisonRequestGuard
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sequence import Sequence

__all__ = ["Isolation"]


class Isolation:
    """Has an engine serve the suspects of a PoisonRequestGuard, one after another.

    Args:
        serve_alone: has the engine plan these sequences and no others; None: all.
        block: ends a request that workers were lost with too often.
    """

    def __init__(
        self, serve_alone: Callable[[frozenset[Sequence] | None], None], block: Callable[[Request], None]
    ) -> None:
        self._serve_alone = serve_alone
        self._guard = PoisonRequestGuard(block)
        self._under_way = False  # others are kept from being planned

    def died_with(self, requests: Iterable[Request]) -> None:
        """Workers were lost while they had these."""
        for request in requests:
            self._guard.died_with(request)

    def update(self) -> None:
        """Serve the next suspect alone once the one before is done, or all; called before each step."""
        known = self._guard
        if known.isolated is not None and not known.clears(known.isolated):
            return
        if known.suspects:
            self._under_way = True
            self._serve_alone(frozenset(known.isolate_next().sequences))
        elif self._under_way:
            self._under_way = False
            self._serve_alone(None)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._guard.forget(request)
