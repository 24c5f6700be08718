"""StepTurns: the steps of an engine, one at a time, whichever threads ask for them; and what a step that fails ends."""

from collections.abc import Iterator

from detcompile.errors import EngineError
from detcompile.runtime.gc_pauses import GCPauses
from detcompile.runtime.pipeline import Pipeline
from detcompile.runtime.request_book import RequestBook
from detcompile.runtime.requests.deliveries import Mailbox
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.turns import Place, Turns, without_interrupts

__all__ = ["StepTurns"]


class StepTurns:
    """Lets threads take turns at steps. Any thread may call.

    Attributes:
        turns: taken for every step, and by whoever needs that none runs.
        failure: what a step failed with, after which there is no other; None while all is well.
    """

    def __init__(self, pipeline: Pipeline, book: RequestBook) -> None:
        self.turns = Turns()
        self.failure: BaseException | None = None
        self._pipeline = pipeline
        self._book = book
        self._pauses = GCPauses()

    @property
    def has_work(self) -> bool:
        """Whether a step can do anything."""
        return self.failure is None and (self._pipeline.busy or not self._book.is_empty)

    def step(self, place: Place | None = None) -> None:
        """A step in turn, whose outputs are delivered; none if ``place`` was excused before its turn came.

        Raises:
            EngineError: the step failed, or one did before. Every request has ended then.
        """
        with without_interrupts():
            if not self.turns.take(place or Place()):
                return
            try:
                self.require_alive()
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
        """Takes turns at steps until these requests have ended, whoever made their outputs.

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
        """End what was cancelled without a step for the others, and leave nothing of it queued."""
        with without_interrupts(), self.turns:
            if self.failure is None:
                self._book.update()
                self._book.deliver()
                if self._book.is_empty and self._pipeline.busy:
                    self.step()  # nothing is launched: what ran is read back

    def require_alive(self) -> None:
        """Raise EngineError if a step failed before."""
        if self.failure is not None:
            raise EngineError(f"this engine failed before: {self.failure}. Make a new one")

    def _end_all(self, error: BaseException) -> None:
        """A step raised. An interrupt between the stages of a step fails it too; before and after them, it does not."""
        self._pauses.restore()
        text = f"a step failed, and all requests with it: {error}. The cause is below; make a new engine"
        if isinstance(error, Exception) or self._pipeline.mid_step:
            self.failure = error
            self._book.fail(error, text)
        if isinstance(error, Exception):
            raise EngineError(text) from error
