"""State shared by all routes: admission, open answers, engines, tokenizer and readiness."""

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Sequence, Sized
from itertools import count
from typing import Literal

from msgspec.structs import replace

from detcompile.digests import fingerprint
from detcompile.errors import DetcompileError, InvalidInput, WorkerError
from detcompile.reasoning.formats import PARSERS, reasoning_parser_of
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.bodies import MAX_BODY, BodyLimiter
from detcompile.serving.chat_template import ChatTemplate
from detcompile.serving.dashboard.history import History
from detcompile.serving.engines.answers import Answer, AnswerSignal, Pooling, Verification
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.protocol import AdapterFile, Delta, EngineSpec, Hello, PoolingFacts, Weights
from detcompile.serving.grammar_check import GrammarCheck
from detcompile.serving.http_errors import CLIENT_LEFT, HTTPError, error_of
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.journal.jobs import Jobs
from detcompile.serving.journal.journal import Journal
from detcompile.serving.limiter import AdmissionLimiter, Deadlines, Reservation, Slot
from detcompile.serving.metrics import Metrics
from detcompile.serving.owned_cache import KeptResponses
from detcompile.serving.plain_tokenizer import tokenizer_digest
from detcompile.serving.receipts.issuer import Issued, Issuer
from detcompile.serving.tokenizer_pool import TokenizerPool
from detcompile.serving.tools.reader import FAMILIES, family_of

TASKS = {  # what a model can do, for errors about requests of another task
    "generate": "generates text: POST /v1/completions, /v1/chat/completions or /v1/responses",
    "embed": "gives embeddings: POST /v1/embeddings, /v1/score or /v1/rerank",
    "classify": "classifies: POST /classify, or with one label /v1/score or /v1/rerank",
}


