"""POST /v1/chat/completions: conversations, by the model's chat template."""

from typing import Any

from starlette.responses import Response

from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Token
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.parameters import chat_params
from detcompile.serving.openai.reply import Reply, finite
from detcompile.serving.openai.schema import ChatRequest, Message, require_served
from detcompile.serving.responses import Events, Whole
from detcompile.serving.service import Service

__all__ = ["chat", "prompt_of"]


async def chat(service: Service, asked: ChatRequest) -> Response:
    """Answer a request.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its messages.
    """
    service.require_ready()
    service.require_model(asked.model)
    require_served(asked)
    service.require_receipts(asked.receipt)
    params = chat_params(asked, service.hello.default_params)
    service.require_room(0, params.n)
    answers = service.submit([await prompt_of(service, asked.messages)], params, asked.priority or 0)
    reply = _Chat(
        service,
        answers,
        stream_options=asked.stream_options,
        with_ids=bool(asked.return_token_ids),
        with_receipt=bool(asked.receipt),
        template=None if service.template is None else service.template.digest,
    )
    if asked.stream:
        return Events(answers, service.release, reply.headers, reply.events())
    return Whole(answers, service.release, reply.headers, reply.whole)


async def prompt_of(service: Service, messages: list[Message]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's answer begins.

    Raises:
        HTTPError: no chat template, or a part of a message that is not served. InvalidInput: the template refuses it.
    """
    if service.template is None:
        said = f"{service.name} has no chat template: use /v1/completions, or start the server with --chat-template"
        raise HTTPError(400, said, param="messages", code="no_chat_template")
    plain = [_plain(message, place) for place, message in enumerate(messages)]
    text = await service.template.render(plain, **service.hello.special_tokens)
    return await service.texts.encode(text, add_special_tokens=False)


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as templates take it; parts of text are joined."""
    where = f"messages[{place}]"
    for name in ("tool_calls", "tool_call_id"):
        if getattr(message, name):
            raise HTTPError(400, f"{where}.{name}: tools are not served", param=f"{where}.{name}")
    content = message.content
    if isinstance(content, list):
        for index, part in enumerate(content):
            if part.type not in ("text", "refusal") or part.text is None:
                own = f"{where}.content[{index}]"
                raise HTTPError(400, f"{own}: parts of type {part.type[:40]!r} are not served, only text", param=own)
        content = "".join(part.text or "" for part in content)
    plain = {"role": message.role, "content": content or message.refusal or ""}
    return plain if message.name is None else plain | {"name": message.name}


class _Chat(Reply):
    """Choices with messages, or in a stream with deltas of them."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool
    ) -> dict[str, Any]:
        content = None if logprobs is None else [self._entry(entry) for entry in logprobs]
        found = None if content is None else {"content": content, "refusal": None}
        if self._whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": found}
        return {"delta": {"content": text} if text else {}, "logprobs": found}

    def _entry(self, entry: Token) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in entry.top]
        return self._named(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.texts.bytes_of(token)
        return {
            "token": self.texts.name_of(token),
            "logprob": finite(logprob),
            "bytes": list(text) if self.texts.present else None,
        }
