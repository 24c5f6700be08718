"""Restarts: workers that an engine has lost are started again, as often as may be."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from detcompile.errors import WorkerError

__all__ = ["Restarts"]

WINDOW_SECONDS = 60.0
logger = logging.getLogger(__name__)


class Restartable(Protocol):
    """What runs steps in processes that can be lost."""

    def restart(self) -> None:
        """Have other processes in the place of those that were lost, with nothing in the KV cache."""


class Restarts:
    """Counts how often workers were started again.

    Args:
        most: restarts within a minute, and without a step in between, after which the next loss is final.
        clock: returns seconds.

    Attributes:
        count: restarts so far.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._most = most
        self._clock = clock
        self._recent: list[float] = []
        self._in_vain = 0  # since a step was read back

    def progressed(self) -> None:
        """A step was read back."""
        self._in_vain = 0

    def restart(self, worker: Restartable, lost: WorkerError) -> None:
        """Start the processes again, once more where those are lost before they serve.

        Raises:
            WorkerError: ``lost``, or what ended the processes after it, where they were closed or that was too often.
            Also what starting them raises.
        """
        while lost.rank is not None and self._may():
            self.count += 1
            logger.warning("workers are lost and started again: %s", str(lost).partition("\n")[0])
            try:
                return worker.restart()
            except WorkerError as error:
                lost = error
        raise lost

    def _may(self) -> bool:
        """Count one more, unless there were too many."""
        now = self._clock()
        self._recent = [past for past in self._recent if now - past < WINDOW_SECONDS]
        if max(len(self._recent), self._in_vain) >= self._most:
            return False
        self._recent.append(now)
        self._in_vain += 1
        return True
