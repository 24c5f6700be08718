"""Answers in progress: what the engine has produced for each prompt so far, and a way to wait for more."""

import asyncio
import time
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from itertools import chain, repeat
from typing import Any, Literal

import msgspec

from detcompile.errors import DetcompileError, EngineError, GenerationError
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.protocol import (
    Delta,
    Pool,
    Pooled,
    Token,
    Verified,
    Verify,
    Weights,
    WeightSpan,
)
from detcompile.serving.receipts.verdict import Verdict

PARAMETERS = tuple(field.name for field in fields(SamplingParams))
DEFAULTS = {name: getattr(SamplingParams(), name) for name in PARAMETERS}
ABORT = "abort"  # finish reason of a sample that was ended from outside
WAKES_PER_TURN = 32  # readers to wake per turn; between turns the event loop accepts connections and reads


class AnswerSignal:
    """Signals progress to any number of readers; none misses any."""

    __slots__ = ("_readers", "count")

    def __init__(self) -> None:
        self.count = 0  # signals so far; read it before reading the answer, then wait for more
        self._readers: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Signal progress."""
        self.count += 1
        readers, self._readers = self._readers, {}
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    async def wait(self, seen: int) -> None:
        """Wait until ``count`` exceeds ``seen``."""
        if self.count == seen:
            reader = asyncio.get_running_loop().create_future()
            self._readers[reader] = None
            try:
                await reader
            finally:
                self._readers.pop(reader, None)


class WakeQueue:
    """Signals to notify, in order, a few per turn of the event loop.

    A step extends a thousand answers at once. If all readers were woken together, a new connection would wait until all
    had sent their data, because uvloop accepts one connection per turn. A reader not woken before the next step handles
    both steps at once.
    """

    def __init__(self) -> None:
        self._due: OrderedDict[AnswerSignal, None] = OrderedDict()

    def put(self, signal: AnswerSignal) -> None:
        """Queue a signal."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._wake)
        self._due[signal] = None

    def _wake(self) -> None:
        for _ in range(min(WAKES_PER_TURN, len(self._due))):
            self._due.popitem(last=False)[0].notify()
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake)


class AnswerSample:
    """One sample, which only grows.

    Attributes:
        finish_reason: None while it runs.
        text: the whole text, set when it is decoded in one piece after the end.
        spans: the versions of the weights that drew the tokens; empty if the weights cannot change.
    """

    __slots__ = ("finish_reason", "logprobs", "spans", "stop_reason", "text", "token_ids")

    def __init__(self, wants_logprobs: bool) -> None:
        self.token_ids = array("i")
        self.logprobs: list[Token] | None = [] if wants_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text: str | None = None
        self.spans: list[WeightSpan] = []

    def versions(self, read: slice) -> list[str]:
        """Return the weight version of each token of a slice; empty if the weights cannot change."""
        ends = [span.start for span in self.spans[1:]] + [len(self.token_ids)]
        named = (repeat(span.weights.version, end - span.start) for span, end in zip(self.spans, ends))
        return list(chain.from_iterable(named))[read]


