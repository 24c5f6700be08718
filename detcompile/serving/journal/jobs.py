"""Jobs: running requests. One with an idempotency key is answered once, however often its client reconnects."""

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

MOST_LETTERS = 255  # of an idempotency key
RETRY_SECONDS = 30
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """An HTTP request.

    Args:
        endpoint: the path.
        body: the request body.
        owner: sha256 of the API key in hex; empty if the server has none.
        key: the Idempotency-Key, or None.
        last_event: the Last-Event-ID: resume a stream after this event.
        reservation: resources of the request, until it ends or a job takes them over.
        held: the body's bytes, until the response is built or a job takes them over.
        client_id: the X-Request-Id, or the body's request_id or rid; empty without these.
    """

    endpoint: str
    body: bytes
    owner: str = ""
    key: str | None = None
    last_event: str | None = None
    reservation: Reservation = field(default_factory=Reservation, compare=False)
    held: Reservation = field(default_factory=Reservation, compare=False)
    client_id: str = ""

    def __post_init__(self) -> None:
        if self.key is not None and not (0 < len(self.key) <= MOST_LETTERS and self.key.isprintable()):
            wanted = f"1 to {MOST_LETTERS} printable characters"
            raise HTTPError(400, f"Idempotency-Key must have {wanted}", param="Idempotency-Key")


