"""Engine: requests in, tokens out. It keeps the requests; a Pipeline runs the steps."""

import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import count

from rich.progress import track

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_loop import EngineLoop, OutputQueue, finishing
from detcompile.runtime.intake import Intake, Prompt
from detcompile.runtime.kv_blocks import KVBlocks
from detcompile.runtime.metrics import EngineStats
from detcompile.runtime.outputs import Logprobs, RequestMetrics, RequestOutput
from detcompile.runtime.pipeline import Pipeline
from detcompile.runtime.request import Request
from detcompile.runtime.sampling_params import SamplingParams
from detcompile.runtime.scheduler import Scheduler
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.short_collections import ShortCollections
from detcompile.runtime.speculation import SpeculationConfig, Speculator
from detcompile.runtime.step_builder import StepEntry
from detcompile.runtime.worker import Worker

__all__ = ["Engine"]


class Engine:
    """Serves requests over one KV cache. Made by ``CompiledModel.engine``; one thread drives it at a time.

    Args:
        worker: runs the steps. blocks: of the worker's KV cache.
        intake: turns prompts into checked requests.
        overlap: launch a step before the last one's tokens are read back, unless it drafts.
    """

    def __init__(
        self,
        worker: Worker,
        blocks: KVBlocks,
        intake: Intake,
        config: EngineConfig,
        *,
        overlap: bool,
        max_context: int,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        if speculation is not None and speculation.acceptance == "rejection" and not isinstance(worker, Worker):
            raise InvalidInput("workers in other processes accept exactly: take acceptance='exact', or tp=1")
        self.config = config
        self.scheduler = Scheduler(config, blocks)
        self._blocks = blocks
        self._intake = intake
        self.speculator = None if speculation is None else Speculator(speculation, blocks, intake.vocab_size)
        self._pipeline = Pipeline(
            self.scheduler,
            worker,
            self,
            width=blocks.pool.blocks_for(max_context + 1),
            overlap=overlap,
            speculator=self.speculator,
        )
        self._names: set[str] = set()  # of requests queued or running
        self._requests: dict[str, Request] = {}
        self._owner: dict[Sequence, Request] = {}
        self._inbox: deque[Callable[[], None]] = deque()  # what other threads ask for, done between steps
        self._touched: dict[Request, None] = {}  # requests that the step in the making moved on
        self._undelivered: dict[str, RequestOutput] = {}
        self._failure: BaseException | None = None
        self._arrivals = count()
        self._collections = ShortCollections()
        self._loop: EngineLoop | None = None  # the thread that steps this engine, once somebody streams

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream_text: bool = False,
    ) -> str:
        """Queue a request; ``step`` serves it. May be called from any thread.

        Args:
            prompt: text, or token ids.
            priority: lower is served earlier.
            stream_text: keep ``outputs[i].text`` up to date after every token, not only at the end.

        Returns:
            Its id.

        Raises:
            InvalidInput: a prompt or parameters that cannot be served; nothing is queued then.
            EngineError: the engine has failed before.
        """
        self._check_alive()
        arrival = next(self._arrivals)
        name = f"request-{arrival}" if request_id is None else request_id
        if name in self._names:
            raise InvalidInput(f"request_id {name!r} is in use: give every request its own")
        request = self._intake.request(
            name, prompt, params, arrival=arrival, priority=priority, stream_text=stream_text
        )
        for sequence in request.sequences:
            self._check_fits(sequence)
        self._names.add(name)
        self._inbox.append(lambda: self._start(request))
        return name

    def cancel(self, request_id: str) -> None:
        """End a request at its next step, wherever it stands; unknown or finished ones are left alone."""
        self._inbox.append(lambda: self._cancel(request_id))

    @property
    def failed(self) -> bool:
        """Whether a step failed, so that this engine serves no more."""
        return self._failure is not None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do."""
        return bool(self._inbox or self._requests or self._pipeline.busy or self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Launch a step and finish one; returns the outputs that got longer or ended.

        Raises:
            EngineError: a step failed on the device. Every request has ended then, and the engine serves no more.
            InvalidInput: the engine steps itself, since somebody streams.
        """
        if self._loop is not None:
            raise InvalidInput("this engine streams, so a thread of its own steps it: use stream() or generate()")
        return self.advance()

    def advance(self) -> list[RequestOutput]:
        """``step``, for whoever drives the engine."""
        self._check_alive()
        self._collections.begin()
        try:
            touched = self._advance()
        except Exception as error:
            self._collections.end()
            self._fail(error)
            raise EngineError(
                f"a step failed, and all requests with it: {error}. The cause is below; make a new engine"
            ) from error
        delivered, self._undelivered = self._undelivered, {}
        if not self.has_unfinished_requests:
            self._collections.end()
        return list((delivered | {request.output.request_id: request.output for request in touched}).values())

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """``async for output in engine.stream(prompt, params)``: the request's output after each of its steps.

        From the first call on, a thread steps the engine. Leaving the iteration cancels the request.

        Raises:
            InvalidInput: as ``add_request``. EngineError: the engine failed.
        """
        if self._loop is None:
            self._loop = EngineLoop(self)
        name = f"stream-{next(self._arrivals)}"
        add = functools.partial(
            self.add_request, prompt, params, request_id=name, priority=priority, stream_text=True
        )
        async for output in self._loop.stream(name, add):
            yield output

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Serve prompts to their ends.

        Args:
            prompts: one prompt (text, or token ids), or a list of prompts.
            params: for all, or one a prompt.
            progress: show a bar.

        Returns:
            One RequestOutput a prompt, in their order. A prompt that cannot be served has its ``error`` set, and the
            others are served all the same.

        Raises:
            InvalidInput: not one params a prompt.
        """
        results: list[RequestOutput] = []
        finished = OutputQueue()
        for prompt, own in self._intake.pairs(prompts, params):
            name = f"generate-{next(self._arrivals)}"
            add = functools.partial(self.add_request, prompt, own, request_id=name)
            try:
                add() if self._loop is None else self._loop.listen(name, finished.put, add)
                results.append(RequestOutput(name, None, [], None, []))
            except InvalidInput as error:
                results.append(self._intake.refusal(prompt, error))
        left = {output.request_id for output in results if output.error is None}
        ended = self._finishing(left) if self._loop is None else finishing(finished, left)
        shown = track(ended, "generating", total=len(left), disable=not progress, transient=True)
        found: dict[str, RequestOutput] = {}
        try:
            found |= {output.request_id: output for output in shown}
        except BaseException:  # an interrupt, above all: do not go on with what nobody waits for
            for name in left - found.keys():
                self.cancel(name)
            raise
        return [found.get(output.request_id, output) for output in results]

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self._pipeline.tally.stats(self.scheduler, self._blocks)

    def check(self) -> None:
        """Assert that no block is lost and none counted twice; between steps, at any time."""
        self._blocks.check(self.scheduler.running, self._pipeline.forked)

    def _finishing(self, names: set[str]) -> Iterator[RequestOutput]:
        """Steps until these requests have ended; what others got meanwhile waits for the next ``step``."""
        left = set(names)
        while left:
            for output in self.step():
                if output.request_id not in names:
                    self._undelivered[output.request_id] = output
                elif output.finished:
                    left.remove(output.request_id)
                    yield output

    def planning(self) -> None:
        """Let go of what has ended, and do what other threads asked for."""
        for request in self._touched:
            self._after_tokens(request)
        while self._inbox:
            self._inbox.popleft()()

    def is_open(self, sequence: Sequence) -> bool:
        """Whether anybody still waits for its tokens."""
        return sequence in self._owner

    def admitted(self, entry: StepEntry) -> None:
        """Note when the request first ran, and what the cache gave it."""
        metrics = self._metrics_of(entry.sequence)
        if metrics.first_scheduled is None:
            metrics.first_scheduled, metrics.num_cached_tokens = time.monotonic(), entry.start

    def preempted(self, sequence: Sequence) -> None:
        """Count it."""
        self._metrics_of(sequence).num_preemptions += 1

    def drew(self, sequence: Sequence, token: int | None, logprobs: Logprobs | None) -> bool:
        """Give the sequence's request its next token; None ends it with an error. Whether it goes on."""
        request = self._owner[sequence]
        self._touched[request] = None
        if token is None:
            where = f"request {request.output.request_id}, token {len(sequence.token_ids)}"
            error = EngineError(f"{where}: the model's logits are not numbers: check the weights and the dtype")
            request.end(sequence.sample_index, "error", error)
        else:
            request.add_token(sequence.sample_index, token, logprobs)
        return sequence.finish_reason is None

    def scored(self, sequence: Sequence, start: int, found: list[Logprobs]) -> None:
        """Give the request logprobs of its prompt."""
        self._owner[sequence].add_prompt_logprobs(start, found)

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of the request."""
        metrics = self._metrics_of(sequence)
        metrics.num_drafted_tokens += num_drafted
        metrics.num_accepted_tokens += num_accepted

    def broke(self, sequence: Sequence, error: Exception) -> None:
        """Something that is the request's own fault raised where it was planned or drawn: it ends alone."""
        request = self._owner.get(sequence)
        if request is not None:
            self._break(request, error)

    def _advance(self) -> list[Request]:
        self._touched = {}
        self._pipeline.advance()
        for request in self._touched:
            for sequence in request.stream():
                self._pipeline.forget(sequence)
            self._after_tokens(request)
        return list(self._touched)

    def _after_tokens(self, request: Request) -> None:
        """Let go of what has ended; let the other samples start once the first has the prompt in the cache."""
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                self._owner.pop(sequence, None)
        self._start_held(request)
        name = request.output.request_id
        if request.output.finished and self._requests.get(name) is request:  # another may have its name by now
            self._forget(name)

    def _break(self, request: Request, error: Exception) -> None:
        """End a request that raised, and it alone: its sequences leave before the next step is planned."""
        name = request.output.request_id
        failure = EngineError(f"request {name} failed, and it alone: {error!r}")
        failure.__cause__ = error
        request.fail(failure)
        request.held = []
        for sequence in request.sequences:
            self._owner.pop(sequence, None)
        self._touched[request] = None
        self._inbox.append(lambda: self._let_go(request))

    def _let_go(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence in self.scheduler:
                self._pipeline.forget(sequence)
        name = request.output.request_id
        if self._requests.get(name, request) is request:
            self._forget(name)

    def _forget(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:  # an id that nobody has yet may be queued behind this
            self._names.discard(request_id)
        return request

    def _start(self, request: Request) -> None:
        self._requests[request.output.request_id] = request
        self._owner |= dict.fromkeys(request.sequences, request)
        self.scheduler.add(request.sequences[0])
        if not self._blocks.prefix_caching:
            self._start_held(request)

    def _start_held(self, request: Request) -> None:
        for sequence in request.held:
            if sequence in self._owner:
                self.scheduler.add(sequence)
        request.held = []

    def _cancel(self, request_id: str) -> None:
        request = self._forget(request_id)
        if request is None:
            return
        for sequence in request.held:
            del self._owner[sequence]
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                request.end(sequence.sample_index, "abort")
            if self._owner.pop(sequence, None) is not None:
                self._pipeline.forget(sequence)
        self._undelivered[request_id] = request.output

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for request in self._requests.values():
            request.fail(EngineError(f"the engine failed: {error}"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"this engine failed before: {self._failure}. Make a new one")

    def _check_fits(self, sequence: Sequence) -> None:
        needed, there = self.scheduler.most_blocks(sequence), self._blocks.pool.num_usable
        if needed > there:
            raise InvalidInput(
                f"{len(sequence.token_ids)} prompt tokens and at most {sequence.most_tokens} in all need {needed} KV"
                f" blocks of {self.config.block_size} tokens, the engine has {there}: shorten it, lower max_tokens, or"
                " give the engine more memory"
            )

    def _metrics_of(self, sequence: Sequence) -> RequestMetrics:
        metrics = self._owner[sequence].output.metrics
        assert metrics is not None
        return metrics
