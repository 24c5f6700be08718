"""Jobs: requests in the making. One with a key is answered once, however often its client comes back for it."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from detcompile.errors import DetcompileError, InvalidInput, StorageError
from detcompile.serving.engines.answers import Answer, AnswerSignal, progress
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.journal.journal import DamagedRecord, Journal, JournalFull
from detcompile.serving.journal.records import Record, ask_of, differing, outcome_of, record_of, restore
from detcompile.serving.limiter import Reservation
from detcompile.serving.receipts.issuer import Issued

__all__ = ["Call", "Jobs"]

MOST_LETTERS = 255  # of a key
RETRY_SECONDS = 30
Found = TypeVar("Found")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A request as it came over HTTP.

    Args:
        endpoint: the path that it was sent to.
        body: what was sent.
        owner: sha256 of the API key in hex; empty where the server has none.
        key: the Idempotency-Key; None where there is none.
        last_event: the Last-Event-ID: a client that has lost a stream goes on behind this event.
        reservation: what the request holds until it is over, or until a job that outlives it takes it.
        held: the bytes of its body, which are held until its response is made, or by that job.
    """

    endpoint: str
    body: bytes
    owner: str = ""
    key: str | None = None
    last_event: str | None = None
    reservation: Reservation = field(default_factory=Reservation, compare=False)
    held: Reservation = field(default_factory=Reservation, compare=False)

    def __post_init__(self) -> None:
        if self.key is not None and not (0 < len(self.key) <= MOST_LETTERS and self.key.isprintable()):
            wanted = f"1 to {MOST_LETTERS} letters that can be printed"
            raise HTTPError(400, f"Idempotency-Key must have {wanted}", param="Idempotency-Key")


