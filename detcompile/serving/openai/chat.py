"""POST /v1/chat/completions: conversations, by the model's chat template."""

import functools
from typing import Any

from starlette.responses import Response

from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.job import Ask
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.openai.logprobs import chat_entry
from detcompile.serving.openai.messages import prompt_of, template_of
from detcompile.serving.openai.parameters import chat_params
from detcompile.serving.openai.reply import Reply
from detcompile.serving.openai.schema import ChatRequest
from detcompile.serving.openai.tools import Calls, ToolUse, in_family, tool_use
from detcompile.serving.responses import Events, Whole
from detcompile.serving.service import Service

__all__ = ["ChatReply", "ask_chat", "chat"]


async def chat(service: Service, asked: ChatRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its messages.
    """
    service.require_ready()
    service.require_model(asked.model)
    service.require_causal()
    require_served(asked)
    service.require_receipts(asked.receipt)
    use = tool_use(service, asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    job = await service.jobs.job(call, functools.partial(ask_chat, service, asked, use, call.owner))
    reply = ChatReply(
        service,
        job,
        stream_options=asked.stream_options,
        with_ids=bool(asked.return_token_ids),
        with_receipt=bool(asked.receipt),
        last_event=call.last_event,
    )
    reply.use = in_family(use, job.ask.family)
    if asked.stream:
        return Events(job.answers, call.reservation, reply.headers, reply.events())
    return Whole(job.answers, call.reservation, reply.headers, reply.whole)


async def ask_chat(
    service: Service, asked: ChatRequest, use: ToolUse | None, owner: str, prefix: str = "chatcmpl-"
) -> Ask:
    """What a request asks of the engines.

    Args:
        use: what it says of tools.
        owner: sha256 of the API key that asks.
        prefix: how the ids of its answers begin.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its messages.
    """
    params = chat_params(asked, service.hello.default_params, use)
    service.limiter.require(owner, params.n)
    tools = () if use is None else use.tools
    template = template_of(service, tools).digest
    special = bool(asked.add_special_tokens)
    prompt = await prompt_of(service, asked.messages, tools, owner=owner, add_special_tokens=special)
    family = None if use is None else use.family.name
    salt = asked.cache_salt or ""
    return Ask([prompt], params, asked.priority or 0, prefix, template, family=family, cache_salt=salt)


class ChatReply(Reply):
    """Choices with messages, or in a stream with deltas of them."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    one_prompt = True
    use: ToolUse | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._calls: dict[int, Calls] = {}  # by the index of the choice

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        if self.use is not None:
            own = self._calls.setdefault(index, Calls(self.use, f"{self._head['id']}/{index}"))
            text, calls = own.read(text, last=last)
        content = None if logprobs is None else [chat_entry(self.texts, entry) for entry in logprobs]
        found = None if content is None else {"content": content, "refusal": None}
        if not self._whole:
            told = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
            return {"delta": told, "logprobs": found}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_without_index(call) for call in calls]}
        return {"message": message, "logprobs": found}

    def _reason(self, index: int, reason: str | None) -> str | None:
        return reason if self.use is None else self._calls[index].reason(reason)


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}
