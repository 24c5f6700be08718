"""Engine: requests in, tokens out. A RequestBook keeps the requests, a Pipeline runs the steps, threads take turns."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import Any, get_args

from rich.progress import track

from detcompile.errors import EngineError, InvalidInput
from detcompile.other_names import naming_equivalents
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_loop import EngineLoop
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.kv.prefixes import Prefixes
from detcompile.runtime.metrics import EngineStats
from detcompile.runtime.pipeline import Pipeline
from detcompile.runtime.request_book import RequestBook
from detcompile.runtime.requests.admission import Admission, Prompt
from detcompile.runtime.requests.copies import OutputKind
from detcompile.runtime.requests.deliveries import Deliveries, Mailbox, Receiver
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.turns import Turns, without_interrupts
from detcompile.runtime.scheduler import Scheduler
from detcompile.runtime.speculation.speculator import SpeculationConfig, Speculator
from detcompile.runtime.step.interfaces import StepWorker
from detcompile.runtime.step_turns import StepTurns

__all__ = ["Engine"]

REQUEST_NAMES = {
    "lora_request": "merge the adapter into the weights",
    "prompt_token_ids": "pass the token ids as the prompt",
    "sampling_params": "pass params",
    "use_tqdm": "pass progress to generate()",
}


class Engine:
    """Serves requests over one KV cache. Made by ``CompiledModel.engine``; any thread may call it, many at a time.

    Threads take turns at steps; each gets the outputs that it waits for, as its own copies. A request that fails ends
    alone, with its ``error``; a step that fails on the device ends all of them, and the engine.

    Args:
        worker: runs the steps.
        blocks: the blocks of the worker's KV cache.
        admission: turns prompts into checked requests.
        overlap: launch a step before the last one's tokens are read back, unless it drafts.
        max_context: tokens that a sequence may hold.
        prefixes: makes what exports KV blocks, given what every step takes, and what forgets those of other weights.
        weights_version: returns another number once the model's weights are others; what was computed under other
            weights is not used.

    Attributes:
        config: the settings it was made with.
        prefixes: gives KV blocks to other engines of the model, and takes theirs.
        speculator: drafts, and counts how right drafts were; None without speculation.
    """

    def __init__(
        self,
        worker: StepWorker,
        blocks: KVBlocks,
        admission: Admission,
        config: EngineConfig,
        *,
        overlap: bool,
        max_context: int,
        prefixes: Callable[[Turns, Callable[[], None]], Prefixes],
        speculation: SpeculationConfig | None = None,
        weights_version: Callable[..., int] = lambda *, look=False: 0,
    ) -> None:
        if speculation is not None and speculation.acceptance == "rejection" and not worker.accepts_rejection:
            raise InvalidInput("workers in other processes accept exactly: take acceptance='exact', or tp=1")
        self.config = config
        self.speculator = None if speculation is None else Speculator(speculation, blocks, admission.vocab_size)
        self._blocks, self._admission = blocks, admission
        self._arrivals, self._deliveries = count(), Deliveries()
        self._scheduler = Scheduler(config, blocks, worker.num_stages)
        self._book = RequestBook(
            self._scheduler,
            together=not blocks.prefix_caching,
            vocab_size=admission.vocab_size,
            forget=lambda sequence: self._pipeline.forget(sequence),
            deliveries=self._deliveries,
            weights_version=weights_version,
        )
        self._pipeline = Pipeline(
            self._scheduler,
            worker,
            self._book,
            width=blocks.pool.blocks_for(max_context + 1),
            overlap=overlap,
            speculator=self.speculator,
        )
        self._steps = StepTurns(self._pipeline, self._book)
        self.prefixes = prefixes(self._steps.turns, self._book.follow_weights)
        self._loop = EngineLoop(self._steps)  # steps this engine while somebody streams

    @naming_equivalents("engine.add_request", REQUEST_NAMES)
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream_text: bool = False,
        resume: Mapping[int, SequenceOf[int]] | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> str:
        """Queue a request; ``step`` serves it. May be called from any thread.

        Args:
            prompt: text, token ids, or a dict of them (runtime.requests.prompts).
            params: how to draw and when to end; None takes the defaults.
            request_id: the request's id, if the caller names it.
            priority: an integer; lower is served earlier.
            stream_text: keep ``outputs[i].text`` up to date after every token, not only at the end.
            resume: samples to go on with, by their index, and the tokens that each has drawn before; samples not named
                are not served. The same prompt, parameters and seed end in the bits of one run. Logprobs are of the
                tokens drawn here, prompt logprobs come with sample 0.
            output_kind: "cumulative": ``step`` returns all of an output that got longer; "delta": what is new of it,
                with text only if ``stream_text``; "final_only": an output that has ended.

        Returns:
            The request's id.

        Raises:
            InvalidInput: a prompt or parameters that cannot be served; nothing is queued then.
            EngineError: the engine has failed before.
        """
        how: dict[str, Any] = {"stream_text": stream_text, "resume": resume, "output_kind": output_kind}
        return self._add(request_id, "request", prompt, params, priority=priority, **how)

    def cancel(self, request_id: str) -> None:
        """End a request at its next step, wherever it stands; unknown or finished ones are left alone."""
        self._book.cancel(request_id)

    @property
    def failed(self) -> bool:
        """Whether a step failed, so that this engine serves no more."""
        return self._steps.failure is not None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do, or to give."""
        return self._pipeline.busy or self._deliveries.any_kept or not self._book.is_empty

    def step(self) -> list[RequestOutput]:
        """Run a step; returns the outputs of ``add_request`` that got longer or ended, each to one of several threads.

        Plan, draft, build, launch, collect and settle (runtime/pipeline.py), in turn with other threads.

        Raises:
            EngineError: a step failed on the device. Every request has ended then, and the engine serves no more.
        """
        self._steps.step()
        return self._deliveries.take()

    @naming_equivalents("engine.stream", REQUEST_NAMES)
    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """``async for output in engine.stream(prompt, params)``: the request's output after each of its steps.

        While anybody streams, a thread of the engine's own steps it. Leaving the iteration cancels the request.

        Raises:
            InvalidInput: as ``add_request``. EngineError: the engine failed.
        """
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | EngineError]()

        def receive(output: RequestOutput | EngineError) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        name = self._add(None, "stream", prompt, params, priority=priority, stream_text=True, receiver=receive)
        finished = False
        try:
            self._loop.wake()
            while not finished:
                output = await outputs.get()
                if isinstance(output, EngineError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._deliveries.drop(name)
                self.cancel(name)
                self._loop.wake()

    @naming_equivalents("engine.generate", REQUEST_NAMES)
    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress: bool = True,
        priority: SequenceOf[int] | None = None,
        strict: bool = False,
    ) -> list[RequestOutput]:
        """Serve prompts to their ends.

        Args:
            prompts: one prompt, or a list of prompts (runtime.requests.prompts says what one may be).
            params: how to draw: one for all prompts, or one a prompt.
            progress: show a bar on the terminal.
            priority: an integer a prompt, as ``add_request`` takes it.
            strict: raise the refusal of a prompt, before any is served, instead of giving it as an ``error``.

        Returns:
            One RequestOutput a prompt, in their order. A prompt that cannot be served has its ``error`` set and one
            empty output of finish_reason "error"; the others are served all the same.

        Raises:
            InvalidInput: neither a prompt nor a list of them, or not one params a prompt; with ``strict`` a prompt
                that cannot be served, by its index.
            EngineError: the engine failed.
        """
        mailbox, results = Mailbox(self._steps.turns), []
        found: dict[str, RequestOutput] = {}
        try:
            for index, (prompt, own, urgency) in enumerate(self._admission.asked(prompts, params, priority)):
                try:
                    to: dict[str, Any] = {"receiver": mailbox.receive, "output_kind": "final_only"}
                    name = self._add(None, "generate", prompt, own, priority=urgency, **to)
                    results.append(RequestOutput(name, None, [], None, []))
                except InvalidInput as error:
                    if strict:
                        raise InvalidInput(f"prompt {index}: {error}") from error
                    results.append(self._admission.refusal(prompt, error))
            left = {output.request_id for output in results if output.error is None}
            ended = self._steps.serve(left, mailbox)
            for output in track(ended, "generating", total=len(left), disable=not progress, transient=True):
                found[output.request_id] = output
        except BaseException:  # an interrupt, above all: do not go on with what nobody waits for
            names = [o.request_id for o in results if o.error is None and o.request_id not in found]
            with contextlib.suppress(EngineError):
                self._abandon(names)
            raise
        return [found.get(output.request_id, output) for output in results]

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        with without_interrupts(), self._steps.turns:
            return self._pipeline.stats(self._book.num_held_blocks())

    def check(self) -> None:
        """Assert that no block is lost and none counted twice; between steps, at any time."""
        with without_interrupts(), self._steps.turns:
            self._blocks.check(self._scheduler.running, self._pipeline.forked)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """No step begins while this is entered.

        Raises:
            InvalidInput: requests are queued or running that nobody has cancelled.
        """
        with self._steps.turns:
            self._steps.drop_cancelled()
            if self._steps.has_work:
                raise InvalidInput("an engine has requests: serve or cancel them before its weights change")
            yield

    def _add(
        self,
        request_id: str | None,
        kind: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int = 0,
        stream_text: bool = False,
        receiver: Receiver | None = None,
        resume: Mapping[int, SequenceOf[int]] | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> str:
        """Queue a request under its own id, or one of its kind that nobody has; its outputs go to ``receiver``."""
        self._steps.require_alive()
        if output_kind not in get_args(OutputKind):
            raise InvalidInput(f"output_kind {output_kind!r} must be one of {', '.join(get_args(OutputKind))}")
        request = self._admission.request(
            kind if request_id is None else request_id,
            prompt,
            params,
            arrival=next(self._arrivals),
            priority=priority,
            stream_text=stream_text,
            resume=resume,
            with_text=output_kind != "delta" or bool(stream_text),
        )
        for sequence in request.sequences:
            self._scheduler.require_room(sequence)

        def check(name: str) -> None:
            if receiver is not None or output_kind != "cumulative":
                self._deliveries.expect(request.output, name, receiver, output_kind)
            self._steps.require_alive()  # once it is expected: a failure from here on is told to the receiver

        return self._book.admit(request, kind if request_id is None else None, check)

    def _abandon(self, names: SequenceOf[str]) -> None:
        """Nobody waits for these any more: they end now, and nothing of them is left queued."""
        for name in names:
            self._deliveries.drop(name)
            self.cancel(name)
        if names:
            self._steps.drop_cancelled()