class Jobs:
    """Starts jobs and finds those of reconnecting clients. All methods must be called in the event loop's thread.

    Args:
        submit: queues the prompts of a request, given the owner of its API key and a reservation.
        issue: issues a job's receipt, once.
        model: returns the current model, given the name of an adapter or "".
        salt: returns a fresh salt for a receipt, or None.
        journal: records requests with a key; without a journal, keys are ignored.
    """

    def __init__(
        self,
        submit: Callable[[Ask, str, Reservation], Awaitable[list[Answer]]],
        issue: Callable[[Job], Awaitable[Any]],
        model: Callable[[str], ServedModel],
        salt: Callable[[], bytes | None],
        journal: Journal | None = None,
    ) -> None:
        self._submit = submit
        self._issue = issue
        self._model = model
        self._salt = salt
        self._journal = journal
        self._failed = False  # the last access to the journal failed
        self._writer = ThreadPoolExecutor(1, "journal")  # waits for the disk
        self._live: dict[tuple[str, str], tuple[Call, asyncio.Future[Job]]] = {}
        # Tasks of live jobs, until they are written, and the futures of their jobs.
        self._tasks: dict[asyncio.Task[None], asyncio.Future[Job]] = {}

    async def job(self, call: Call, ask: Callable[[], Awaitable[Ask]]) -> Job:
        """Return the job of a request: the existing one of its key, or a new one, which is in the journal by then.

        Args:
            ask: prepares the work of a new request.

        Raises:
            HTTPError: 422 for a key of another request, 409 if only another model can answer it, 503 for a damaged
                record or if the journal cannot be written; also what ``ask`` and ``submit`` raise.
        """
        if call.key is None or self._journal is None:
            work = await ask()
            answers = await self._begin(work, call)
            return Job(work, answers, self._salt(), self._model(work.adapter), owner=call.owner)
        place = (call.owner, call.key)
        while (aborted := self._aborted(place)) is not None:
            await asyncio.wait([aborted])
        if place not in self._live:
            self._start(place, call, ask)
        existing, future = self._live[place]
        _require_same(existing, call)
        try:
            return await asyncio.shield(future)
        finally:
            del future  # its exception refers to this frame: break the cycle

    def kept(self, call: Call) -> Call:
        """Return the request with a generated key if there is a journal and it has none.

        Its client reconnects by the answer's id.
        """
        return call if self._journal is None or call.key is not None else replace(call, key=secrets.token_hex(16))

    async def call(self, owner: str, name: str, last_event: str | None = None) -> Call | None:
        """Return the request whose answer has an id, for a reconnecting client; None if unknown.

        Raises:
            HTTPError: 503 if the journal cannot be read.
        """
        if self._journal is None:
            return None
        record = await self._written(lambda journal: journal.find(owner, name=name))
        return None if record is None else Call(record.endpoint, record.body, owner, record.key, last_event)

    async def receipt(self, owner: str, name: str) -> Issued | None:
        """Return an answer's receipt from the journal, by the answer's id; None if there is none.

        Raises:
            HTTPError: 503 if the journal cannot be read.
        """
        if self._journal is None:
            return None
        record = await self._written(lambda journal: journal.find(owner, name=name))
        return None if record is None or record.outcome is None else record.outcome.receipt

    async def drop(self, owner: str, name: str) -> None:
        """Delete an owner's request by the id of its answer, if it exists.

        Raises:
            HTTPError: 503 if the journal cannot be written.
        """
        if await self.call(owner, name) is not None:
            await self._written(lambda journal: journal.drop(name))

    async def require_writable(self) -> None:
        """Raise HTTPError 503 if the journal still cannot be written after a failure."""
        if self._failed:
            await self._written(lambda journal: journal.require_writable())
            self._failed = False

    async def stop(self) -> None:
        """Write finished jobs and close the journal; unfinished jobs can be resumed later."""
        for task, future in self._tasks.items():
            has_job = future.done() and not future.cancelled() and future.exception() is None
            if not (has_job and all(answer.finished for answer in future.result().answers)):
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.shutdown()
        if self._journal is not None:
            self._journal.close()

    def _aborted(self, place: tuple[str, str]) -> asyncio.Task[None] | None:
        """Return the task that drops an aborted job; None if there is none."""
        _, future = self._live.get(place, (None, None))
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        if not any(answer.aborted for answer in future.result().answers):
            return None
        return next(task for task, of_job in self._tasks.items() if of_job is future)

    def _start(self, place: tuple[str, str], call: Call, ask: Callable[[], Awaitable[Ask]]) -> None:
        """Start the task of a request with a key. It takes over the request's resources, whoever reads the answer."""
        reservation, loop = Reservation(), asyncio.get_running_loop()
        call.reservation.move_to(reservation)
        call.held.move_to(reservation)
        owned = replace(call, reservation=reservation)
        future: asyncio.Future[Job] = loop.create_future()
        task = loop.create_task(self._keep(owned, ask, future))
        self._live[place] = owned, future
        self._tasks[task] = future

        def over(_task: asyncio.Task[None]) -> None:  # also runs for tasks canceled before their first step
            reservation.release()
            future.cancel()
            del self._live[place]
            self._tasks.pop(task, None)

        task.add_done_callback(over)

    async def _keep(self, call: Call, ask: Callable[[], Awaitable[Ask]], future: asyncio.Future[Job]) -> None:
        """Create a job and record its outcome, unless the journal already has it."""
        try:
            record = await self._written(lambda journal: journal.find(call.owner, key=call.key))
            job = await (self._new(call, ask) if record is None else self._restored(record, call))
        except Exception as error:
            future.set_exception(error)
            del future  # the exception refers to this frame: break the cycle
            return
        future.set_result(job)
        if not job.restored:
            await self._watch(job, call.reservation)

    async def _new(self, call: Call, ask: Callable[[], Awaitable[Ask]]) -> Job:
        """Create a job and write its request to the journal."""
        assert call.key is not None
        work = await ask()
        answers = await self._begin(work, call)
        job = Job(work, answers, self._salt(), self._model(work.adapter), kept=True, owner=call.owner)
        record = record_of(job, (call.owner, call.key), (call.endpoint, call.body))
        await self._written(lambda journal: journal.add(record))
        return job

    async def _begin(self, work: Ask, call: Call) -> list[Answer]:
        """Queue a request's prompts, under the ids that vLLM makes of the client's id."""
        answers = await self._submit(work, call.owner, call.reservation)
        if call.client_id:
            vllm_id = f"{work.prefix}{call.client_id}"
            for place, answer in enumerate(answers):
                answer.client_ids = (call.client_id, vllm_id, f"{vllm_id}-{place}")
        return answers

    async def _restored(self, record: Record, call: Call) -> Job:
        """Create the job of a journaled request, with its recorded answers or by drawing them again."""
        _require_same(Call(record.endpoint, record.body), call)
        _require_model(record, self._model(record.work.adapter))
        work = ask_of(record.work)
        if record.outcome is not None:
            answers = [Answer("", prompt, work.params, AnswerSignal()) for prompt in work.prompts]
            restore(answers, record.outcome)
        else:
            answers = await self._begin(work, call)
            _require_model(record, self._model(record.work.adapter))  # it may have changed meanwhile
        job = Job(
            work,
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
        """Wait for the end of a job and record its outcome."""
        with contextlib.suppress(DetcompileError, HTTPError):
            try:
                await self._answered(job)
                reservation.release()
                if any(answer.aborted for answer in job.answers):  # the next try draws the whole answer
                    await self._written(lambda journal: journal.drop(job.name))
                    return
                outcome = outcome_of(job)
                await self._written(lambda journal: journal.finish(job.name, outcome))
            except InvalidInput:
                await self._written(lambda journal: journal.drop(job.name))

    async def _answered(self, job: Job) -> None:
        """Wait for the end of a job and issue its receipt. A failure after cancellation is ignored."""
        try:
            async for _ in progress(job.answers):
                continue
            await self._issue(job)
        except DetcompileError:
            if not job.cancelled:
                raise

    async def _written(self, work: Callable[[Journal], Result]) -> Result:
        """Run ``work`` on the journal in the writer thread, in order."""
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
            problem = "is full" if full else "cannot be read or written"
            message = f"the journal of requests {problem}; see the server's log"
            code = "journal_full" if full else "journal_error"
            raise HTTPError(503, message, code=code, retry_after=RETRY_SECONDS) from error


def _require_same(existing: Call, call: Call) -> None:
    """Reject the key of another request."""
    if (existing.endpoint, existing.body) != (call.endpoint, call.body):
        raise HTTPError(422, "this Idempotency-Key belongs to another request: use a new key", param="Idempotency-Key",
                        code="idempotency_key_reused")  # fmt: skip


def _require_model(record: Record, model: ServedModel) -> None:
    """Reject a record that only another model can answer."""
    names = ", ".join(differing(record, model))
    if names:
        raise HTTPError(
            409,
            f"another model started this request, and only that model can answer it; they differ in {names}."
            " Send the request with another key",
            code="fingerprint_changed",
            in_vain=True,
        )