class Jobs:
    """Makes jobs, and finds those of clients that come back. All methods are for the event loop's thread.

    Args:
        submit: has the prompts of a request answered, for the owner of an API key and with a reservation.
        issue: makes a job's receipt, once.
        model: returns the model that draws answers now.
        salt: gives a fresh salt for a receipt; None where it needs none.
        journal: where requests with a key are written; without one keys mean nothing.
    """

    def __init__(
        self,
        submit: Callable[[Ask, str, Reservation], Awaitable[list[Answer]]],
        issue: Callable[[Job], Awaitable[Any]],
        model: Callable[[], ServedModel],
        salt: Callable[[], bytes | None],
        journal: Journal | None = None,
    ) -> None:
        self._submit = submit
        self._issue = issue
        self._model = model
        self._salt = salt
        self._journal = journal
        self._failed = False  # at the journal, since it was last written
        self._writer = ThreadPoolExecutor(1, "journal")  # waits for the disk in the place of the event loop
        self._live: dict[tuple[str, str], tuple[Call, asyncio.Future[Job]]] = {}
        # The task of each live job, from its start until it is written, and the job that it makes.
        self._tasks: dict[asyncio.Task[None], asyncio.Future[Job]] = {}

    async def job(self, call: Call, ask: Callable[[], Awaitable[Ask]]) -> Job:
        """The job of a request: the one that it has by its key, or a new one, which is in the journal by then.

        Args:
            ask: reads the request; called where it is new.

        Raises:
            HTTPError: 422 for a key of another request, 409 for a request that only another model can answer, 503
                where the journal cannot be written, or the record is damaged; or as ``ask`` and ``submit`` raise.
        """
        if call.key is None or self._journal is None:
            asked = await ask()
            answers = await self._submit(asked, call.owner, call.reservation)
            return Job(asked, answers, self._salt(), self._model(), owner=call.owner)
        place = (call.owner, call.key)
        if place not in self._live:
            self._start(place, call, ask)
        begun, made = self._live[place]
        _require_same(begun, call)
        try:
            return await asyncio.shield(made)
        finally:
            del made  # an exception of it refers to this frame: no cycle

    def kept(self, call: Call) -> Call:
        """A request with a key, where there is a journal: who gave it none comes back for it by the answer's id."""
        return call if self._journal is None or call.key is not None else replace(call, key=secrets.token_hex(16))

    async def call(self, owner: str, name: str, last_event: str | None = None) -> Call | None:
        """The request whose answer has an id, for a client that comes back for it; None where none is kept.

        Raises:
            HTTPError: 503 where the journal cannot be read.
        """
        if self._journal is None:
            return None
        found = await self._written(lambda journal: journal.find(owner, name=name))
        return None if found is None else Call(found.endpoint, found.body, owner, found.key, last_event)

    async def receipt(self, owner: str, name: str) -> Issued | None:
        """Return the receipt that the journal has of an answer, by the answer's id; None where it has none.

        Raises:
            HTTPError: 503 where the journal cannot be read.
        """
        if self._journal is None:
            return None
        record = await self._written(lambda journal: journal.find(owner, name=name))
        return None if record is None or record.outcome is None else record.outcome.receipt

    async def drop(self, owner: str, name: str) -> None:
        """Forget a request of this owner by the id of its answer, if it is kept.

        Raises:
            HTTPError: 503 where the journal cannot be written.
        """
        if await self.call(owner, name) is not None:
            await self._written(lambda journal: journal.drop(name))

    async def require_writable(self) -> None:
        """Refuse to go on where the journal could not be read or written, and still cannot be.

        Raises:
            HTTPError: 503.
        """
        if self._failed:
            await self._written(lambda journal: journal.require_writable())
            self._failed = False

    async def stop(self) -> None:
        """Write what has ended, and close the journal; what is open there can go on later."""
        for task, made in self._tasks.items():
            is_made = made.done() and not made.cancelled() and made.exception() is None
            if not (is_made and all(answer.finished for answer in made.result().answers)):
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.shutdown()
        if self._journal is not None:
            self._journal.close()

    def _start(self, place: tuple[str, str], call: Call, ask: Callable[[], Awaitable[Ask]]) -> None:
        """Start the task of a request that has a key. It owns what the request holds, whoever reads the answer."""
        reservation, loop = Reservation(), asyncio.get_running_loop()
        call.reservation.move_to(reservation)
        call.held.move_to(reservation)
        kept = replace(call, reservation=reservation)
        made: asyncio.Future[Job] = loop.create_future()
        task = loop.create_task(self._keep(kept, ask, made))
        self._live[place] = kept, made
        self._tasks[task] = made

        def over(_task: asyncio.Task[None]) -> None:  # also of a task that was cancelled before its first step
            reservation.release()
            made.cancel()
            del self._live[place]
            self._tasks.pop(task, None)

        task.add_done_callback(over)

    async def _keep(self, call: Call, ask: Callable[[], Awaitable[Ask]], made: asyncio.Future[Job]) -> None:
        """Make a job, and write what comes of it, unless the journal has that already."""
        try:
            record = await self._written(lambda journal: journal.find(call.owner, key=call.key))
            job = await (self._new(call, ask) if record is None else self._restored(record, call))
        except Exception as error:
            made.set_exception(error)
            del made  # the exception refers to this frame: no cycle
            return
        made.set_result(job)
        if not job.restored:
            await self._watch(job, call.reservation)

    async def _new(self, call: Call, ask: Callable[[], Awaitable[Ask]]) -> Job:
        """A job whose request is in the journal by then."""
        assert call.key is not None
        asked = await ask()
        answers = await self._submit(asked, call.owner, call.reservation)
        job = Job(asked, answers, self._salt(), self._model(), kept=True, owner=call.owner)
        new = record_of(job, (call.owner, call.key), (call.endpoint, call.body))
        await self._written(lambda journal: journal.add(new))
        return job

    async def _restored(self, record: Record, call: Call) -> Job:
        """The job of a request that the journal has; its answers are those of before, or are drawn again."""
        _require_same(Call(record.endpoint, record.body), call)
        _require_model(record, self._model())
        asked = ask_of(record.work)
        if record.outcome is not None:
            answers = [Answer("", prompt, asked.params, AnswerSignal()) for prompt in asked.prompts]
            restore(answers, record.outcome)
        else:
            answers = await self._submit(asked, call.owner, call.reservation)
        job = Job(
            asked,
            answers,
            record.work.salt,
            record.work.model,
            kept=True,
            name=record.name,
            created=record.created,
            owner=record.owner,
            begun_before=True,
            restored=record.outcome is not None,
        )
        if record.outcome is not None:
            job.issued, job.cancelled = record.outcome.receipt, record.outcome.cancelled
            job.ended = record.outcome.ended
        return job

    async def _watch(self, job: Job, reservation: Reservation) -> None:
        """Wait for the end of a job, and write what came of it."""
        with contextlib.suppress(DetcompileError, HTTPError):
            try:
                await self._answered(job)
                reservation.release()
                outcome = outcome_of(job)
                await self._written(lambda journal: journal.finish(job.name, outcome))
            except InvalidInput:
                await self._written(lambda journal: journal.drop(job.name))

    async def _answered(self, job: Job) -> None:
        """Wait for the end of a job, and make its receipt, unless its client has ended it.

        Raises:
            DetcompileError: it has no end.
        """
        try:
            async for _ in progress(job.answers):
                continue
            await self._issue(job)
        except DetcompileError:
            if not job.cancelled:
                raise

    async def _written(self, work: Callable[[Journal], Found]) -> Found:
        """Have the journal read or written, in its order.

        Raises:
            HTTPError: 503 where it cannot be.
        """
        assert self._journal is not None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, work, self._journal)
        except DamagedRecord as error:
            logger.error("%s", error)
            raise HTTPError(503, "the record of this request is damaged: send the request with another key",
                            code="record_damaged", in_vain=True) from error  # fmt: skip
        except (StorageError, InvalidInput) as error:
            logger.error("%s", error)
            full = isinstance(error, JournalFull)
            self._failed = self._failed or not full
            said = "the journal of requests is full" if full else "the journal of requests cannot be read or written"
            code = "journal_full" if full else "journal_error"
            raise HTTPError(503, f"{said}; the server's log says why", code=code, retry_after=RETRY_SECONDS) from error


def _require_same(begun: Call, call: Call) -> None:
    """Refuse a key that another request has.

    Raises:
        HTTPError: 422.
    """
    if (begun.endpoint, begun.body) != (call.endpoint, call.body):
        raise HTTPError(422, "this Idempotency-Key has another request: give each its own", param="Idempotency-Key",
                        code="idempotency_key_reused")  # fmt: skip


def _require_model(record: Record, model: ServedModel) -> None:
    """Refuse a record that only another model can answer.

    Raises:
        HTTPError: 409.
    """
    names = ", ".join(differing(record, model))
    if names:
        raise HTTPError(
            409,
            f"another model has begun this request, and only that one can answer it: they differ in {names}."
            " Send the request with another key",
            code="fingerprint_changed",
            in_vain=True,
        )
