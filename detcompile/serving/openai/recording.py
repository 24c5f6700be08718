"""Recording: a response in the making, whose events are kept, so that who lost a stream reads on where it was."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from detcompile.errors import DetcompileError, EngineError
from detcompile.serving.engines.answers import Answer, AnswerSample, progress
from detcompile.serving.http_errors import FAULT, HTTPError, error_of
from detcompile.serving.journal.job import Job
from detcompile.serving.limiter import Reservation
from detcompile.serving.openai.logprobs import chat_entry
from detcompile.serving.openai.reply import AT_ONCE, ReplyContext, as_int64, headers_of
from detcompile.serving.openai.response_output import ResponseOutput
from detcompile.serving.openai.schema import Message
from detcompile.serving.tokenizer_pool import SampleText
from detcompile.serving.tools.families import Family
from detcompile.serving.tools.reader import Piece, Reader

__all__ = ["Recording", "Status"]

TOKEN_BYTES = 64  # of a prompt's token: its id, and its letters in the messages
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
logger = logging.getLogger(__name__)


class Recording:
    """One response.

    Args:
        job: the request, with one answer of one sample.
        fields: what the response tells of its request.
        family: how calls of functions are written in it; None where there are none.
        messages: the conversation before it.
        with_receipt: also give the receipt, once it has ended.

    Attributes:
        events: server-sent events, each with its place as its sequence number.
        ended: when it did, by the clock of time.monotonic; None while it runs.
        error: what came in its way.
        num_bytes: what it keeps of memory, about.
        headers: fields of HTTP that tell how to repeat it, and to open its receipt.
        reservation: what it holds until it has ended.
    """

    def __init__(
        self,
        service: ReplyContext,
        job: Job,
        fields: dict[str, Any],
        family: Family | None,
        messages: list[Message],
        *,
        with_receipt: bool = False,
    ) -> None:
        [answer] = job.answers
        self.name, self.owner = job.name, job.owner
        self.events: list[bytes] = []
        self.ended: float | None = None
        self.error: DetcompileError | None = None
        self.messages = messages
        self.num_bytes = TOKEN_BYTES * len(answer.prompt_ids)
        self._service = service
        self._job = job
        self.answer: Answer = answer
        self._fields = fields
        self._with_receipt = with_receipt
        self._status: Status = "in_progress"
        self._failure: dict[str, Any] | None = None
        self._incomplete: dict[str, Any] | None = None
        self._reader = None if family is None else Reader(family)
        self._output = ResponseOutput(self.name)
        self._news = asyncio.Event()  # another one after each news: many may wait
        self._whole = False  # all of the answer was taken
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text was not told yet
        self.headers = headers_of(self.name, answer.params.seed, job.salt)
        self.reservation = Reservation()
        self._task = asyncio.get_running_loop().create_task(self._record())

    def cancel(self) -> None:
        """End it as it stands, unless it has ended."""
        if self.ended is None and not self.answer.finished:
            self._status, self._job.cancelled = "cancelled", True
            self._service.release([self.answer])

    async def begun(self) -> None:
        """Wait until there is a token, or there will be none.

        Raises:
            DetcompileError: why there is none.
        """
        while not self.answer.num_tokens and self.ended is None:
            await self._news.wait()
        if self.error is not None and not self.answer.num_tokens:
            raise self.error

    async def settled(self) -> None:
        """Wait until it has ended."""
        while self.ended is None:
            await self._news.wait()

    async def read(self, start: int = 0) -> AsyncIterator[bytes]:
        """Its events from one on, until the last; those that are there together.

        Raises:
            HTTPError: nobody was sent the event before.
        """
        while True:
            if start > len(self.events) and (self.ended is not None or not self._job.begun_before):
                last = len(self.events) - 1
                said = f"starting_after {start - 1} is no event's sequence_number: the last one's is {last}"
                raise HTTPError(400, said, param="starting_after")
            found, news = b"".join(self.events[start:]), self._news
            start = max(start, len(self.events))
            if found:
                yield found
            elif self.ended is not None:
                return
            else:
                await news.wait()

    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        answer = self.answer
        issued = self._job.issued if self._with_receipt and self.ended is not None else None
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": None if self._status == "in_progress" else self._job.end(),
            "status": self._status,
            "error": self._failure,
            "incomplete_details": self._incomplete,
            "model": self._job.model.name,
            "output": self._output.items,
            "system_fingerprint": self._job.model.fingerprint,
            "seed": as_int64(answer.params.seed or 0),
            "usage": None if self.ended is None else _usage(answer),
            **self._fields,
            **({} if issued is None else {"receipt": issued.envelope}),
        }

    async def _record(self) -> None:
        """Take all of the answer; whoever waits is woken in the end, whatever is raised."""
        try:
            await self._told()
            self._end()
        except Exception:  # a fault of this program: it is logged, and the response ends as failed
            logger.exception("%s failed", self.name)
            self._status, self._output = "in_progress", ResponseOutput(self.name)  # it may be what cannot be told
            self._fail(EngineError(FAULT))
            self._end()
        finally:
            self._status = "failed" if self._status == "in_progress" else self._status
            self.ended = self.ended or time.monotonic()
            self.reservation.release()
            self._wake()

    async def _told(self) -> None:
        """Tell of the answer, up to its end."""
        self._tell("response.created")
        self._tell("response.in_progress")
        sample = self.answer.samples[0]
        text = SampleText(self._service.texts, self.answer.params, sample)
        try:
            async for _ in progress([self.answer]):
                await self._take(text, sample)
            if self._job.cancelled:  # at a server before this one
                self._status = "cancelled"
                self._close("incomplete")
            else:
                await self._finish(sample.finish_reason)
        except DetcompileError as error:
            await self._take(text, sample)  # tokens that came just before it: a journal keeps them, too
            self._fail(error)

    def _end(self) -> None:
        self.ended = time.monotonic()
        last = "incomplete" if self._status == "cancelled" else self._status
        self._tell(f"response.{last}")

    async def _take(self, text: SampleText, sample: AnswerSample) -> None:
        """Take what is new, token by token: so events are a function of the tokens, whenever these come."""
        count, ended = len(sample.token_ids), sample.finish_reason is not None
        first = text.num_read
        for end in range(first + 1, count + 1):
            start, last = text.num_read, ended and end == count
            if (end - first) % AT_ONCE == 0:
                await asyncio.sleep(0)
            new, _ = text.take(None if last else end)
            self._add(new, slice(start, end), last=last)
            self._whole = last
        if ended and not self._whole:  # its end came without a token
            self._whole = True
            self._add(text.take()[0], slice(count, count), last=True)

    def _add(self, text: str, read: slice, *, last: bool) -> None:
        """Take new text, and tell of it."""
        pieces = [Piece(None, None, text)] if self._reader is None else self._reader.feed(text, last=last)
        known = self.answer.samples[0].logprobs
        self._logprobs += [chat_entry(self._service.texts, entry) for entry in (known or [])[read]]
        for piece in pieces:
            logprobs, self._logprobs = self._logprobs, []  # those of calls have no place
            if piece.call is not None or piece.text or logprobs:
                for event in self._output.add(piece, logprobs):
                    self._send(event)

    async def _finish(self, reason: str | None) -> None:
        """The answer has ended: so do its items."""
        await self._service.issue(self._job)
        self._status = "incomplete" if reason == "length" else "completed"
        if reason == "length":
            self._incomplete = {"reason": "max_output_tokens"}
        if not self._output.items:
            for event in self._output.add(Piece(None, None, ""), self._logprobs):
                self._send(event)
        self._close(self._status)

    def _close(self, status: str) -> None:
        for event in self._output.close(status):
            self._send(event)

    def _fail(self, error: DetcompileError) -> None:
        if self._status != "cancelled":
            self._status = "failed"
            content = error_of(error).content["error"]
            self._failure = {"code": content["code"] or "server_error", "message": content["message"]}
            self.error = error
        self._close("incomplete")

    def _tell(self, kind: str) -> None:
        self._send({"type": kind, "response": self.response()})

    def _send(self, event: dict[str, Any]) -> None:
        data = msgspec.json.encode(event | {"sequence_number": len(self.events)})
        self.events.append(b"event: " + str(event["type"]).encode() + b"\ndata: " + data + b"\n\n")
        self.num_bytes += len(self.events[-1])
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _usage(answer: Answer) -> dict[str, Any]:
    num_prompt, num_drawn = len(answer.prompt_ids), answer.num_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_drawn,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_drawn,
    }
