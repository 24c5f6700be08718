"""Engine: requests in, tokens out. A step reads: schedule, build, launch, read back, finish.

With ``overlap`` a step is planned and launched while the one before still runs: its input tokens are then taken from
the device, where that step will have drawn them. A sequence that turns out to have ended has run one row too many,
which nobody reads.
"""

import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import NamedTuple

from rich.progress import track

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_loop import EngineLoop, OutputQueue, finishing
from detcompile.runtime.intake import Intake, Prompt
from detcompile.runtime.kv_blocks import KVBlocks
from detcompile.runtime.metrics import EngineStats, StepRecord, Tally
from detcompile.runtime.outputs import Logprobs, RequestMetrics, RequestOutput
from detcompile.runtime.request import Request
from detcompile.runtime.sampling_params import SamplingParams
from detcompile.runtime.scheduler import Scheduler, StepPlan
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import BlockTables, StepEntry
from detcompile.runtime.step_work import build_work
from detcompile.runtime.worker import LaunchedStep, Worker

__all__ = ["Engine"]


class _InFlight(NamedTuple):
    """A launched step and whose rows are whose."""

    launched: LaunchedStep
    plan: StepPlan
    samples: tuple[Sequence, ...]
    prompts: tuple[StepEntry, ...]
    started: float
    host_seconds: float
    num_waiting: int


