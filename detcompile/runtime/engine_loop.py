"""EngineLoop: a thread that steps an engine while coroutines wait for outputs."""

import threading

from detcompile.errors import EngineError
from detcompile.runtime.step_turns import StepTurns

__all__ = ["EngineLoop"]

IDLE_SECONDS = 60.0  # an idle thread ends, so that an unreferenced engine can be freed


class EngineLoop:
    """Steps an engine in a background thread while it has work."""

    def __init__(self, steps: StepTurns) -> None:
        self._steps = steps
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Wake the thread, or start a new one. Thread-safe."""
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
                if isinstance(error, EngineError):  # every receiver has received it
                    return
                raise

    def _has_work(self) -> bool:
        """Wait for work. Return False after IDLE_SECONDS without any; the next ``wake`` then starts a new thread."""
        with self._work:
            has_work = self._steps.has_work or self._work.wait_for(lambda: self._steps.has_work, IDLE_SECONDS)
            if not has_work:
                self._thread = None
            return has_work
