"""Recording: a response in progress. It keeps all events, so that a client can resume its stream."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from detcompile.errors import DetcompileError, EngineError
from detcompile.reasoning.formats import Piece
from detcompile.serving.engines.answers import ABORT, Answer, AnswerSample, progress
from detcompile.serving.http_errors import FAULT, HTTPError, error_of
from detcompile.serving.journal.job import Job
from detcompile.serving.limiter import Reservation
from detcompile.serving.openai.reply import AT_ONCE, ReplyContext, as_int64, chat_entry, headers_of
from detcompile.serving.openai.response_output import ResponseOutput
from detcompile.serving.openai.schema import Message
from detcompile.serving.reasoning import AnswerReader, num_reasoning_tokens
from detcompile.serving.tokenizer_pool import SampleText
from detcompile.serving.tools.reader import Family

INCOMPLETE: dict[str | None, str] = {"length": "max_output_tokens", ABORT: ABORT}  # by finish reason
TOKEN_BYTES = 64  # estimate per prompt token: its id, and its text in the messages
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
logger = logging.getLogger(__name__)


class Recording:
    """One response.

    Args:
        job: the request, with one answer of one sample.
        fields: request fields that the response repeats.
        family: the tool-call format; None without tools.
        messages: the conversation before the response.
        with_receipt: include the receipt at the end.

    Attributes:
        events: server-sent events; the index is the sequence number.
        ended: end in time.monotonic seconds; None while it runs.
        error: why it failed.
        num_bytes: approximate memory use.
        headers: HTTP headers needed to reproduce the answer and to open its receipt.
        reservation: resources held until the end.
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
        self._reader = AnswerReader(job.ask.thinking, family)
        self._num_reasoning = 0  # tokens
        self._output = ResponseOutput(self.name)
        self._changed = asyncio.Event()  # replaced at each change
        self._whole = False  # the whole answer was read
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text was not sent yet
        self.headers = headers_of(self.name, answer.params.seed, job.salt)
        self.reservation = Reservation()
        self._task = asyncio.get_running_loop().create_task(self._record())

    def cancel(self) -> None:
        """Cancel the response unless it has ended."""
        if self.ended is None and not self.answer.finished:
            self._status, self._job.cancelled = "cancelled", True
            self._service.release([self.answer])

    async def begun(self) -> None:
        """Wait for the first token or the end.

        Raises:
            DetcompileError: it failed before the first token.
        """
        while not self.answer.num_tokens and self.ended is None:
            await self._changed.wait()
        if self.error is not None and not self.answer.num_tokens:
            raise self.error

    async def settled(self) -> None:
        """Wait for the end."""
        while self.ended is None:
            await self._changed.wait()

    async def read(self, start: int = 0) -> AsyncIterator[bytes]:
        """Yield the events from index ``start`` to the last, joined if several are ready.

        Raises:
            HTTPError: the event before ``start`` was never sent.
        """
        while True:
            if start > len(self.events) and (self.ended is not None or not self._job.begun_before):
                last = len(self.events) - 1
                message = f"starting_after {start - 1} is not an event's sequence_number: the last event has {last}"
                raise HTTPError(400, message, param="starting_after")
            data, changed = b"".join(self.events[start:]), self._changed
            start = max(start, len(self.events))
            if data:
                yield data
            elif self.ended is not None:
                return
            else:
                await changed.wait()

    def response(self) -> dict[str, Any]:
        """Return the response in its current state."""
        answer = self.answer
        model = self._job.drawn_by
        issued = self._job.issued if self._with_receipt and self.ended is not None else None
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": None if self._status == "in_progress" else self._job.end(),
            "status": self._status,
            "error": self._failure,
            "incomplete_details": self._incomplete,
            "model": model.name,
            "output": self._output.items,
            "system_fingerprint": model.fingerprint,
            **({} if model.weight_version is None else {"weight_version": model.weight_version}),
            "seed": as_int64(answer.params.seed or 0),
            "usage": None if self.ended is None else _usage(answer, self._num_reasoning),
            **self._fields,
            **({} if issued is None else {"receipt": issued.envelope}),
        }

    async def _record(self) -> None:
        """Read the answer to its end; always wake waiting readers at the end."""
        try:
            await self._send_answer()
            await self._end()
        except Exception:  # a bug: log it and end the response as failed
            logger.exception("%s failed", self.name)
            self._status, self._output = "in_progress", ResponseOutput(self.name)  # the old one may be unencodable
            self._fail(EngineError(FAULT))
            await self._end()
        finally:
            self._status = "failed" if self._status == "in_progress" else self._status
            self.ended = self.ended or time.monotonic()
            self.reservation.release()
            self._wake()

    async def _send_answer(self) -> None:
        """Send the answer's events up to its end."""
        self._send_response("response.created")
        self._send_response("response.in_progress")
        sample = self.answer.samples[0]
        text = SampleText(self._service.texts, self.answer.params, sample)
        try:
            async for _ in progress([self.answer]):
                await self._take(text, sample)
            if self._job.cancelled:  # before a restart of the server
                self._status = "cancelled"
                self._close("incomplete")
            else:
                await self._finish(sample.finish_reason)
        except DetcompileError as error:
            await self._take(text, sample)  # the last tokens before the error; the journal has them, too
            self._fail(error)

    async def _end(self) -> None:
        thinking = self._job.ask.thinking
        self._num_reasoning = await num_reasoning_tokens(self._service.texts, [self.answer], thinking)
        self.ended = time.monotonic()
        last = "incomplete" if self._status == "cancelled" else self._status
        self._send_response(f"response.{last}")

    async def _take(self, text: SampleText, sample: AnswerSample) -> None:
        """Process new tokens one by one, so that events depend on the tokens and not on their timing."""
        count, ended = len(sample.token_ids), sample.finish_reason is not None
        first = text.num_read
        for end in range(first + 1, count + 1):
            start, last = text.num_read, ended and end == count
            if (end - first) % AT_ONCE == 0:
                await asyncio.sleep(0)
            new, _ = text.take(None if last else end)
            self._add(new, slice(start, end), last=last)
            self._whole = last
        if ended and not self._whole:  # the end came without a token
            self._whole = True
            self._add(text.take()[0], slice(count, count), last=True)

    def _add(self, text: str, read: slice, *, last: bool) -> None:
        """Process new text and send its events."""
        showed = self._reader.shows
        pieces = self._reader.feed(text, last=last)
        known = self.answer.samples[0].logprobs
        self._logprobs += [chat_entry(self._service.texts, entry) for entry in (known or [])[read]]
        if not self._reader.shows or not (showed or any(piece.text and not piece.reasoning for piece in pieces)):
            self._logprobs = []
        for piece in pieces:
            logprobs, self._logprobs = self._logprobs, []  # calls and reasoning have no logprobs
            if piece.call is not None or piece.text or logprobs:
                for event in self._output.add(piece, logprobs):
                    self._send(event)

    async def _finish(self, reason: str | None) -> None:
        """End the answer's items and set the status."""
        await self._service.issue(self._job)
        self._status = "incomplete" if reason in INCOMPLETE else "completed"
        if reason in INCOMPLETE:
            self._incomplete = {"reason": INCOMPLETE[reason]}
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

    def _send_response(self, kind: str) -> None:
        self._send({"type": kind, "response": self.response()})

    def _send(self, event: dict[str, Any]) -> None:
        data = msgspec.json.encode(event | {"sequence_number": len(self.events)})
        self.events.append(b"event: " + str(event["type"]).encode() + b"\ndata: " + data + b"\n\n")
        self.num_bytes += len(self.events[-1])
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _usage(answer: Answer, num_reasoning: int) -> dict[str, Any]:
    num_prompt, num_drawn = len(answer.prompt_ids), answer.num_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_drawn,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_drawn,
    }