class Answer:
    """A prompt and its samples in progress. Each reader keeps its own position in ``samples``.

    Args:
        params: parameters of the request, including the seed.
        signal: notified of progress; answers that are read together share one.
        priority: the engine serves lower values first.
        cache_salt: answers with different salts share no cached prefix.
        adapter: name of the adapter that draws it; empty for the plain model.
        adapter_digest: the adapter's sha256; no other adapter of this name draws it.

    Attributes:
        engine: index of its current or last engine; None before the first.
        tries: number of engines that have had it.
        deaths: engines that ended while they had it among others, since it was last served alone.
        deaths_alone: engines that ended while they had only this answer.
        error: why it ended without result: InvalidInput or GenerationError for the request's fault, else EngineError.
        num_cached_tokens: prompt tokens from the prefix cache, set at the end.
        num_preemptions: preemptions by its current engine.
        name: id of the reply or of the verification; empty before it is known.
        client_ids: more ids by which /abort_requests finds it, made from the client's id of the request.
        owner: sha256 in hex of the request's API key; empty if the server has none.
        weights: the version that draws the next tokens; None if the weights cannot change.
        loaded_adapter: the adapter's name in its engine; empty for the plain model.
    """

    __slots__ = (
        "_num_repeated_logprobs", "adapter", "adapter_digest", "arrival", "cache_salt", "client_ids", "deaths",
        "deaths_alone", "engine", "error", "finished", "first_token", "loaded_adapter", "name", "num_cached_tokens",
        "num_preemptions", "owner", "params", "priority", "prompt_ids", "prompt_logprobs", "queued_seconds",
        "request_id", "samples", "signal", "tries", "weights",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        signal: AnswerSignal,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        adapter_digest: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.samples = [AnswerSample(params.logprobs is not None) for _ in range(params.n)]
        self.prompt_logprobs: list[Token | None] = []
        self.error: DetcompileError | None = None
        self.finished = False
        self.name = self.owner = ""
        self.client_ids: tuple[str, ...] = ()
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queued_seconds: float | None = None
        self.arrival = time.monotonic()
        self.first_token: float | None = None
        self.signal = signal
        self.priority = priority
        self.cache_salt = cache_salt
        self.adapter, self.adapter_digest = adapter, adapter_digest
        self.loaded_adapter = ""
        self.weights: Weights | None = None
        self.engine: int | None = None
        self.tries = 0
        self.deaths = 0
        self.deaths_alone = 0
        self._num_repeated_logprobs = 0  # prompt logprobs that a resumed engine sends again

    @property
    def try_id(self) -> str:
        """Return the id in the current engine; late reports of an earlier engine have another one."""
        return f"{self.request_id}-{self.tries}"

    @property
    def content(self) -> Any:
        """Return the request without its seed, as plain values."""
        return self.prompt_ids, {name: value for name, value in given_params(self.params).items() if name != "seed"}

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens drawn so far by all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def extend(self, delta: Delta) -> None:
        """Add a delta. The caller notifies ``signal``."""
        for part in delta.samples:
            sample = self.samples[part.index]
            if (
                self.weights is not None
                and part.token_ids
                and (not sample.spans or sample.spans[-1].weights is not self.weights)
            ):
                sample.spans.append(WeightSpan(len(sample.token_ids), self.weights))
            sample.token_ids.extend(part.token_ids)
            if sample.logprobs is not None and part.logprobs is not None:
                sample.logprobs += part.logprobs
            sample.finish_reason, sample.stop_reason = part.finish_reason, part.stop_reason
        logprobs = delta.prompt_logprobs or []
        again = min(self._num_repeated_logprobs, len(logprobs))
        self._num_repeated_logprobs -= again
        self.prompt_logprobs += logprobs[again:]
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_preemptions = delta.num_preemptions
        self.queued_seconds = delta.first_scheduled
        if delta.error is not None:
            self.error = (GenerationError if delta.refused else EngineError)(delta.error)
        self.finished = delta.finished

    def resumption(self) -> dict[int, list[int]] | None:
        """Return what an engine needs to continue: the tokens of running samples by index.

        None if no token was drawn.
        """
        self._num_repeated_logprobs = len(self.prompt_logprobs)
        if not self.num_tokens:
            return None
        samples = enumerate(self.samples)
        return {index: list(sample.token_ids) for index, sample in samples if sample.finish_reason is None}

    def abort(self) -> None:
        """End as it is, with the finish reason "abort" for running samples."""
        for sample in self.samples:
            sample.finish_reason = sample.finish_reason or ABORT
        self.finished = True
        self.signal.notify()

    def restart(self) -> None:
        """Drop the prompt's logprobs if no token was drawn: the next engine has other weights."""
        if not self.num_tokens:
            self.prompt_logprobs.clear()
            self._num_repeated_logprobs = 0

    @property
    def aborted(self) -> bool:
        """Return True if ``abort`` ended a sample."""
        return any(sample.finish_reason == ABORT for sample in self.samples)

    def fail(self, error: DetcompileError) -> None:
        """End with an error."""
        if not self.finished:
            self.error, self.finished = error, True
        self.signal.notify()


class AuxiliaryTask(Answer, ABC):
    """Work of an engine other than answers.

    It queues, is bounded and is canceled like an answer, but draws no tokens.
    """

    @abstractmethod
    def command(self) -> Verify | Pool:
        """Return the command for the engine."""

    @property
    def content(self) -> Any:
        """Return the command without its id, as plain values."""
        command: dict[str, Any] = msgspec.structs.asdict(self.command())
        return {name: value for name, value in command.items() if name != "request_id"}

    def finish(self, report: Verified | Pooled) -> None:
        """Store the result."""
        self.finished = True
        self.signal.notify()


class Verification(AuxiliaryTask):
    """The replay of a receipt.

    Args:
        receipt: the receipt as JSON.
        lengths: tokens of each sample, including its prompt.

    Attributes:
        verdict: the result.
    """

    def __init__(self, request_id: str, receipt: bytes, lengths: Sequence[int]) -> None:
        params = SamplingParams(n=len(lengths))
        super().__init__(request_id, [0] * sum(lengths), params, AnswerSignal())
        self.name = f"verify-{request_id}"
        self.receipt = receipt
        self.verdict: Verdict | None = None

    def command(self) -> Verify:
        """Return the command for the engine."""
        return Verify(self.try_id, self.receipt)

    def finish(self, report: Verified | Pooled) -> None:
        """Store the verdict."""
        assert isinstance(report, Verified)
        self.verdict = report.verdict
        super().finish(report)


class Pooling(AuxiliaryTask):
    """Embeddings or class scores of prompts.

    Args:
        prompts: token ids.
        pooling: which hidden states make up an embedding.
        normalize: scale embeddings to length 1.

    Attributes:
        values: float32 of [prompts, num_columns], set at the end.
    """

    def __init__(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        pooling: Literal["last", "first", "mean"] | None,
        normalize: bool,
    ) -> None:
        super().__init__(request_id, list(chain.from_iterable(prompts)), SamplingParams(), AnswerSignal())
        self._arguments = (list(prompts), pooling, normalize)
        self.num_columns = 0
        self.values = b""

    def command(self) -> Pool:
        """Return the command for the engine."""
        return Pool(self.try_id, *self._arguments)

    def finish(self, report: Verified | Pooled) -> None:
        """Store the values."""
        assert isinstance(report, Pooled)
        self.num_columns, self.values = report.num_columns, report.values
        super().finish(report)


async def progress(answers: Sequence[Answer]) -> AsyncIterator[None]:
    """Yield whenever answers, which share ``signal``, may have grown; the last time after all have ended.

    Raises:
        DetcompileError: the first ``error`` of these answers.
    """
    signal = answers[0].signal if answers else AnswerSignal()
    while True:
        seen = signal.count
        finished = True
        for answer in answers:
            if answer.error is not None:
                raise answer.error
            finished = finished and answer.finished
        yield
        if finished:
            return
        await signal.wait(seen)


def given_params(params: SamplingParams) -> dict[str, Any]:
    """Return the non-default fields of SamplingParams as plain values, which build an equal one."""
    return {name: value for name in PARAMETERS if (value := getattr(params, name)) != DEFAULTS[name]}
