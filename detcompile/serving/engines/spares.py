"""Opens and ends all engine processes, so that none is orphaned, and keeps one spare for a lost engine."""

import logging
from collections.abc import Callable

from detcompile.errors import DetcompileError
from detcompile.serving.engines.engine_link import EngineLink

logger = logging.getLogger(__name__)


class Spares:
    """Opens links to processes and ends them all. All methods must be called in the event loop's thread.

    Args:
        make: creates a link without a process.
        keeps: keep a spare process with its imports done.
        most_lost: lost spares after which no further one is kept.
    """

    def __init__(self, make: Callable[[], EngineLink], *, keeps: bool, most_lost: int) -> None:
        self._make = make
        self._keeps = keeps
        self._lost_left = most_lost
        self._spare: EngineLink | None = None
        self._opens = False
        self._owned: set[EngineLink] = set()
        self._error: DetcompileError | None = None

    async def open(self) -> EngineLink:
        """Return a link with a new process.

        Raises:
            DetcompileError: the launch failed, or ``close`` was called.
        """
        if self._error is not None:
            raise self._error
        link = self._make()
        self._owned.add(link)  # before the launch, so that its process is ended even if this call is canceled
        await link.open()
        return link

    async def keep(self) -> None:
        """Launch a spare unless there is one or none is wanted."""
        if not self._keeps or self._spare is not None or self._opens or self._error is not None or self._lost_left < 0:
            return
        self._opens = True
        try:
            self._spare = await self.open()
        except DetcompileError as error:  # ``take`` tries again
            logger.warning("no spare process could be launched: %s", error)
        finally:
            self._opens = False

    async def take(self) -> EngineLink:
        """Return the spare, or a new process.

        Raises:
            DetcompileError: see ``open``.
        """
        link, self._spare = self._spare, None
        return link or await self.open()

    def lost(self, link: EngineLink) -> bool:
        """Remove a killed process; return True if it was the spare."""
        self._owned.discard(link)
        if link is not self._spare:
            return False
        self._spare = None
        self._lost_left -= 1
        return True

    async def end(self, link: EngineLink) -> None:
        """End a process and wait for its end."""
        await link.stop()
        self._owned.discard(link)

    def close(self, error: DetcompileError) -> None:
        """Make ``open`` raise from now on."""
        self._error = self._error or error

    @property
    def owned(self) -> list[EngineLink]:
        """Return links that may have a process, including those being launched."""
        return list(self._owned)
