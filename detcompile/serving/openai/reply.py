"""Reply: OpenAI's answer to a request, in one piece or as a stream, of the answers that the engine makes."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from detcompile.serving.engines.answers import Answer, AnswerSample, progress
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.cursor import Cursor
from detcompile.serving.journal.job import Job
from detcompile.serving.openai.schema import StreamOptions
from detcompile.serving.receipts.issuer import Issued
from detcompile.serving.responses import event
from detcompile.serving.tokenizer_pool import SampleText, TokenizerPool

__all__ = ["AT_ONCE", "Reply", "ReplyContext", "as_int64", "headers_of"]

AT_ONCE = 64  # tokens that are read before others have their turn
NOTHING: Mapping[str, Any] = MappingProxyType({})


class ReplyContext(Protocol):
    """What a reply needs of the service."""

    texts: TokenizerPool

    async def issue(self, job: Job) -> Issued | None:
        """Return the receipt of a job whose answers have ended; None where there is none."""

    def release(self, answers: Sequence[Answer]) -> None:
        """Cancel those that have not ended."""


class Reply(ABC):
    """The choices of a request: n for each of its prompts, in the order of the prompts. Subclasses shape them.

    Args:
        job: the request, with an answer for each prompt.
        stream_options: what a stream has beside its tokens.
        with_ids: also tell the token ids of the prompt and of each choice.
        with_receipt: also give the receipt, in a stream as its last choice-less chunk but the one of usage.
        hidden: the tokens drawn are shown to nobody.
        last_event: id of the event behind which a stream of a job that is kept goes on.

    Raises:
        HTTPError: that is no event of this answer.
    """

    kind = ""  # of the whole
    chunk_kind = ""
    one_prompt = False  # whether its tokens stand beside the choices, and not in each of them

    def __init__(
        self,
        service: ReplyContext,
        job: Job,
        *,
        stream_options: StreamOptions | None = None,
        with_ids: bool = False,
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
        self._with_ids = with_ids
        self._hidden = hidden
        self._whole = True
        self._beginning = b""  # of every event
        count = sum(len(answer.samples) for answer in job.answers)
        num_tail = int(with_receipt) + int(self._include_usage)
        goes_on = last_event is not None and job.kept  # a request without a key is another one each time
        self._told = Cursor.at(last_event or "", job.name, count, num_tail) if goes_on else Cursor(job.name, count)
        self.seed = as_int64(job.ask.params.seed or 0)
        self._head: dict[str, Any] = {
            "id": job.name,
            "created": job.created,
            "model": job.model.name,
            "system_fingerprint": job.model.fingerprint,
            "seed": self.seed,
        }
        self.headers = headers_of(job.name, job.ask.params.seed, job.salt)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece; every answer has ended."""
        choices: list[msgspec.Raw] = []
        for answer in self._answers:
            for sample in answer.samples:
                text, read = await SampleText(self.texts, answer.params, sample).rest()
                choice = self._choice(len(choices), answer, sample, text, read, ended=True)
                choices.append(msgspec.Raw(msgspec.json.encode(choice)))
        found = {"object": self.kind, **self._head, "choices": choices, "usage": self._usage()}
        return found | self._prompt(0) | await self._receipt()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it comes: what is new of all choices at a time, as events.

        Raises:
            DetcompileError: an answer's error. HTTPError: it goes on behind an event that never was.
        """
        self._whole = False
        told, tail = self._told, self._told.tail
        places = [(answer, sample) for answer in self._answers for sample in answer.samples]
        texts = [SampleText(self.texts, answer.params, sample) for answer, sample in places]
        behind = {index for index in range(len(places)) if told.over[index] or told.num_read[index]}
        told.tail = 0
        async for _ in progress(self._answers):
            parts: list[bytes] = []
            due = 0
            for index, (answer, sample) in enumerate(places):
                if due >= AT_ONCE:
                    due = 0
                    await asyncio.sleep(0)  # others have their turn
                due -= texts[index].num_read
                if index in behind and self._catches_up(index, answer, sample, texts[index]):
                    behind.remove(index)
                ended = sample.finish_reason is not None
                if index not in behind and not told.over[index] and (ended or sample.token_ids):
                    parts += self._news(index, answer, sample, texts[index])
                due += texts[index].num_read
            if parts:
                yield b"".join(parts)
        for number, part in enumerate(await self._tail(), 1):
            told.tail = number
            if number > tail:
                yield self._chunk([], **part)

    def _catches_up(self, index: int, answer: Answer, sample: AnswerSample, text: SampleText) -> bool:
        """Read what was told of a choice before, once it is there.

        Raises:
            HTTPError: it never was.
        """
        over, num_read, ended = self._told.over[index], self._told.num_read[index], sample.finish_reason is not None
        if ended or not self._job.begun_before:
            self._told.require(index, len(sample.token_ids), ended=ended)
        elif over or len(sample.token_ids) < num_read:
            return False
        new, read = text.take(None if over else num_read)
        self._choice(index, answer, sample, new, read, ended=over)  # what it keeps of the choice is as it was then
        return True

    def _news(self, index: int, answer: Answer, sample: AnswerSample, text: SampleText) -> list[bytes]:
        """Events with what is new of a choice."""
        before, told = text.num_read, self._told
        openings = self._opening(index) if before == 0 else []
        parts = [self._chunk([opening], more=self._prompt(index)) for opening in openings]
        new, read = text.take()
        told.num_read[index], told.over[index] = text.num_read, sample.finish_reason is not None
        tokens_show = self._with_ids or sample.logprobs is not None
        if told.over[index] or new or before == 0 or (tokens_show and read.start < read.stop):
            parts.append(self._chunk([self._choice(index, answer, sample, new, read, ended=told.over[index])]))
        return parts

    async def _tail(self) -> list[dict[str, Any]]:
        """What chunks without choices have, behind the last one that has any."""
        receipt = await self._receipt()
        return ([{"more": receipt}] if receipt else []) + ([{"usage": self._usage()}] if self._include_usage else [])

    def _choice(
        self, index: int, answer: Answer, sample: AnswerSample, text: str, read: slice, *, ended: bool
    ) -> dict[str, Any]:
        """A choice, or what is new of it: the tokens ``read``, and the text that they complete."""
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
            if read.start == 0 and not self.one_prompt:
                choice["prompt_token_ids"] = answer.prompt_ids
        return choice

    def _prompt(self, index: int) -> dict[str, Any]:
        """What stands beside the first choice's beginning: the tokens of the prompt, where all have one."""
        shown = self._with_ids and self.one_prompt and index == 0
        return {"prompt_token_ids": self._answers[0].prompt_ids} if shown else {}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """What a stream says of a choice before its first token."""
        return []

    @abstractmethod
    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        """The fields of a choice that hold its text and logprobs."""

    def _reason(self, index: int, reason: str | None) -> str | None:
        """Why a choice has ended, as clients are told it."""
        return reason

    async def _receipt(self) -> dict[str, Any]:
        """Make the receipt, and name it in the headers; with its envelope for the body, where it was asked for.

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
        """An event. What stands before the choices is the same in all events of a stream, and is made once."""
        if not self._beginning:
            self._beginning = event({"object": self.chunk_kind, **self._head, "choices": 0})[: -len(b"0}\n\n")]
        rest = {**more, "usage": usage} if self._include_usage else more
        end = b"," + msgspec.json.encode(rest)[1:] + b"\n\n" if rest else b"}\n\n"
        name = f"id: {self._told}\n".encode() if self._job.kept else b""
        return name + self._beginning + msgspec.json.encode(choices) + end

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(answer.prompt_ids) for answer in self._answers)
        num_drawn = 0 if self._hidden else sum(answer.num_tokens for answer in self._answers)
        cached = sum(answer.num_cached_tokens for answer in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": num_prompt + num_drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def headers_of(name: str, seed: int | None, salt: bytes | None) -> dict[str, str]:
    """Fields of HTTP that tell how to repeat an answer, and to open its receipt."""
    found = {"X-Request-Id": name, "X-Detcompile-Seed": str(as_int64(seed or 0))}
    return found if salt is None else found | {"X-Detcompile-Receipt-Salt": salt.hex()}


def as_int64(seed: int) -> int:
    """A seed as OpenAI's schema has it, signed; sent again, it is the same seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
