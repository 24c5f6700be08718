"""Engine: requests in, tokens out. A RequestBook keeps the requests, a Pipeline runs the steps, threads take turns."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count
from pathlib import Path
from typing import Any, get_args

from rich.progress import track

from detcompile.errors import EngineError, InvalidInput
from detcompile.other_names import naming_equivalents
from detcompile.runtime.adapters import AdapterSlots
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.kv.prefixes import Prefixes
from detcompile.runtime.metrics import EngineStats
from detcompile.runtime.pipeline import Pipeline
from detcompile.runtime.request_book import RequestBook
from detcompile.runtime.requests.admission import Admission, Prompt
from detcompile.runtime.requests.copies import OutputKind
from detcompile.runtime.requests.deliveries import Deliveries, Mailbox, Receiver
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.plain_values import file_path
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.turns import Turns, without_interrupts
from detcompile.runtime.scheduler import Scheduler
from detcompile.runtime.speculation.speculator import SpeculationConfig, Speculator
from detcompile.runtime.step.interfaces import StepWorker
from detcompile.runtime.step_turns import EngineLoop, StepTurns

REQUEST_NAMES = {
    "lora_request": "load_adapter() it, and pass adapter=name",
    "prompt_token_ids": "pass the token ids as the prompt",
    "sampling_params": "pass params",
    "use_tqdm": "pass progress to generate()",
}


class Engine:
    """Serves requests over one KV cache. Made by ``CompiledModel.engine``. Thread-safe.

    Threads take turns at steps; each receives copies of the outputs it waits for. A request that fails ends alone, with
    its ``error`` set. A step that fails on the device ends every request and the engine.

    Args:
        worker: runs the steps.
        blocks: the blocks of the worker's KV cache.
        admission: turns prompts into checked requests.
        overlap: launch a step before the previous one's tokens are read back, unless it drafts.
        max_context: most tokens that a sequence may hold.
        prefixes: builds the Prefixes, given the lock of the steps and a function that forgets blocks of outdated
            weights.
        weights_version: returns a new number when the model's weights change; results of older weights are not used.
        adapters: the model's adapters; None without slots for them.

    Attributes:
        config: the engine's settings.
        prefixes: exchanges KV blocks with other engines of the model.
        speculator: drafts tokens and counts accepted drafts; None without speculation.
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
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._adapters = adapters
        if speculation is not None and speculation.acceptance == "rejection" and not worker.accepts_rejection:
            raise InvalidInput("acceptance='rejection' needs the model in this process: set 'exact', or tp=1")
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
        self._loop = EngineLoop(self._steps)  # steps this engine during stream()

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
        adapter: str | None = None,
    ) -> str:
        """Queue a request, which ``step`` serves. Thread-safe.

        Args:
            prompt: text, token ids, or a dict of them (see runtime.requests.prompts).
            params: how to draw and when to stop; None takes the defaults.
            request_id: id of the request; None generates one.
            priority: an integer; lower is served earlier.
            stream_text: update ``outputs[i].text`` after every token, not only at the end.
            resume: samples to continue, by index, with the tokens that each has drawn before; other samples are not
                served. With the same prompt, parameters and seed, the result has the bits of an uninterrupted run.
                Logprobs cover only tokens drawn here; prompt logprobs come with sample 0.
            output_kind: "cumulative": ``step`` returns the whole output whenever it grows; "delta": only what is new,
                with text only if ``stream_text``; "final_only": only finished outputs.
            adapter: name of a loaded adapter; None for the plain model.

        Returns:
            The request's id.

        Raises:
            InvalidInput: the prompt or the parameters cannot be served; nothing is queued.
            EngineError: the engine has failed before.
        """
        options: dict[str, Any] = {"stream_text": stream_text, "resume": resume, "output_kind": output_kind}
        return self._add(request_id, "request", prompt, params, priority=priority, adapter=adapter, **options)

    def load_adapter(self, name: str, path: str | Path) -> str:
        """Read a LoRA adapter from a folder in PEFT's format; requests may then name it. Return its sha256.

        Its weights are rounded to the model's dtype. The bits are those of a model compiled with this adapter alone.

        Raises:
            InvalidInput: the model has no slots (``compile(max_lora_rank=...)``), the name is taken, or the adapter
                does not fit.
        """
        return self._slots().load(name, file_path(path, "load_adapter: the folder")).digest

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it keep it to their end.

        Raises:
            InvalidInput: no adapter has this name.
        """
        self._slots().unload(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        return [] if self._adapters is None else self._adapters.names

    def _slots(self) -> AdapterSlots:
        if self._adapters is None:
            raise InvalidInput(
                "adapters: this model was compiled without room for them: pass max_lora_rank to compile()"
            )
        return self._adapters

    def cancel(self, request_id: str) -> None:
        """Cancel a request before its next step. Unknown or finished ids are ignored."""
        self._book.cancel(request_id)

    @property
    def failed(self) -> bool:
        """True if a step failed; the engine then serves no more requests."""
        return self._steps.failure is not None

    @property
    def has_unfinished_requests(self) -> bool:
        """True if ``step`` has work left or outputs to return."""
        return self._pipeline.busy or self._deliveries.any_kept or not self._book.is_empty

    def step(self) -> list[RequestOutput]:
        """Run one step. Return the outputs of ``add_request`` that grew or ended since the last call.

        Each output is returned to only one thread. The stages of a step are in runtime/pipeline.py.

        Raises:
            EngineError: a step failed on the device; every request has ended, and the engine serves no more.
        """
        self._steps.step()
        return self._deliveries.take()

    @naming_equivalents("engine.stream", REQUEST_NAMES)
    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, adapter: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's output after each of its steps: ``async for output in engine.stream(prompt, params)``.

        A background thread steps the engine while any request streams. Leaving the iteration cancels the request.

        Raises:
            InvalidInput: as in ``add_request``. EngineError: the engine failed.
        """
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | EngineError]()

        def receive(output: RequestOutput | EngineError) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        how: dict[str, Any] = {"priority": priority, "adapter": adapter, "stream_text": True}
        name = self._add(None, "stream", prompt, params, receiver=receive, **how)
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
        adapter: SequenceOf[str | None] | str | None = None,
    ) -> list[RequestOutput]:
        """Serve prompts until they are finished.

        Args:
            prompts: one prompt, or a list of prompts (see runtime.requests.prompts).
            params: one SamplingParams for all prompts, or one per prompt.
            progress: show a progress bar on the terminal.
            priority: one integer per prompt, as in ``add_request``.
            adapter: name of a loaded adapter for all prompts, or one per prompt; None for the plain model.
            strict: raise the error of an invalid prompt before any prompt is served, instead of returning it.

        Returns:
            One RequestOutput per prompt, in order. A prompt that cannot be served has its ``error`` set and one empty
            output with finish_reason "error"; the others are served as usual.

        Raises:
            InvalidInput: ``prompts`` is neither a prompt nor a list, or the number of params differs; with ``strict``
                also an invalid prompt, named by its index.
            EngineError: the engine failed.
        """
        mailbox, results = Mailbox(self._steps.turns), []
        finished: dict[str, RequestOutput] = {}
        try:
            each = self._admission.per_prompt(prompts, params, priority)
            chosen = list(adapter) if isinstance(adapter, (list, tuple)) else [adapter] * len(each)
            if len(chosen) != len(each):
                raise InvalidInput(f"{len(each)} prompts and {len(chosen)} adapters: give one for all, or one each")
            for index, (prompt, prompt_params, level) in enumerate(each):
                try:
                    to: dict[str, Any] = {"receiver": mailbox.receive, "output_kind": "final_only"}
                    to["adapter"] = chosen[index]
                    name = self._add(None, "generate", prompt, prompt_params, priority=level, **to)
                    results.append(RequestOutput(name, None, [], None, []))
                except InvalidInput as error:
                    if strict:
                        raise InvalidInput(f"prompt {index}: {error}") from error
                    results.append(self._admission.refusal(prompt, error))
            left = {output.request_id for output in results if output.error is None}
            ended = self._steps.serve(left, mailbox)
            for output in track(ended, "generating", total=len(left), disable=not progress, transient=True):
                finished[output.request_id] = output
        except BaseException:  # KeyboardInterrupt above all: cancel the requests that nobody waits for
            names = [o.request_id for o in results if o.error is None and o.request_id not in finished]
            with contextlib.suppress(EngineError):
                self._abandon(names)
            raise
        return [finished.get(output.request_id, output) for output in results]

    @property
    def stats(self) -> EngineStats:
        """Statistics of the engine so far."""
        with without_interrupts(), self._steps.turns:
            return self._pipeline.stats(self._book.num_held_blocks())

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes.

        Raises:
            InvalidInput: requests are queued or running and not canceled.
        """
        with self.idle():
            self._blocks.pool.clear()

    def check(self) -> None:
        """Assert that no block is lost or counted twice. Call it at any time between steps."""
        with without_interrupts(), self._steps.turns:
            self._blocks.check(self._scheduler.running, self._pipeline.forked)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Prevent steps while this context is active, in which the weights may change.

        Raises:
            InvalidInput: requests are queued or running and not canceled.
        """
        with self._steps.turns:
            self._steps.drop_cancelled()
            if self._steps.has_work:
                raise InvalidInput("an engine has requests: serve or cancel them before its weights change")
            yield
            self._book.follow_weights()  # requests from now on, also resumed ones, have the new weights

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
        adapter: str | None = None,
    ) -> str:
        """Queue a request under ``request_id`` or a generated id; its outputs go to ``receiver``."""
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
            adapter=None if adapter is None else self._slots().find(adapter),
        )
        for sequence in request.sequences:
            self._scheduler.require_room(sequence)

        def check(name: str) -> None:
            if receiver is not None or output_kind != "cumulative":
                self._deliveries.expect(request.output, name, receiver, output_kind)
            self._steps.require_alive()  # checked again: from here on, a failure reaches the receiver

        return self._book.admit(request, kind if request_id is None else None, check)

    def _abandon(self, names: SequenceOf[str]) -> None:
        """Cancel requests that nobody waits for, and remove them from the queue at once."""
        for name in names:
            self._deliveries.drop(name)
            self.cancel(name)
        if names:
            self._steps.drop_cancelled()