class Engine:
    """Serves requests over one KV cache. Made by ``CompiledModel.engine``; one thread drives it at a time.

    Args:
        worker: runs the steps. blocks: of the worker's KV cache.
        intake: turns prompts into checked requests.
        overlap: launch a step before the last one's tokens are read back.
    """

    def __init__(
        self, worker: Worker, blocks: KVBlocks, intake: Intake, config: EngineConfig, *, overlap: bool, max_context: int
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, blocks)
        self._worker = worker
        self._blocks = blocks
        self._intake = intake
        self._overlap = overlap
        width = blocks.pool.blocks_for(max_context + 1)
        self._tables = BlockTables(len(blocks.groups), config.max_num_seqs, width)
        self._names: set[str] = set()  # of requests queued or running
        self._requests: dict[str, Request] = {}
        self._owner: dict[Sequence, Request] = {}
        self._inbox: deque[Callable[[], None]] = deque()  # what other threads ask for, done between steps
        self._in_flight: _InFlight | None = None
        self._undelivered: dict[str, RequestOutput] = {}
        self._failure: BaseException | None = None
        self._arrivals = count()
        self._tally = Tally()
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
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do."""
        return bool(self._inbox or self._requests or self._in_flight or self._undelivered)

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
        try:
            touched = self._advance()
        except Exception as error:
            self._fail(error)
            raise EngineError(
                f"a step failed, and all requests with it: {error}. The cause is below; make a new engine"
            ) from error
        delivered, self._undelivered = self._undelivered, {}
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
        return self._tally.stats(self.scheduler, self._blocks)

    def check(self) -> None:
        """Assert that no block is lost and none counted twice; between steps, at any time."""
        self._blocks.check(self.scheduler.running)

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

    def _advance(self) -> list[Request]:
        while self._inbox:
            self._inbox.popleft()()
        before = self._in_flight
        self._in_flight = self._launch(before)
        if before is None and not self._overlap:
            before, self._in_flight = self._in_flight, None
        touched = {} if before is None else self._finish(before)
        if before is None and self._in_flight is None:
            assert not self.scheduler.num_unfinished, "sequences are left and none can run"
        return list(touched)

    def _launch(self, before: _InFlight | None) -> _InFlight | None:
        started = time.perf_counter()
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            self._tables.leave(sequence)
            self._tally.num_preemptions += 1
            self._metrics_of(sequence).num_preemptions += 1
        for entry in plan.entries[len(plan.entries) - len(plan.admitted) :]:  # what was admitted stands last
            self._note_admission(entry)
        if not plan.entries:
            return None
        samples = tuple(e.sequence for e in plan.entries if e.start + e.num_tokens == e.sequence.num_tokens)
        prompts = tuple(entry for entry in plan.entries if self._wants_prompt_logprobs(entry))
        pending = {} if before is None else {sequence: row for row, sequence in enumerate(before.samples)}
        work = build_work(plan.entries, samples, prompts, self._tables, self._blocks.pool.block_size, pending)
        launched = self._worker.launch(work)
        for sequence in samples:
            sequence.num_pending += 1
        host_seconds = time.perf_counter() - started
        return _InFlight(launched, plan, samples, prompts, time.monotonic(), host_seconds, len(self.scheduler.waiting))

    def _finish(self, step: _InFlight) -> dict[Request, None]:
        """Read a step's tokens back; returns the requests that it moved on."""
        result = self._worker.collect(step.launched)
        started = time.perf_counter()
        touched: dict[Request, None] = {}
        num_generated = 0
        for entry, found in zip(step.prompts, result.prompt_logprobs, strict=True):
            request = self._owner.get(entry.sequence)
            if request is not None:
                request.add_prompt_logprobs(entry.start + 1, found)
        for sequence, token, invalid, logprobs in zip(
            step.samples, result.tokens, result.invalid, result.logprobs, strict=True
        ):
            sequence.num_pending -= 1
            request = self._owner.get(sequence)
            if request is not None:  # neither cancelled nor ended meanwhile
                self._take(request, sequence, token, invalid, logprobs)
                touched[request] = None
                num_generated += not invalid
        for entry in step.plan.entries:
            if entry.sequence in self.scheduler.running:
                self._blocks.settle(entry.sequence)
        for request in touched:
            self._after_tokens(request)
        self._record(step, num_generated, time.perf_counter() - started)
        return touched

    def _take(
        self, request: Request, sequence: Sequence, token: int, invalid: bool, logprobs: Logprobs | None
    ) -> None:
        if invalid:
            where = f"request {request.output.request_id}, token {len(sequence.token_ids)}"
            request.end(
                sequence.sample_index,
                "error",
                EngineError(f"{where}: the model's logits are not numbers: check the weights and the dtype"),
            )
        else:
            request.add_token(sequence.sample_index, token, logprobs)

    def _after_tokens(self, request: Request) -> None:
        """Let go of what has ended; let the other samples start once the first has the prompt in the cache."""
        for sequence in request.sequences:
            if sequence.finish_reason is not None and sequence in self._owner:
                self._let_go(sequence)
        self._start_held(request)
        if request.output.finished:
            self._forget(request.output.request_id)

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
            if sequence in self._owner:
                self._let_go(sequence)
        self._undelivered[request_id] = request.output

    def _let_go(self, sequence: Sequence) -> None:
        del self._owner[sequence]
        self._worker.sampler.forget(sequence)
        self._tables.leave(sequence)
        self.scheduler.remove(sequence)

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

    def _note_admission(self, entry: StepEntry) -> None:
        metrics = self._metrics_of(entry.sequence)
        if metrics.first_scheduled is None:
            metrics.first_scheduled, metrics.num_cached_tokens = time.monotonic(), entry.start

    def _metrics_of(self, sequence: Sequence) -> RequestMetrics:
        metrics = self._owner[sequence].output.metrics
        assert metrics is not None
        return metrics

    def _wants_prompt_logprobs(self, entry: StepEntry) -> bool:
        sequence = entry.sequence
        if sequence.sampling.prompt_logprobs is None or sequence.sample_index > 0:
            return False
        return entry.start < sequence.num_prompt_tokens - 1

    def _record(self, step: _InFlight, num_tokens: int, finish_seconds: float) -> None:
        total = sum(entry.num_tokens for entry in step.plan.entries)
        decodes = sum(entry.start >= entry.sequence.num_prompt_tokens for entry in step.plan.entries)
        record = StepRecord(
            launched=step.started,
            finished=time.monotonic(),
            host_seconds=step.host_seconds + finish_seconds,
            num_prefill_tokens=total - decodes,
            num_decodes=decodes,
            num_waiting=step.num_waiting,
        )
        self._tally.add(record, num_tokens)
