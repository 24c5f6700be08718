"""OpenAI's replies to completion requests, in one piece or as a stream."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec

from detcompile.serving.engines.answers import Answer, AnswerSample, progress
from detcompile.serving.engines.protocol import Token, Weights
from detcompile.serving.journal.cursor import Cursor
from detcompile.serving.journal.job import Job
from detcompile.serving.openai.schema import StreamOptions
from detcompile.serving.receipts.issuer import Issued
from detcompile.serving.responses import event
from detcompile.serving.tokenizer_pool import SampleText, TokenizerPool

AT_ONCE = 64  # tokens to process before yielding to the event loop
MANY = 1024  # log-probabilities to write in the event loop's thread
LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks
NOTHING: Mapping[str, Any] = MappingProxyType({})
NO_TOKENS = slice(0, 0)
Result = TypeVar("Result")


class ReplyContext(Protocol):
    """What a reply needs from the service."""

    texts: TokenizerPool

    async def issue(self, job: Job) -> Issued | None:
        """Return the receipt of a job whose answers have ended; None if receipts are off."""

    def release(self, answers: Sequence[Answer]) -> None:
        """Cancel unfinished answers."""


class Reply(ABC):
    """The choices of a request: n per prompt, in the order of the prompts. Subclasses define their form.

    Args:
        job: the request, with one answer per prompt.
        stream_options: options of a stream.
        with_ids: include the token ids of the prompt and of each choice.
        with_prompt_logprobs: include the prompt's logprobs.
        with_receipt: include the receipt; in a stream in a chunk without choices at the end, before the usage.
        hidden: show no drawn tokens.
        last_event: id of the event after which a kept job's stream resumes.

    Raises:
        HTTPError: last_event is not an event of this answer.
    """

    kind = ""  # of the whole reply
    chunk_kind = ""
    one_prompt = False  # put prompt_token_ids and prompt_logprobs beside the choices instead of into each

    def __init__(
        self,
        service: ReplyContext,
        job: Job,
        *,
        stream_options: StreamOptions | None = None,
        with_ids: bool = False,
        with_prompt_logprobs: bool = False,
        with_receipt: bool = False,
        hidden: bool = False,
        last_event: str | None = None,
    ) -> None:
        self.texts = service.texts
        self._service = service
        self._with_receipt = with_receipt
        self._job = job
        self._answers: Sequence[Answer] = job.answers
        self._include_usage = stream_options is not None and stream_options.include_usage
        self._usage_in_all = stream_options is not None and stream_options.continuous_usage_stats
        self._with_ids = with_ids
        self._with_prompt_logprobs = with_prompt_logprobs
        self._hidden = hidden
        self._whole = True
        self._prefix = b""  # start of every event of one weight version
        self._weights: Weights | None = None  # version of the prefix
        self._more_head: dict[str, Any] = {}  # fields that subclasses add to the head
        count = sum(len(answer.samples) for answer in job.answers)
        num_tail = int(with_receipt) + int(self._include_usage)
        resumes = last_event is not None and job.kept  # a request without a key is new each time
        self._cursor = Cursor.at(last_event or "", job.name, count, num_tail) if resumes else Cursor(job.name, count)
        self.seed = as_int64(job.ask.params.seed or 0)
        self.headers = headers_of(job.name, job.ask.params.seed, job.salt)

    def _head(self) -> dict[str, Any]:
        job, model = self._job, self._job.drawn_by
        version = {} if model.weight_version is None else {"weight_version": model.weight_version}
        return {
            "id": job.name,
            "created": job.created,
            "model": model.name,
            "system_fingerprint": model.fingerprint,
            **version,
            "seed": self.seed,
            **self._more_head,
        }

    async def whole(self) -> dict[str, Any]:
        """Return the whole reply; all answers have ended."""
        choices: list[msgspec.Raw] = []
        for answer in self._answers:
            for sample in answer.samples:
                text, read = await SampleText(self.texts, answer.params, sample).rest()
                choice = functools.partial(self._encoded_choice, len(choices), answer, sample, text, read)
                choices.append(await offload(num_logprobs(answer, read), choice))
        reply = {"object": self.kind, **self._head(), "choices": choices, "usage": await self._usage()}
        prompt = await offload(num_logprobs(self._answers[0], NO_TOKENS), functools.partial(self._prompt, 0))
        return reply | prompt | await self._receipt()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events as the answers grow.

        Raises:
            DetcompileError: an answer failed.
            HTTPError: the stream resumes after an event that was never sent.
        """
        self._whole = False
        cursor, tail = self._cursor, self._cursor.tail
        places = [(answer, sample) for answer in self._answers for sample in answer.samples]
        texts = [SampleText(self.texts, answer.params, sample) for answer, sample in places]
        behind = {index for index in range(len(places)) if cursor.over[index] or cursor.num_read[index]}
        cursor.tail = 0
        async for _ in progress(self._answers):
            parts: list[bytes] = []
            due = 0
            for index, (answer, sample) in enumerate(places):
                if due >= AT_ONCE:
                    due = 0
                    await asyncio.sleep(0)
                due -= texts[index].num_read
                if index in behind and await self._catches_up(index, answer, sample, texts[index]):
                    behind.remove(index)
                ended = sample.finish_reason is not None
                if index not in behind and not cursor.over[index] and (ended or sample.token_ids):
                    parts += await self._new_events(index, answer, sample, texts[index])
                due += texts[index].num_read
            if parts:
                yield b"".join(parts)
        for number, part in enumerate(await self._tail(), 1):
            cursor.tail = number
            if number > tail:
                yield self._chunk([], **part)

    async def _catches_up(self, index: int, answer: Answer, sample: AnswerSample, text: SampleText) -> bool:
        """Read the part of a choice that was sent before the stream broke, once it is drawn again.

        Raises:
            HTTPError: that part never existed.
        """
        over, num_read, ended = self._cursor.over[index], self._cursor.num_read[index], sample.finish_reason is not None
        if ended or not self._job.begun_before:
            self._cursor.require(index, len(sample.token_ids), ended=ended)
        elif over or len(sample.token_ids) < num_read:
            return False
        new, read = text.take(None if over else num_read)
        choice = functools.partial(self._choice, index, answer, sample, new, read, ended=over)
        await offload(num_logprobs(answer, read), choice)  # restores the state kept for the choice
        return True

    async def _new_events(self, index: int, answer: Answer, sample: AnswerSample, text: SampleText) -> list[bytes]:
        """Return events with the new tokens of a choice."""
        before, cursor = text.num_read, self._cursor
        openings = self._opening(index) if before == 0 else []
        count, opened = num_logprobs(answer, NO_TOKENS), functools.partial(self._opened, index)
        parts = [await offload(count, functools.partial(opened, opening)) for opening in openings]
        new, read = text.take()
        cursor.num_read[index], cursor.over[index] = text.num_read, sample.finish_reason is not None
        tokens_show = self._with_ids or sample.logprobs is not None
        if cursor.over[index] or new or before == 0 or (tokens_show and read.start < read.stop):

            def chunk() -> bytes:
                more = self._prompt(index) if before == 0 and not openings else NOTHING
                choice = self._choice(index, answer, sample, new, read, ended=cursor.over[index])
                return self._chunk([choice], more=more)

            parts.append(await offload(num_logprobs(answer, read), chunk))
        return parts

    def _opened(self, index: int, opening: dict[str, Any]) -> bytes:
        """Return the event of a delta before a choice's first token."""
        return self._chunk([opening], more=self._prompt(index))

    async def _tail(self) -> list[dict[str, Any]]:
        """Return the contents of the chunks without choices at the end of a stream."""
        receipt = await self._receipt()
        usage = [{"usage": await self._usage()}] if self._include_usage else []
        return ([{"more": receipt}] if receipt else []) + usage

    def _encoded_choice(self, *place: Any) -> msgspec.Raw:
        """Return a whole choice as JSON; the arguments are those of ``_choice``."""
        return msgspec.Raw(msgspec.json.encode(self._choice(*place, ended=True)))

    def _choice(
        self, index: int, answer: Answer, sample: AnswerSample, text: str, read: slice, *, ended: bool
    ) -> dict[str, Any]:
        """Return a choice or a delta of it: the tokens ``read``, and the text that they complete."""
        reason, stop = (sample.finish_reason, sample.stop_reason) if ended else (None, None)
        if self._hidden:
            text, read, reason, stop = "", slice(read.start, read.start), reason and "length", None
        logprobs = None if sample.logprobs is None else sample.logprobs[read]
        choice = {
            "index": index,
            **self._content(index, answer, text, logprobs, first=read.start == 0, last=ended),
            "finish_reason": self._reason(index, reason),
        }
        if reason is not None:
            choice["stop_reason"] = stop
        if self._with_ids:
            choice["token_ids"] = list(sample.token_ids[read])
            if sample.spans:
                choice["weight_versions"] = sample.versions(read)
        if answer.params.sampling_logprobs is not None and logprobs is not None:
            choice |= _sampling(logprobs, with_mask=answer.params.sampling_logprobs > 0)
        return choice if self.one_prompt or read.start else choice | self._of_prompt(answer)

    def _prompt(self, index: int) -> dict[str, Any]:
        """Return the prompt's requested fields beside the first choice, for replies with ``one_prompt``."""
        return self._of_prompt(self._answers[0]) if self.one_prompt and index == 0 else {}

    def _of_prompt(self, answer: Answer) -> dict[str, Any]:
        """Return the requested fields of a prompt."""
        fields: dict[str, Any] = {"prompt_token_ids": answer.prompt_ids} if self._with_ids else {}
        if self._with_prompt_logprobs:
            fields["prompt_logprobs"] = [entry and self._ranked(entry) for entry in answer.prompt_logprobs]
        return fields

    def _ranked(self, entry: Token) -> dict[str, dict[str, Any]]:
        """Return a prompt's token and its alternatives by id, in vLLM's form."""
        ranked: dict[str, dict[str, Any]] = {}
        top = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        for token, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *top]:
            name = self.texts.name_of(token) if self.texts.present else None
            ranked.setdefault(str(token), {"logprob": finite(logprob), "rank": rank, "decoded_token": name})
        return ranked

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """Return deltas to send before a choice's first token."""
        return []

    @abstractmethod
    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        """Return the fields of a choice with its text and logprobs."""

    def _reason(self, index: int, reason: str | None) -> str | None:
        """Return the finish reason for clients."""
        return reason

    async def _receipt(self) -> dict[str, Any]:
        """Issue the receipt and set its header; return it as a field of the body if requested.

        Raises:
            StorageError: the log cannot be written.
        """
        issued = await self._service.issue(self._job)
        if issued is None:
            return {}
        self.headers["X-Detcompile-Receipt"] = issued.digest
        return {"receipt": issued.envelope} if self._with_receipt else {}

    def _chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, more: Mapping[str, Any] = NOTHING
    ) -> bytes:
        """Return an event. The part before the choices is encoded once for all events of the same weights."""
        weights = self._job.weights
        if not self._prefix or weights is not self._weights:
            self._weights = weights
            self._prefix = event({"object": self.chunk_kind, **self._head(), "choices": 0})[: -len(b"0}\n\n")]
        if self._usage_in_all and usage is None:
            usage = self._counts(sum(self._cursor.num_read))
        rest = {**more, "usage": usage} if self._include_usage else more
        end = b"," + msgspec.json.encode(rest)[1:] + b"\n\n" if rest else b"}\n\n"
        name = f"id: {self._cursor}\n".encode() if self._job.kept else b""
        return name + self._prefix + msgspec.json.encode(choices) + end

    async def _completion_details(self) -> dict[str, int]:
        """Return kinds of drawn tokens, by the names in OpenAI's completion_tokens_details."""
        return {}

    async def _usage(self) -> dict[str, Any]:
        cached = sum(answer.num_cached_tokens for answer in self._answers)
        details = await self._completion_details()
        return {
            **self._counts(sum(answer.num_tokens for answer in self._answers)),
            "prompt_tokens_details": {"cached_tokens": cached},
            **({"completion_tokens_details": details} if details else {}),
        }

    def _counts(self, num_tokens: int) -> dict[str, Any]:
        """Return the numbers of tokens, with ``num_tokens`` drawn so far."""
        num_prompt = sum(len(answer.prompt_ids) for answer in self._answers)
        num_drawn = 0 if self._hidden else num_tokens
        return {
            "prompt_tokens": num_prompt, "completion_tokens": num_drawn, "total_tokens": num_prompt + num_drawn,
        }  # fmt: skip


