"""Spares: processes of engines, none of which is ever nobody's, and one at hand for when an engine is lost."""

import logging
from collections.abc import Callable

from detcompile.errors import DetcompileError
from detcompile.serving.engines.engine_link import EngineLink

__all__ = ["Spares"]

logger = logging.getLogger(__name__)


class Spares:
    """Opens links to processes, and ends all of them. All methods are for the event loop's thread.

    Args:
        make: makes a link, without a process yet.
        keeps: whether a process waits, its imports done.
        most_lost: spares that may be lost before no other one is kept.
    """

    def __init__(self, make: Callable[[], EngineLink], *, keeps: bool, most_lost: int) -> None:
        self._make = make
        self._keeps = keeps
        self._lost_left = most_lost
        self._spare: EngineLink | None = None
        self._opens = False
        self._owned: set[EngineLink] = set()
        self._over: DetcompileError | None = None

    async def open(self) -> EngineLink:
        """A link with a process of its own.

        Raises:
            DetcompileError: there is none to be had, or no more are opened.
        """
        if self._over is not None:
            raise self._over
        link = self._make()
        self._owned.add(link)  # from before it has a process: ``stop`` ends that, whatever becomes of this call
        await link.open()
        return link

    async def keep(self) -> None:
        """Have a process at hand, unless there is one, or none is wanted."""
        if not self._keeps or self._spare is not None or self._opens or self._over is not None or self._lost_left < 0:
            return
        self._opens = True
        try:
            self._spare = await self.open()
        except DetcompileError as error:  # whoever needs a process opens one
            logger.warning("there is no spare process: %s", error)
        finally:
            self._opens = False

    async def take(self) -> EngineLink:
        """The process at hand, or else another one.

        Raises:
            DetcompileError: as of ``open``.
        """
        link, self._spare = self._spare, None
        return link or await self.open()

    def lost(self, link: EngineLink) -> bool:
        """A link's process was killed; returns whether it was the one at hand."""
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
        """No more are opened: whoever asks is told why."""
        self._over = self._over or error

    @property
    def owned(self) -> list[EngineLink]:
        """Links whose processes have not ended, as far as is known, and those that are being opened."""
        return list(self._owned)
