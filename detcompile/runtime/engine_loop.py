"""EngineLoop: a thread that steps an engine while coroutines wait for what it serves."""

import threading

from detcompile.errors import EngineError
from detcompile.runtime.step_turns import StepTurns

__all__ = ["EngineLoop"]

IDLE_SECONDS = 60.0  # an idle thread ends, so that an engine which nobody holds can be freed


class EngineLoop:
    """Steps an engine in a thread of its own while it has work."""

    def __init__(self, steps: StepTurns) -> None:
        self._steps = steps
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
                self._steps.step()
            except BaseException as error:
                with self._work:
                    self._thread = None
                if isinstance(error, EngineError):  # every receiver has been told
                    return
                raise

    def _has_work(self) -> bool:
        """Waits for it; False where none came, and the next ``wake`` begins another thread then."""
        with self._work:
            found = self._steps.has_work or self._work.wait_for(lambda: self._steps.has_work, IDLE_SECONDS)
            if not found:
                self._thread = None
            return found
