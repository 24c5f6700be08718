"""Answers in the making: what the engine has given for each prompt so far, and a way to wait for more."""

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, Literal

import msgspec

from detcompile.errors import DetcompileError, EngineError, GenerationError
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.notices import News
from detcompile.serving.engines.protocol import Delta, Pool, Pooled, Token, Verified, Verify
from detcompile.serving.receipts.verdict import Verdict

__all__ = ["Answer", "AnswerSample", "Errand", "Pooling", "Verification", "given_params", "progress"]

PARAMETERS = tuple(own.name for own in fields(SamplingParams))
DEFAULTS = {name: getattr(SamplingParams(), name) for name in PARAMETERS}


class AnswerSample:
    """One sample: its tokens, which only grow.

    Attributes:
        finish_reason: None while it runs.
        text: all of it, once it has ended and somebody has read it at once; None before.
    """

    __slots__ = ("finish_reason", "logprobs", "stop_reason", "text", "token_ids")

    def __init__(self, wants_logprobs: bool) -> None:
        self.token_ids = array("i")
        self.logprobs: list[Token] | None = [] if wants_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text: str | None = None


class Answer:
    """A prompt and the samples drawn for it, as they come. Readers keep their place in ``samples`` themselves.

    Args:
        params: what was asked, with its seed.
        news: told whenever there is any; answers that are read together share one.
        priority: the engine serves lower ones first.
        cache_salt: answers of another salt share no cached prefix with it.

    Attributes:
        engine: place in the fleet of the engine that has it, or had it last; None before one did.
        tries: engines that have had it.
        deaths: engines that ended while they had it among others, since it was last served alone.
        deaths_alone: engines that ended while they had nothing else.
        error: why there is no more, where it is not the end: InvalidInput for what cannot be served, else EngineError.
        num_cached_tokens: prompt tokens that the prefix cache had, once it has ended.
        num_preemptions: times that the engine which has it took its blocks.
        name: the id of its reply, or a name of its verification; empty before there is one.
        owner: sha256 of the API key that it is for, in hex; empty where the server has none.
    """

    __slots__ = (
        "_told_prompt_logprobs", "arrival", "cache_salt", "deaths", "deaths_alone", "engine", "error", "finished",
        "first_token", "name", "news", "num_cached_tokens", "num_preemptions", "owner", "params", "priority",
        "prompt_ids", "prompt_logprobs", "queued_seconds", "request_id", "samples", "tries",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        news: News,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.samples = [AnswerSample(params.logprobs is not None) for _ in range(params.n)]
        self.prompt_logprobs: list[Token | None] = []
        self.error: DetcompileError | None = None
        self.finished = False
        self.name = self.owner = ""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queued_seconds: float | None = None
        self.arrival = time.monotonic()
        self.first_token: float | None = None
        self.news = news
        self.priority = priority
        self.cache_salt = cache_salt
        self.engine: int | None = None
        self.tries = 0
        self.deaths = 0
        self.deaths_alone = 0
        self._told_prompt_logprobs = 0  # entries that come again after a resumption

    @property
    def try_id(self) -> str:
        """A name in the engine that has it: what one that had it before still sends is nothing of this try."""
        return f"{self.request_id}-{self.tries}"

    @property
    def asked(self) -> Any:
        """What an engine is asked, but for the seed, as plain values."""
        return self.prompt_ids, {name: own for name, own in given_params(self.params).items() if name != "seed"}

    @property
    def num_tokens(self) -> int:
        """Tokens drawn so far, over all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def extend(self, delta: Delta) -> None:
        """Take what is new; that there is ``news`` is the caller's to tell."""
        for part in delta.samples:
            sample = self.samples[part.index]
            sample.token_ids.extend(part.token_ids)
            if sample.logprobs is not None and part.logprobs is not None:
                sample.logprobs += part.logprobs
            sample.finish_reason, sample.stop_reason = part.finish_reason, part.stop_reason
        told = delta.prompt_logprobs or []
        again = min(self._told_prompt_logprobs, len(told))
        self._told_prompt_logprobs -= again
        self.prompt_logprobs += told[again:]
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_preemptions = delta.num_preemptions
        self.queued_seconds = delta.first_scheduled
        if delta.error is not None:
            self.error = (GenerationError if delta.refused else EngineError)(delta.error)
        self.finished = delta.finished

    def resumption(self) -> dict[int, list[int]] | None:
        """What an engine has to know to go on with it: the tokens of the samples that run; None where none has any."""
        self._told_prompt_logprobs = len(self.prompt_logprobs)
        if not self.num_tokens:
            return None
        samples = enumerate(self.samples)
        return {index: list(sample.token_ids) for index, sample in samples if sample.finish_reason is None}

    def fail(self, error: DetcompileError) -> None:
        """Nothing more comes."""
        if not self.finished:
            self.error, self.finished = error, True
        self.news.tell()


class Errand(Answer, ABC):
    """What an engine is asked beside answers: it waits, is bounded and is cancelled as they are, and draws nothing."""

    @abstractmethod
    def command(self) -> Verify | Pool:
        """What the engine is told."""

    @property
    def asked(self) -> Any:
        """What an engine is asked."""
        own: dict[str, Any] = msgspec.structs.asdict(self.command())
        return {name: value for name, value in own.items() if name != "request_id"}

    def settle(self, report: Verified | Pooled) -> None:
        """Take what came of it: nothing more comes."""
        self.finished = True
        self.news.tell()


class Verification(Errand):
    """A receipt that is replayed.

    Args:
        receipt: one as JSON.
        lengths: tokens of each of its samples, with those of its prompt.

    Attributes:
        verdict: what came of it.
    """

    def __init__(self, request_id: str, receipt: bytes, lengths: Sequence[int]) -> None:
        asked = SamplingParams(n=len(lengths))
        super().__init__(request_id, [0] * sum(lengths), asked, News())
        self.name = f"verify-{request_id}"
        self.receipt = receipt
        self.verdict: Verdict | None = None

    def command(self) -> Verify:
        """What the engine is told."""
        return Verify(self.try_id, self.receipt)

    def settle(self, report: Verified | Pooled) -> None:
        """Take the verdict."""
        assert isinstance(report, Verified)
        self.verdict = report.verdict
        super().settle(report)


class Pooling(Errand):
    """Prompts of which a model says one thing each.

    Args:
        prompts: token ids.
        pooling: the hidden states that an embedding is made of.
        normalize: give embeddings the length 1.

    Attributes:
        values: float32 of [prompts, num_columns], once it has ended.
    """

    def __init__(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        pooling: Literal["last", "first", "mean"] | None,
        normalize: bool,
    ) -> None:
        super().__init__(request_id, list(chain.from_iterable(prompts)), SamplingParams(), News())
        self._asked = (list(prompts), pooling, normalize)
        self.num_columns = 0
        self.values = b""

    def command(self) -> Pool:
        """What the engine is told."""
        return Pool(self.try_id, *self._asked)

    def settle(self, report: Verified | Pooled) -> None:
        """Take the values."""
        assert isinstance(report, Pooled)
        self.num_columns, self.values = report.num_columns, report.values
        super().settle(report)


async def progress(answers: Sequence[Answer]) -> AsyncIterator[None]:
    """Yields whenever any of these answers, which share ``news``, may have got longer; last when all have ended.

    Raises:
        DetcompileError: the ``error`` of the first that has one.
    """
    news = answers[0].news if answers else News()  # none have ended
    while True:
        seen = news.count
        finished = True
        for answer in answers:
            if answer.error is not None:
                raise answer.error
            finished = finished and answer.finished
        yield
        if finished:
            return
        await news.wait(seen)


def given_params(params: SamplingParams) -> dict[str, Any]:
    """What SamplingParams takes to make equal ones, as plain values that travel and are kept."""
    return {name: value for name in PARAMETERS if (value := getattr(params, name)) != DEFAULTS[name]}
