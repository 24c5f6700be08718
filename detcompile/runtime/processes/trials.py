"""Trials: requests that workers were lost with are served alone, until it is known which of them is to blame."""

from collections.abc import Callable, Iterable

from detcompile.runtime.requests.quarantine import Quarantine
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sequence import Sequence

__all__ = ["Trials"]


class Trials:
    """Has an engine serve the suspects of a Quarantine, one after another.

    Args:
        serve_alone: has the engine plan these sequences and no others; None: all.
        condemn: ends a request that workers were lost with too often.
    """

    def __init__(
        self, serve_alone: Callable[[frozenset[Sequence] | None], None], condemn: Callable[[Request], None]
    ) -> None:
        self._serve_alone = serve_alone
        self._quarantine = Quarantine(condemn)
        self._under_way = False  # others are kept from being planned

    def died_with(self, requests: Iterable[Request]) -> None:
        """Workers were lost while they had these."""
        for request in requests:
            self._quarantine.died_with(request)

    def judge(self) -> None:
        """End the trial that is over and begin the next, or let all be served; asked before a step is planned."""
        known = self._quarantine
        if known.trial is not None and not known.acquits(known.trial):
            return
        if known.suspects:
            self._under_way = True
            self._serve_alone(frozenset(known.begin().sequences))
        elif self._under_way:
            self._under_way = False
            self._serve_alone(None)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._quarantine.forget(request)
