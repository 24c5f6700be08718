"""EngineLoop: a thread that steps an engine while coroutines wait for what it serves."""

import threading
from typing import Protocol

from detcompile.errors import EngineError

__all__ = ["EngineLoop", "Steppable"]

IDLE_SECONDS = 60.0  # an idle thread ends, so that an engine which nobody holds can be freed


class Steppable(Protocol):
    """The side of an engine that its thread sees."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything left to do."""

    def advance(self) -> None:
        """Do some of it, in turn with other threads."""


class EngineLoop:
    """Steps an engine in a thread of its own while it has work."""

    def __init__(self, engine: Steppable) -> None:
        self._engine = engine
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is work: the thread goes on, or a new one begins. May be called from any thread."""
        with self._work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="detcompile engine", daemon=True)
                self._thread.start()
            self._work.notify()

    def _run(self) -> None:
        while self._has_work():
            try:
                self._engine.advance()
            except BaseException as error:
                with self._work:
                    self._thread = None
                if isinstance(error, EngineError):  # every receiver has been told
                    return
                raise

    def _has_work(self) -> bool:
        """Waits for it; False where none came, and the next ``wake`` begins another thread then."""
        with self._work:
            found = self._engine.has_work or self._work.wait_for(lambda: self._engine.has_work, IDLE_SECONDS)
            if not found:
                self._thread = None
            return found