def num_logprobs(answer: Answer, read: slice) -> int:
    """Return about how many log-probabilities a reply has for the tokens ``read``; the first have the prompt's."""
    params, count = answer.params, 0
    if params.logprobs is not None:
        count = (read.stop - read.start) * (1 + params.logprobs + (params.sampling_logprobs or 0))
    if params.prompt_logprobs is not None and read.start == 0:
        count += len(answer.prompt_logprobs) * (1 + params.prompt_logprobs)
    return count


async def offload(num_values: int, work: Callable[[], Result]) -> Result:
    """Return the result of ``work``, in a thread if there are many values, so that the event loop stays free."""
    return await asyncio.to_thread(work) if num_values > MANY else work()


def headers_of(name: str, seed: int | None, salt: bytes | None) -> dict[str, str]:
    """Return the HTTP headers needed to reproduce an answer and to open its receipt."""
    headers = {"X-Request-Id": name, "X-Detcompile-Seed": str(as_int64(seed or 0))}
    return headers if salt is None else headers | {"X-Detcompile-Receipt-Salt": salt.hex()}


def as_int64(seed: int) -> int:
    """Return a seed as a signed 64-bit integer, as in OpenAI's schema; it stands for the same seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def chat_entry(texts: TokenizerPool, entry: Token) -> dict[str, Any]:
    """Return a token with its alternatives, in the form of chats and responses."""
    top = [_named(texts, token, logprob) for token, logprob in entry.top]
    return _named(texts, entry.token_id, entry.logprob) | {"top_logprobs": top}


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


def _sampling(logprobs: Sequence[Token], *, with_mask: bool) -> dict[str, Any]:
    """Return log-probabilities in the distributions drawn from; with the mask, of all tokens that could be drawn."""
    drawn = [entry.sampling for entry in logprobs if entry.sampling is not None]
    fields: dict[str, Any] = {"sampling_logprobs": [logprob for logprob, _ in drawn]}
    if with_mask:
        fields["sampling_mask"] = [[token for token, _ in top] for _, top in drawn]
        fields["sampling_mask_logprobs"] = [[logprob for _, logprob in top] for _, top in drawn]
    return fields


def _named(texts: TokenizerPool, token: int, logprob: float) -> dict[str, Any]:
    text = texts.bytes_of(token)
    return {
        "token": texts.name_of(token),
        "logprob": finite(logprob),
        "bytes": list(text) if texts.present else None,
    }
