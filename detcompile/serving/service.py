"""Service: what all routes share. It admits requests, has them answered, and knows whether the server is ready."""

import functools
import hashlib
import time
from collections.abc import Callable, Sequence, Sized
from itertools import count
from typing import Literal

from detcompile.errors import DetcompileError, WorkerError
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.bodies import MAX_BODY, BodyLimiter
from detcompile.serving.chat_template import ChatTemplate
from detcompile.serving.dashboard.history import History
from detcompile.serving.deadlines import Deadlines
from detcompile.serving.engines.answers import Answer, Pooling, Verification
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.notices import News
from detcompile.serving.engines.protocol import Delta, EngineSpec, Hello, PoolingFacts
from detcompile.serving.grammars.check import GrammarCheck
from detcompile.serving.http_errors import CLIENT_LEFT, HTTPError, error_of
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.journal.jobs import Jobs
from detcompile.serving.journal.journal import Journal
from detcompile.serving.kept_responses import KeptResponses
from detcompile.serving.limiter import AdmissionLimiter, Reservation, Slot
from detcompile.serving.metrics import Metrics
from detcompile.serving.plain_tokenizer import tokenizer_digest
from detcompile.serving.receipts.issuer import Issued, Issuer
from detcompile.serving.tokenizer_pool import TokenizerPool
from detcompile.serving.tools.families import FAMILIES, family_of

__all__ = ["Service"]

TASKS = {  # what a model does, for who asks it for something else
    "generate": "generates text: POST /v1/completions, /v1/chat/completions or /v1/responses",
    "embed": "gives embeddings: POST /v1/embeddings, /v1/score or /v1/rerank",
    "classify": "classifies: POST /classify, or with one label /v1/score or /v1/rerank",
}


