"""POST /v1/messages: Anthropic's form of a chat. It draws the same tokens as the equivalent chat request."""

import functools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response

from detcompile.serving.anthropic.blocks import Blocks
from detcompile.serving.anthropic.schema import CountTokensRequest, MessagesRequest, chat_request
from detcompile.serving.engines.answers import ABORT, AnswerSample, progress
from detcompile.serving.journal.job import Job
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.chat import ask_chat, count_chat
from detcompile.serving.openai.reply import ReplyContext, as_int64, headers_of
from detcompile.serving.openai.tools import ToolUse, recorded_use
from detcompile.serving.reasoning import num_reasoning_tokens
from detcompile.serving.responses import Events, Whole, json_response
from detcompile.serving.service import Service
from detcompile.serving.tokenizer_pool import SampleText


async def create_message(service: Service, request: MessagesRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the chat template rejects the messages.
    """
    service.require_generation(request.receipt)
    chat = chat_request(request)
    job = await service.jobs.job(call, functools.partial(ask_chat, service, chat, call.owner, "msg_"))
    use = recorded_use(job.ask.family, chat.tool_choice)
    message = MessageReply(service, job, use, with_receipt=bool(request.receipt))
    if request.stream:
        return Events(job.answers, call.reservation, message.headers, message.events(), last=b"")
    return Whole(job.answers, call.reservation, message.headers, message.whole)


async def count_tokens(service: Service, request: CountTokensRequest, call: Call) -> Response:
    """Return the number of tokens in a request's prompt.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the chat template rejects the messages.
    """
    service.require_ready()
    service.require_model(request.model)
    return json_response({"input_tokens": await count_chat(service, chat_request(request), call.owner)})


class MessageReply:
    """The answer to a request, as one message or as stream events.

    Attributes:
        headers: HTTP headers needed to reproduce the answer.
    """

    def __init__(self, service: ReplyContext, job: Job, use: ToolUse | None, *, with_receipt: bool) -> None:
        self._service = service
        self._job = job
        self._with_receipt = with_receipt
        [self._answer] = job.answers
        self._blocks = Blocks(job.name, use, job.ask.thinking)
        self.headers = headers_of(job.name, self._answer.params.seed, job.salt) | {"Request-Id": job.name}

    async def whole(self) -> dict[str, Any]:
        """Return the message after the answer has ended."""
        [sample] = self._answer.samples
        text, _ = await SampleText(self._service.texts, self._answer.params, sample).rest()
        self._blocks.add(text, last=True)
        end = await self._end(sample)
        return self._head() | {"content": self._blocks.content, **end.pop("delta"), **end}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events as the answer grows.

        Raises:
            DetcompileError: the answer failed.
        """
        [sample] = self._answer.samples
        text = SampleText(self._service.texts, self._answer.params, sample)
        begun = False
        async for _ in progress([self._answer]):
            ended = sample.finish_reason is not None
            if not (ended or sample.token_ids):
                continue
            start = [] if begun else [{"type": "message_start", "message": self._head()}]
            begun = True
            new, _ = text.take()
            yield b"".join(map(_event, [*start, *self._blocks.add(new, last=ended)]))
        yield _event({"type": "message_delta", **await self._end(sample)}) + _event({"type": "message_stop"})

    def _head(self) -> dict[str, Any]:
        """Return the message without content."""
        model = self._job.drawn_by
        return {
            "id": self._job.name,
            "type": "message",
            "role": "assistant",
            "model": self._job.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0, 0),
            "system_fingerprint": model.fingerprint,
            **({} if model.weight_version is None else {"weight_version": model.weight_version}),
            "seed": as_int64(self._answer.params.seed or 0),
        }

    async def _end(self, sample: AnswerSample) -> dict[str, Any]:
        """Return the stop reason, the usage and, if requested, the receipt.

        Raises:
            StorageError: the receipt log cannot be written.
        """
        reason = "tool_use" if self._blocks.num_calls else "end_turn"
        stop = sample.stop_reason if isinstance(sample.stop_reason, str) else None
        reason = "stop_sequence" if stop is not None else reason
        reason = {"length": "max_tokens", ABORT: ABORT}.get(sample.finish_reason or "", reason)
        usage: dict[str, Any] = self._usage(self._answer.num_cached_tokens, self._answer.num_tokens)
        thinking = self._job.ask.thinking
        if thinking is not None:
            num_thinking = await num_reasoning_tokens(self._service.texts, [self._answer], thinking)
            usage["output_tokens_details"] = {"thinking_tokens": num_thinking}
        end: dict[str, Any] = {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": usage}
        issued = await self._service.issue(self._job)
        if issued is not None:
            self.headers["X-Detcompile-Receipt"] = issued.digest
        return end | ({"receipt": issued.envelope} if issued is not None and self._with_receipt else {})

    def _usage(self, cached: int, num_drawn: int) -> dict[str, int]:
        """Return token counts; prompt tokens from the prefix cache are counted separately."""
        return {
            "input_tokens": len(self._answer.prompt_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": num_drawn,
        }


def _event(content: dict[str, Any]) -> bytes:
    return b"event: " + str(content["type"]).encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