class Service:
    """One model behind a fleet of engines.

    Args:
        name: model name for clients; None takes the name it was loaded by.
        chat_template: replaces the tokenizer's template.
        tool_parser: tool-call format (see tools/reader.py); None infers it from the chat template.
        reasoning_parser: reasoning format (see reasoning.py) or "none"; None infers it from the chat template.
        max_queue: limit of open samples, plus requests that no engine has seen yet.
        max_queued_tokens: limit of prompt tokens of open answers without a first token.
        max_body: bytes of a request's body.
        queue_timeout: seconds until the first token; also the limit for waiting for a grammar check.
        timeout: seconds for a whole answer.
        fleet: creates the fleet; its argument is called with each answer and delta.
        receipts: issues receipts; None takes an unsigned Issuer.
        journal: records requests with an Idempotency-Key; closed by ``stop``.
        keys: the current API keys. With several, each may use half of a limit.
        first_weights: name and number of the first weights; None if the weights cannot change.

    Raises:
        InvalidInput: the chat template is not valid Jinja.

    Attributes:
        serves: the engines have been ready once.
        draining: no new requests are admitted; open ones finish.
        open: unfinished answers by request_id.
        history: the most recent finished answers.
        model: the model as replies name it; set by ``start``.
        adapters: the loaded LoRA adapters by name.
        limiter: admission limits; handlers check it before expensive work.
        bodies: reads bodies within limits.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        chat_template: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_queue: int = 512,
        max_queued_tokens: int = 262144,
        max_body: int = MAX_BODY,
        queue_timeout: float = 60.0,
        timeout: float = 600.0,
        fleet: Callable[[Callable[[Answer, Delta], None]], Fleet] = Fleet,
        receipts: Issuer | None = None,
        journal: Journal | None = None,
        keys: Sized = (),
        first_weights: Weights | None = None,
    ) -> None:
        self.receipts = receipts or Issuer()
        self.fleet = fleet(self._progressed)
        self.metrics = Metrics(self.fleet, max_queue, max_queued_tokens)
        self.limiter = AdmissionLimiter(max_queue, max_queued_tokens, self.metrics, keys)
        self.bodies = BodyLimiter(max_body, self.metrics, keys)
        self.responses = KeptResponses()
        kept = "Bytes of receipts and responses kept for later requests."
        self.metrics.add_gauge("kept_bytes", kept, lambda: self.receipts.num_bytes + self.responses.num_bytes)
        self.deadlines = Deadlines(queue_timeout, timeout, self.fleet.cancel)
        self.jobs = Jobs(self.submit, self.issue, self.model_of, self.receipts.salt, journal=journal)
        self.history = History()
        self.draining = False
        self.open: dict[str, Answer] = {}
        self._slots: dict[str, Slot] = {}  # by request_id
        self.created = int(time.time())
        self._name = name
        self._given_family = None if tool_parser is None else FAMILIES[tool_parser]
        self._given_parser = reasoning_parser
        self._given_template = None if chat_template is None else ChatTemplate(chat_template)
        self.serves = False
        self._queue_timeout = queue_timeout
        self._numbers = count()
        self._first_weights = first_weights
        self.adapters: dict[str, AdapterFile] = {}
        self._adapting = asyncio.Lock()
        self._adapter_numbers = count()

    async def start(self, spec: EngineSpec) -> Hello:
        """Start the engines and wait until they serve.

        Raises:
            DetcompileError: the engines cannot start.
        """
        adapters = {name: replace(file, loaded_as=self._loaded_as(name)) for name, file in spec.adapters.items()}
        await self.fleet.start(replace(spec, adapters=adapters))
        hello = await self.fleet.settled()
        self.name = self._name or hello.name
        texts = {"special_tokens": str(sorted(hello.special_ids)), "tokenizer": str(tokenizer_digest(hello.tokenizer))}
        self.model = ServedModel(self.name, hello.fingerprint, hello.fingerprint_parts | texts)
        first = self._first_weights
        if first is not None:
            digest = hello.fingerprint_parts.get("weights", "")
            if first.digest not in ("", digest):
                raise InvalidInput(f"the kept weights of version {first.version} have changed since they were served")
            self.fleet.weights = Weights(first.version, first.number, hello.fingerprint, digest)
            self.model = self.model.with_weights(self.fleet.weights)
        self.adapters = {name: replace(adapters[name], digest=one) for name, one in hello.adapters.items()}
        self.fleet.spec = replace(spec, adapters=self.adapters)
        if self.name in self.adapters:
            raise InvalidInput(f"adapter {self.name!r} has the model's name: choose another one")
        self.texts = TokenizerPool(hello, self.limiter.waiting)
        self.grammars = GrammarCheck(hello.tokenizer, self._queue_timeout, self.limiter.waiting)
        sources = hello.chat_template, hello.tool_template
        plain, with_tools = (None if source is None else ChatTemplate(source) for source in sources)
        self.template = self._given_template or plain
        self.tool_template = self._given_template or with_tools or plain
        source = None if self.tool_template is None else self.tool_template.source
        self.tool_family = self._given_family or (None if source is None else family_of(source))
        source = None if self.template is None else self.template.source
        self.reasoning_parser = None if source is None else reasoning_parser_of(source)
        if self._given_parser is not None:
            self.reasoning_parser = PARSERS.get(self._given_parser)
        self.serves = True
        return hello

    def follow_weights(self) -> None:
        """Take the fleet's new weights. Answers without a token restart with them."""
        assert self.fleet.weights is not None
        self.model = self.model.with_weights(self.fleet.weights)
        for answer in self.open.values():
            answer.restart()

    async def stop(self) -> None:
        """Stop the engines, the journal and the helper processes."""
        await self.fleet.stop()
        await self.jobs.stop()
        if self.serves:
            self.texts.stop()
            await self.grammars.stop()

    @property
    def hello(self) -> Hello:
        """Return the engine's description of the model. Only valid once an engine is ready."""
        assert self.fleet.hello is not None
        return self.fleet.hello

    def hold(self, reason: str, *, interrupt: bool) -> None:
        """Hold all answers and their deadlines, as Fleet.hold."""
        self.fleet.hold(reason, interrupt=interrupt)
        self.deadlines.pause()

    def end_hold(self, reason: str) -> None:
        """End a hold."""
        self.fleet.end_hold(reason)
        if not self.fleet.is_held:
            self.deadlines.resume()

    def require_ready(self) -> None:
        """Raise HTTPError 503 unless the server admits requests."""
        if self.fleet.failure is not None:
            raise error_of(WorkerError(f"the engine does not serve: {self.fleet.failure}"))
        if self.draining or not self.serves:
            raise HTTPError(503, f"the server {'is shutting down' if self.draining else 'is starting'}",
                            code="unavailable", retry_after=5)  # fmt: skip

    def require_engine(self) -> None:
        """Raise HTTPError 503 while no engine serves. Requests that skip this check wait for an engine."""
        if not self.fleet.ready:
            raise HTTPError(503, "no engine is ready: one is starting", code="unavailable", retry_after=5)

    def require_model(self, name: str | None) -> None:
        """Raise HTTPError 404 for another model than the served one and its adapters."""
        if name is not None and name != self.name and name not in self.adapters:
            message = f"unknown model {name[:200]!r}: this server has {self.name!r}"
            raise HTTPError(404, message, param="model", code="model_not_found")

    def adapter_of(self, name: str | None) -> str:
        """Return the adapter that a request's ``model`` names; empty for the plain model.

        Raises:
            HTTPError: 404 for another name.
        """
        self.require_model(name)
        return name if name is not None and name in self.adapters else ""

    def model_of(self, adapter: str) -> ServedModel:
        """Return the current model with an adapter, or without one for an empty name."""
        if not adapter:
            return self.model
        part = {"adapter": self.adapters[adapter].digest if adapter in self.adapters else ""}
        whole = fingerprint(self.hello.fingerprint_parts | part)
        return ServedModel(adapter, whole, self.model.parts | part, self.model.weight_version)

    async def load_adapter(self, name: str, path: str, *, replace_loaded: bool = False) -> None:
        """Load an adapter in every engine; requests may name it from then on.

        Args:
            replace_loaded: replace a loaded adapter of this name, which serves until then.

        Raises:
            HTTPError: the name is the model's or another adapter's, or the engines sleep.
            InvalidInput: the adapter cannot be read, or does not fit; nothing has changed.
            DetcompileError: an engine failed; nothing has changed.
        """
        async with self._adapting:
            before = self.adapters.get(name)
            if name == self.name or (before is not None and not replace_loaded):
                raise HTTPError(400, f"{name[:200]!r} is served already: unload it, or choose another name",
                                param="lora_name")  # fmt: skip
            await self.engines_awake()
            loaded_as = self._loaded_as(name)
            try:
                results = await self.fleet.control("load_adapter", name=loaded_as, path=path)
                if len({result["digest"] for result in results}) > 1:
                    raise InvalidInput(
                        f"{path} differs among the machines of the engines: give all of them the same files"
                    )
            except DetcompileError:
                with contextlib.suppress(DetcompileError):  # of engines that do not have it
                    await self.fleet.control("unload_adapter", name=loaded_as)
                raise
            self._set_adapters(self.adapters | {name: AdapterFile(path, results[0]["digest"], loaded_as)})
            if before is not None:
                with contextlib.suppress(DetcompileError):  # of engines that were lost
                    await self.fleet.control("unload_adapter", name=before.loaded_as)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Answers that have started continue with it.

        Raises:
            HTTPError: 404 for an unknown name, 409 if the engines sleep.
            DetcompileError: an engine failed.
        """
        async with self._adapting:
            if name not in self.adapters:
                raise HTTPError(404, f"unknown adapter {name[:200]!r}", param="lora_name", code="model_not_found")
            await self.engines_awake()
            loaded_as = self.adapters[name].loaded_as
            self._set_adapters({other: file for other, file in self.adapters.items() if other != name})
            await self.fleet.control("unload_adapter", name=loaded_as)

    async def engines_awake(self) -> None:
        """Wait for all engines.

        Raises:
            HTTPError: 409 if they sleep.
        """
        if self.fleet.is_asleep:
            raise HTTPError(409, "the engines sleep: POST /wake_up first", code="sleeping")
        await self.fleet.all_ready()

    def _loaded_as(self, name: str) -> str:
        """Return a new internal name, so that engines can hold two adapters with one public name."""
        return f"{name}#{next(self._adapter_numbers)}"

    def _set_adapters(self, adapters: dict[str, AdapterFile]) -> None:
        """Serve these adapters, also by engines that start from now on."""
        self.adapters = adapters
        self.fleet.spec = replace(self.fleet.spec, adapters=adapters)

    def require_causal(self) -> None:
        """Raise HTTPError 400 if the model does not generate."""
        if self.hello.pooling is not None:
            raise HTTPError(400, f"{self.name} {TASKS[self.hello.pooling.task]}", code="unsupported_task")

    def require_generation(self, receipt: bool | None = None) -> None:
        """Raise HTTPError unless the server draws answers, and with a receipt if one is wanted."""
        self.require_ready()
        self.require_causal()
        if receipt and self.receipts.level == "off":
            raise HTTPError(400, "receipt: this server issues no receipts (--receipts off)", param="receipt")

    def require_pooling(self, *tasks: str) -> PoolingFacts:
        """Return the pooling facts of a model that does one of these tasks.

        Raises:
            HTTPError: 400.
        """
        pooling = self.hello.pooling
        if pooling is None or pooling.task not in tasks:
            task = "generate" if pooling is None else pooling.task
            raise HTTPError(400, f"{self.name} {TASKS[task]}", code="unsupported_task")
        return pooling

    async def submit(self, ask: Ask, owner: str, reservation: Reservation) -> list[Answer]:
        """Queue prompts for the engines and return their answers.

        Args:
            owner: sha256 of the request's API key; empty if the server has none.
            reservation: holds the answers' slots.

        Raises:
            HTTPError: 429 over a limit, 400 for a request that can never fit, 503 without an engine.
            InvalidInput: the grammar is rejected.
        """
        prompts, params = ask.prompts, ask.params
        await self.grammars.require(params.grammar, owner)
        self.require_ready()
        self.limiter.require(owner, len(prompts) * params.n, [len(prompt) for prompt in prompts])
        self.require_model(ask.adapter or None)  # it may have been unloaded meanwhile
        adapter = (ask.adapter, self.adapters[ask.adapter].digest if ask.adapter else "")
        rest = (AnswerSignal(), ask.priority, _cache_salt(owner, ask.cache_salt), *adapter)
        answers = [Answer(f"{next(self._numbers)}", prompt, params, *rest) for prompt in prompts]
        self._add(answers, owner, reservation)
        return answers

    async def verify(
        self, receipt: bytes, lengths: Sequence[int], grammar: Grammar | None, owner: str, reservation: Reservation
    ) -> Verification:
        """Queue the replay of a receipt, within the limits of answers.

        Args:
            receipt: the receipt as JSON.
            lengths: tokens of each sample, including its prompt.
            grammar: the grammar of the samples.
            owner: see ``submit``.
            reservation: see ``submit``.

        Raises:
            HTTPError: see ``submit``.
            InvalidInput: the grammar is rejected.
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
        """Queue prompts for a pooling model.

        Args:
            owner: see ``submit``.
            reservation: see ``submit``.

        Raises:
            HTTPError: see ``submit``.
        """
        self.require_ready()
        self.limiter.require(owner, 1, [len(prompt) for prompt in prompts])
        task = Pooling(f"{next(self._numbers)}", prompts, pooling, normalize)
        self._add([task], owner, reservation)
        return task

    def release(self, answers: Sequence[Answer]) -> None:
        """Release the slots of answers without readers, and cancel unfinished ones."""
        for answer in answers:
            if self.open.pop(answer.request_id, None) is None:
                continue
            self._slots.pop(answer.request_id).release()
            self.deadlines.forget(answer)
            cancelled = not answer.finished
            if cancelled:
                self.fleet.cancel(answer)
                answer.fail(WorkerError("the request was canceled"))
            self.history.ended(answer, cancelled=cancelled)
            if not isinstance(answer, Verification):
                self.metrics.ended(answer, cancelled=cancelled)

    async def issue(self, job: Job) -> Issued | None:
        """Return the receipt of a job whose answers have ended, issued once; None if receipts are off.

        A restored job has the receipt of its journal record, or none. An aborted answer has none.

        Raises:
            StorageError: the receipt log cannot be written.
        """
        async with job.issuing:
            if job.issued is None and not job.restored and not any(answer.aborted for answer in job.answers):
                name, weights, hello = (job.name, job.created, job.model.name), job.weights, self.hello
                if job.ask.adapter:
                    parts = hello.fingerprint_parts | {"adapter": job.model.parts["adapter"]}
                    hello = replace(hello, fingerprint=job.model.fingerprint, fingerprint_parts=parts)
                elif weights is not None:
                    parts = hello.fingerprint_parts | {"weights": weights.digest}
                    hello = replace(hello, fingerprint=weights.fingerprint, fingerprint_parts=parts)
                job.issued = await self.receipts.issue(
                    name,
                    job.answers,
                    hello,
                    self.texts,
                    template=job.ask.template,
                    salt=job.salt,
                    owner=job.owner,
                    version=None if weights is None else weights.version,
                )
        return job.issued

    def _add(self, answers: Sequence[Answer], owner: str, reservation: Reservation) -> None:
        """Register answers and hand them to the engines."""
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


def _cache_salt(owner: str, from_request: str) -> str:
    """Return the salt of a request's cached prefixes, derived from its API key and its cache_salt; "" without both."""
    if not (owner or from_request):
        return ""
    return hashlib.sha256(f"{owner}:{from_request}".encode()).hexdigest()
