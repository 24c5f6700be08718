"""StepTurns: runs an engine's steps one at a time, on whichever threads ask for them, and handles a failed step."""

import gc
import threading
from collections.abc import Iterator

from detcompile.errors import EngineError
from detcompile.runtime.pipeline import Pipeline
from detcompile.runtime.request_book import RequestBook
from detcompile.runtime.requests.deliveries import Mailbox
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.turns import Place, Turns, without_interrupts

IDLE_SECONDS = 60.0  # an idle thread ends, so that an unreferenced engine can be freed


class GCPauses:
    """Keeps garbage collections short while requests run.

    A full collection visits every object of the process, including the traced and compiled model, and stalls the
    engine for 0.2 s or more. Frozen objects are not visited. Unfreezing includes objects that others froze.
    """

    def __init__(self) -> None:
        self._short = False

    def shorten(self) -> None:
        """Exclude existing objects from collection; repeated calls do nothing until ``restore``."""
        if not self._short:
            gc.freeze()
            self._short = True

    def restore(self) -> None:
        """Allow everything to be collected again."""
        if self._short:
            gc.unfreeze()
            self._short = False


class StepTurns:
    """Lets threads take turns at steps. Thread-safe.

    Attributes:
        turns: the lock held during every step, and by callers during which no step may run.
        failure: the exception that a step failed with, after which there are no further steps; None if none failed.
    """

    def __init__(self, pipeline: Pipeline, book: RequestBook) -> None:
        self.turns = Turns()
        self.failure: BaseException | None = None
        self._pipeline = pipeline
        self._book = book
        self._pauses = GCPauses()

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return self.failure is None and (self._pipeline.busy or not self._book.is_empty)

    def step(self, place: Place | None = None) -> None:
        """Run a step and deliver its outputs; do nothing if ``place`` was excused before its turn.

        Raises:
            EngineError: this or an earlier step failed, and every request has ended; or a step calls this.
        """
        with without_interrupts():
            if not self.turns.take(place or Place()):
                return
            try:
                self.require_alive()
                if self._pipeline.mid_step:
                    raise EngineError(
                        "a step was requested within a step of this engine, as by its drafter: return first"
                    )
                self._pauses.shorten()
                try:
                    self._pipeline.step()
                except BaseException as error:
                    self._end_all(error)
                    raise  # an interrupt
                self._book.deliver()
                if not self.has_work:
                    self._pauses.restore()
            finally:
                self.turns.give()

    def serve(self, names: set[str], mailbox: Mailbox) -> Iterator[RequestOutput]:
        """Run steps until these requests have ended, and yield their outputs; other threads may run the steps too.

        Raises:
            EngineError: a step failed.
        """
        left = set(names)
        while True:
            for output in mailbox.taken():
                left.discard(output.request_id)
                yield output
            if not left:
                return
            if mailbox.error is not None:
                raise mailbox.error
            self.step(mailbox.place)

    def drop_cancelled(self) -> None:
        """End canceled requests without a step for the others, and remove them from the queue."""
        with without_interrupts(), self.turns:
            if self.failure is None and not self._pipeline.mid_step:
                self._book.update()
                self._book.deliver()
                if self._book.is_empty and self._pipeline.busy:
                    self.step()  # launches nothing: only reads back the step in flight

    def require_alive(self) -> None:
        """Raise EngineError if a step has failed."""
        if self.failure is not None:
            raise EngineError(f"this engine failed before: {self.failure}. Make a new one")

    def _end_all(self, error: BaseException) -> None:
        """Handle an exception of a step. An interrupt fails the engine only if it arrived in mid-step."""
        self._pauses.restore()
        text = f"a step failed, and all requests with it: {error}. The cause is below; make a new engine"
        if isinstance(error, Exception) or self._pipeline.mid_step:
            self.failure = error
            self._book.fail(error, text)
        if isinstance(error, Exception):
            raise EngineError(text) from error


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
