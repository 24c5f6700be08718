"""Jobs: requests in the making. One with a key is answered once, however often its client comes back for it."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from detcompile.errors import DetcompileError, InvalidInput, StorageError
from detcompile.serving.engines.answers import Answer, progress
from detcompile.serving.engines.notices import News
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.journal.journal import DamagedRecord, Journal, JournalFull
from detcompile.serving.journal.records import Record, ask_of, differing, outcome_of, record_of, restore
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
    """

    endpoint: str
    body: bytes
    owner: str = ""
    key: str | None = None
    last_event: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None and not (0 < len(self.key) <= MOST_LETTERS and self.key.isprintable()):
            wanted = f"1 to {MOST_LETTERS} letters that can be printed"
            raise HTTPError(400, f"Idempotency-Key must have {wanted}", param="Idempotency-Key")


class Jobs:
    """Makes jobs, and finds those of clients that come back. All methods are for the event loop's thread.

    Args:
        submit: has the prompts of a request answered, for the owner of an API key.
        release: called with answers that nobody waits for.
        issue: makes a job's receipt, once.
        model: returns the model that draws answers now.
        salt: gives a fresh salt for a receipt; None where it needs none.
        journal: where requests with a key are written; without one keys mean nothing.
    """

    def __init__(
        self,
        submit: Callable[[Ask, str], Awaitable[list[Answer]]],
        release: Callable[[Sequence[Answer]], None],
        issue: Callable[[Job], Awaitable[Any]],
        model: Callable[[], ServedModel],
        salt: Callable[[], bytes | None],
        journal: Journal | None = None,
    ) -> None:
        self._submit = submit
        self._release = release
        self._issue = issue
        self._model = model
        self._salt = salt
        self._journal = journal
        self._writer = ThreadPoolExecutor(1, "journal")  # waits for the disk in the place of the event loop
        self._live: dict[tuple[str, str], tuple[Call, asyncio.Task[Job]]] = {}
        self._watches: set[asyncio.Task[None]] = set()

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
            answers = await self._submit(asked, call.owner)
            return Job(asked, answers, self._salt(), self._release, self._model(), owner=call.owner)
        place = (call.owner, call.key)
        if place not in self._live:
            task = asyncio.get_running_loop().create_task(self._kept(self._journal, call, ask))
            self._live[place] = call, task
            task.add_done_callback(lambda done: self._begun(place, done))
        begun, task = self._live[place]
        _require_same(begun, call)
        return await asyncio.shield(task)

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

    async def stop(self) -> None:
        """Write what has ended, and close the journal; what is open there can go on later."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._writer.shutdown()
        if self._journal is not None:
            self._journal.close()

    def _begun(self, place: tuple[str, str], task: asyncio.Task[Job]) -> None:
        """A job has begun; where it could not, or comes from a record that has ended, nothing is left to watch."""
        if task.cancelled() or task.exception() is not None or task.result().restored:
            del self._live[place]
            return
        watch = asyncio.get_running_loop().create_task(self._watch(place, task.result()))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _kept(self, journal: Journal, call: Call, ask: Callable[[], Awaitable[Ask]]) -> Job:
        assert call.key is not None
        record = await self._written(lambda journal: journal.find(call.owner, key=call.key))
        if record is None:
            asked = await ask()
            answers = await self._submit(asked, call.owner)
            job = Job(asked, answers, self._salt(), _nothing, self._model(), kept=True, owner=call.owner)
            new = record_of(job, (call.owner, call.key), (call.endpoint, call.body))
            try:
                await self._written(lambda journal: journal.add(new))
            except BaseException:
                self._release(job.answers)
                raise
            return job
        _require_same(Call(record.endpoint, record.body), call)
        _require_model(record, self._model())
        asked = ask_of(record.work)
        if record.outcome is not None:
            answers = [Answer("", prompt, asked.params, News()) for prompt in asked.prompts]
            restore(answers, record.outcome)
        else:
            answers = await self._submit(asked, call.owner)
        job = Job(
            asked,
            answers,
            record.work.salt,
            _nothing,
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
        return job

    async def _watch(self, place: tuple[str, str], job: Job) -> None:
        """Have a job answered whoever reads it, and write what came of it."""
        with contextlib.suppress(DetcompileError, HTTPError):
            try:
                await self._answered(job)
                outcome = outcome_of(job)
                await self._written(lambda journal: journal.finish(job.name, outcome))
            except InvalidInput:
                await self._written(lambda journal: journal.drop(job.name))
            finally:
                self._release(job.answers)
                del self._live[place]

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


def _nothing(_answers: Sequence[Answer]) -> None:
    """A reader of a job that is kept has gone; the job goes on."""