class Service:
    """One model, behind the engines of a fleet.

    Args:
        name: what clients call the model; None takes the name that it was loaded by.
        chat_template: replaces the tokenizer's own.
        tool_parser: family of models as which it writes calls of functions; None for that of its chat template.
        max_queue: samples that may be open at a time, with the requests that no engine has seen yet.
        max_queued_tokens: prompt tokens, over all open answers without a token yet, beyond which no more are taken.
        max_body: bytes that a request's body may have.
        queue_timeout: seconds that an answer may wait for its first token, and before that for its grammar's check.
        timeout: seconds that an answer may take as a whole.
        fleet: makes the engines that serve, given what to call with each answer and its delta.
        receipts: makes the answers' receipts; None takes an Issuer that signs none.
        journal: where requests with an Idempotency-Key are written; it is closed by ``stop``.
        keys: the API keys that the server knows now: of several, each may hold half of a bound.

    Raises:
        InvalidInput: a chat template that is none.

    Attributes:
        serves: whether the engines have been ready once.
        draining: nothing new is taken, and what is open is finished.
        open: answers that have not ended.
        history: the newest answers that have ended.
        model: the model as replies name it; only once the engines have started.
        limiter: bounds what is open; routes ask it before they do what takes long.
        bodies: reads bodies within bounds.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        chat_template: str | None = None,
        tool_parser: str | None = None,
        max_queue: int = 512,
        max_queued_tokens: int = 262144,
        max_body: int = MAX_BODY,
        queue_timeout: float = 60.0,
        timeout: float = 600.0,
        fleet: Callable[[Callable[[Answer, Delta], None]], Fleet] = Fleet,
        receipts: Issuer | None = None,
        journal: Journal | None = None,
        keys: Sized = (),
    ) -> None:
        self.receipts = receipts or Issuer()
        self.fleet = fleet(self._progressed)
        self.metrics = Metrics(self.fleet, max_queue, max_queued_tokens)
        self.limiter = AdmissionLimiter(max_queue, max_queued_tokens, self.metrics, keys)
        self.bodies = BodyLimiter(max_body, self.metrics, keys)
        self.responses = KeptResponses()
        kept = "Bytes of receipts and responses that are kept for who asks later."
        self.metrics.add_gauge("kept_bytes", kept, lambda: self.receipts.num_bytes + self.responses.num_bytes)
        self.deadlines = Deadlines(queue_timeout, timeout, self.fleet.cancel)
        self.jobs = Jobs(self.submit, self.issue, lambda: self.model, self.receipts.salt, journal=journal)
        self.history = History()
        self.draining = False
        self.open: dict[str, Answer] = {}
        self._slots: dict[str, Slot] = {}  # of the open answers, by their ids
        self.created = int(time.time())
        self._name = name
        self._given_family = None if tool_parser is None else FAMILIES[tool_parser]
        self._given_template = None if chat_template is None else ChatTemplate(chat_template)
        self.serves = False
        self._queue_timeout = queue_timeout
        self._numbers = count()

    async def start(self, spec: EngineSpec) -> Hello:
        """Start the engine and wait until it serves.

        Raises:
            DetcompileError: why it cannot.
        """
        await self.fleet.start(spec)
        hello = await self.fleet.settled()
        self.name = self._name or hello.name
        texts = {"special_tokens": str(sorted(hello.special_ids)), "tokenizer": str(tokenizer_digest(hello.tokenizer))}
        self.model = ServedModel(self.name, hello.fingerprint, hello.fingerprint_parts | texts)
        self.texts = TokenizerPool(hello, self.limiter.waiting)
        self.grammars = GrammarCheck(hello.tokenizer, self._queue_timeout, self.limiter.waiting)
        sources = hello.chat_template, hello.tool_template
        plain, with_tools = (None if source is None else ChatTemplate(source) for source in sources)
        self.template = self._given_template or plain
        self.tool_template = self._given_template or with_tools or plain
        source = None if self.tool_template is None else self.tool_template.source
        self.tool_family = self._given_family or (None if source is None else family_of(source))
        self.serves = True
        return hello

    async def stop(self) -> None:
        """End the engines and what runs beside them, and close the journal."""
        await self.fleet.stop()
        await self.jobs.stop()
        if self.serves:
            self.texts.stop()
            await self.grammars.stop()

    @property
    def hello(self) -> Hello:
        """What the engine has said of its model; only once it is ready."""
        assert self.fleet.hello is not None
        return self.fleet.hello

    def require_ready(self) -> None:
        """Refuse what needs an engine, unless there is one and it takes requests.

        Raises:
            HTTPError: 503.
        """
        if self.fleet.failure is not None:
            raise error_of(WorkerError(f"the engine does not serve: {self.fleet.failure}"))
        if self.draining or not self.serves:
            raise HTTPError(503, f"the server {'is shutting down' if self.draining else 'is starting'}",
                            code="unavailable", retry_after=5)  # fmt: skip

    def require_engine(self) -> None:
        """Refuse where no engine serves just now; requests that are made nevertheless wait for one.

        Raises:
            HTTPError: 503.
        """
        if not self.fleet.ready:
            raise HTTPError(503, "no engine serves just now: one is starting", code="unavailable", retry_after=5)

    def require_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            HTTPError: 404.
        """
        if name is not None and name != self.name:
            said = f"there is no model {name[:200]!r} here, but {self.name!r}"
            raise HTTPError(404, said, param="model", code="model_not_found")

    def require_causal(self) -> None:
        """Refuse what a model has to generate for, where it does not.

        Raises:
            HTTPError: 400.
        """
        if self.hello.pooling is not None:
            raise HTTPError(400, f"{self.name} {TASKS[self.hello.pooling.task]}", code="unsupported_task")

    def require_pooling(self, *tasks: str) -> PoolingFacts:
        """What is known of the model, where it says one thing of a sequence by one of these tasks.

        Raises:
            HTTPError: 400.
        """
        found = self.hello.pooling
        if found is None or found.task not in tasks:
            task = "generate" if found is None else found.task
            raise HTTPError(400, f"{self.name} {TASKS[task]}", code="unsupported_task")
        return found

    def require_receipts(self, asked: bool | None) -> None:
        """Refuse a request that asks for a receipt where none are made.

        Raises:
            HTTPError: 400.
        """
        if asked and self.receipts.level == "off":
            raise HTTPError(400, "receipt: this server makes none (--receipts off)", param="receipt")

    async def submit(self, asked: Ask, owner: str, reservation: Reservation) -> list[Answer]:
        """Have prompts answered.

        Args:
            owner: sha256 of the API key that asks; empty where the server has none.
            reservation: holds the answers' slots.

        Raises:
            HTTPError: 429 where too much waits already, 400 for what is never taken at once, 503 without an engine.
            InvalidInput: the grammar.
        """
        prompts, params = asked.prompts, asked.params
        await self.grammars.require(params.grammar, owner)
        self.require_ready()
        self.limiter.require(owner, len(prompts) * params.n, [len(prompt) for prompt in prompts])
        news = News()
        salt = _cache_salt(owner, asked.cache_salt)
        answers = [Answer(f"{next(self._numbers)}", prompt, params, news, asked.priority, salt) for prompt in prompts]
        self._add(answers, owner, reservation)
        return answers

    async def verify(
        self, receipt: bytes, lengths: Sequence[int], grammar: Grammar | None, owner: str, reservation: Reservation
    ) -> Verification:
        """Have a receipt replayed, within the bounds of answers.

        Args:
            receipt: a receipt as JSON.
            lengths: tokens of each of its samples, with those of its prompt.
            grammar: what they had to match.
            owner: as of ``submit``.
            reservation: as of ``submit``.

        Raises:
            HTTPError: as of ``submit``. InvalidInput: the grammar.
        """
        await self.grammars.require(grammar, owner)
        self.require_ready()
        self.limiter.require(owner, len(lengths), lengths)
        verification = Verification(f"{next(self._numbers)}", receipt, lengths)
        self._add([verification], owner, reservation)
        return verification

    def pool(
        self,
        prompts: Sequence[list[int]],
        pooling: Literal["last", "first", "mean"] | None,
        owner: str,
        reservation: Reservation,
        *,
        normalize: bool,
    ) -> Pooling:
        """Have the model say of each prompt what it says.

        Args:
            owner: as of ``submit``.
            reservation: as of ``submit``.

        Raises:
            HTTPError: as of ``submit``.
        """
        self.require_ready()
        self.limiter.require(owner, 1, [len(prompt) for prompt in prompts])
        asked = Pooling(f"{next(self._numbers)}", prompts, pooling, normalize)
        self._add([asked], owner, reservation)
        return asked

    def release(self, answers: Sequence[Answer]) -> None:
        """Give back the slots of answers that nobody reads any more, and cancel those that have not ended."""
        for answer in answers:
            if self.open.pop(answer.request_id, None) is None:
                continue
            self._slots.pop(answer.request_id).release()
            self.deadlines.forget(answer)
            cancelled = not answer.finished
            if cancelled:
                self.fleet.cancel(answer)
                answer.fail(WorkerError("the request was cancelled"))
            self.history.ended(answer, cancelled=cancelled)
            if not isinstance(answer, Verification):
                self.metrics.ended(answer, cancelled=cancelled)

    async def issue(self, job: Job) -> Issued | None:
        """The receipt of a job whose answers have ended, made once; None where none are made.

        A job that was restored has the receipt of its record, or none.

        Raises:
            StorageError: the log cannot be written.
        """
        async with job.issuing:
            if job.issued is None and not job.restored:
                name, template = (job.name, job.created, job.model.name), job.ask.template
                job.issued = await self.receipts.issue(
                    name, job.answers, self.hello, self.texts, template=template, salt=job.salt, owner=job.owner
                )
        return job.issued

    def _add(self, answers: Sequence[Answer], owner: str, reservation: Reservation) -> None:
        """Open answers and give them to the engines.

        Raises:
            HTTPError: the request is over, or nothing is served any more.
        """
        if reservation.released:
            raise HTTPError(400, CLIENT_LEFT)
        reservation.add(functools.partial(self.release, answers))
        for answer in answers:
            answer.owner = owner
            self.open[answer.request_id] = answer
            self._slots[answer.request_id] = self.limiter.take(owner, answer.params.n, len(answer.prompt_ids))
            self.deadlines.watch(answer)
        try:
            for answer in answers:
                self.fleet.add(answer)
        except DetcompileError as error:
            raise error_of(error) from error

    def _progressed(self, answer: Answer, delta: Delta) -> None:
        self.metrics.progressed(answer, delta)
        if answer.first_token is not None and answer.request_id in self._slots:
            self._slots[answer.request_id].begin()


def _cache_salt(owner: str, given: str) -> str:
    """Return the salt of a request's cached prefixes, which its API key and its own cache_salt make; "" for neither."""
    if not (owner or given):
        return ""
    return hashlib.sha256(f"{owner}:{given}".encode()).hexdigest()
