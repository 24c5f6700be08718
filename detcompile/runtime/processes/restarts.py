"""Restarts: restart lost workers of an engine, within a limit."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from detcompile.errors import WorkerError

WINDOW_SECONDS = 60.0
logger = logging.getLogger(__name__)


class Restartable(Protocol):
    """Runs steps in processes that can be lost."""

    def restart(self) -> None:
        """Start new processes in place of lost ones, with an empty KV cache."""


class Restarts:
    """Restarts workers and counts the restarts.

    Args:
        most: restarts per minute, and restarts without a step in between, after which the next loss is final.
        clock: returns seconds.

    Attributes:
        count: restarts so far.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._most = most
        self._clock = clock
        self._recent: list[float] = []
        self._in_vain = 0  # restarts since a step was read back

    def progressed(self) -> None:
        """Note that a step was read back."""
        self._in_vain = 0

    def restart(self, worker: Restartable, lost: WorkerError) -> None:
        """Restart the processes, again if they are lost before they serve.

        Raises:
            WorkerError: ``lost`` or a later loss, if the workers were closed or the limit is reached; or the restart
                failed.
        """
        while lost.rank is not None and self._may():
            self.count += 1
            logger.warning("workers were lost and are restarted: %s", str(lost).partition("\n")[0])
            try:
                return worker.restart()
            except WorkerError as error:
                lost = error
        raise lost

    def _may(self) -> bool:
        """Count a restart if the limit allows one more."""
        now = self._clock()
        self._recent = [past for past in self._recent if now - past < WINDOW_SECONDS]
        if max(len(self._recent), self._in_vain) >= self._most:
            return False
        self._recent.append(now)
        self._in_vain += 1
        return True
