"""/v1/responses: text and calls of functions, whose streams can be read on by whoever has lost them."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.messages import prompt_of
from detcompile.serving.openai.parameters import chat_params
from detcompile.serving.openai.recording import Recording
from detcompile.serving.openai.response_schema import InputItem, ResponsesRequest, chat_request, messages_of
from detcompile.serving.openai.schema import Message
from detcompile.serving.openai.tools import tool_use
from detcompile.serving.responses import JSON, Events, Whole
from detcompile.serving.service import Service

__all__ = ["cancelled_response", "dropped_response", "kept_response", "respond"]

TOLD: tuple[tuple[str, Any], ...] = (  # fields that a response repeats of its request, and what they are by default
    ("background", False), ("instructions", None), ("max_output_tokens", None), ("metadata", {}), ("store", True),
    ("parallel_tool_calls", True), ("previous_response_id", None), ("tool_choice", "auto"), ("tools", []),
    ("top_logprobs", 0),
)  # fmt: skip


async def respond(service: Service, asked: ResponsesRequest) -> Response:
    """Answer a request.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its messages.
    """
    service.require_ready()
    service.require_model(asked.model)
    service.require_causal()
    background, keeps = bool(asked.background), asked.store is not False
    if background and not keeps:
        raise HTTPError(400, "background needs store: nobody could ask for the response", param="background")
    chat = chat_request(asked, _before(service, asked.previous_response_id))
    use = tool_use(service, chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    params = chat_params(chat, service.hello.default_params, use)
    service.require_room(0, 1)
    await service.grammars.require(params.grammar)
    prompt = await prompt_of(service, chat.messages, () if use is None else use.tools)
    [answer] = service.submit([prompt], params, chat.priority or 0)
    messages = chat.messages[asked.instructions is not None :]
    told = _told(asked) | {"temperature": params.temperature, "top_p": params.top_p}
    recording = Recording(service, answer, told, None if use is None else use.family, messages)
    if keeps:
        service.responses.add(recording)
    return await _answered(recording, asked, background)


async def kept_response(service: Service, name: str, *, stream: bool, starting_after: int | None) -> Response:
    """A response as it stands; or its events behind the one of number ``starting_after``.

    Raises:
        HTTPError: 404, or 400 for a number that no event has.
    """
    recording = _found(service, name)
    if starting_after is not None and starting_after < 0:
        raise HTTPError(400, "starting_after is the sequence_number of an event, from 0", param="starting_after")
    if stream:
        return _stream(recording, recording.read(0 if starting_after is None else starting_after + 1))
    return _json(recording.response())


async def cancelled_response(service: Service, name: str) -> Response:
    """Cancel a response, unless it has ended; as it stands then.

    Raises:
        HTTPError: 404.
    """
    recording = _found(service, name)
    recording.cancel()
    await recording.settled()
    return _json(recording.response())


async def dropped_response(service: Service, name: str) -> Response:
    """Cancel a response and keep it no longer.

    Raises:
        HTTPError: 404.
    """
    _found(service, name).cancel()
    service.responses.drop(name)
    return _json({"id": name, "object": "response", "deleted": True})


class _Result(Whole):
    """A response, once it has ended; one that failed has a status of its own."""

    def __init__(self, recording: Recording, headers: dict[str, str]) -> None:
        super().__init__([recording.answer], lambda _: recording.cancel(), headers, recording.response)
        self._recording = recording

    async def _ended(self) -> None:
        await self._recording.settled()
        if self._recording.error is not None:
            raise self._recording.error


async def _answered(recording: Recording, asked: ResponsesRequest, background: bool) -> Response:
    headers = recording.headers
    if asked.stream:
        events = recording.read() if background else _once_begun(recording)
        return _stream(recording, events, headers, cancels=not background)
    if background:
        return _json(recording.response(), headers)
    return _Result(recording, headers)


async def _once_begun(recording: Recording) -> AsyncIterator[bytes]:
    """The events, from the first token on, so that a request which the engine refuses has a status of its own.

    Raises:
        DetcompileError: the refusal.
    """
    await recording.begun()
    async for data in recording.read():
        yield data


def _stream(
    recording: Recording, events: AsyncIterator[bytes], headers: dict[str, str] | None = None, *, cancels: bool = False
) -> Events:
    def release(_answers: Any) -> None:
        if cancels:
            recording.cancel()

    return Events([recording.answer], release, headers or {}, events, last=b"")


def _found(service: Service, name: str) -> Recording:
    found = service.responses.find(name)
    if found is None:
        raise HTTPError(404, "there is no response of this id: none was made, or it is kept no longer",
                        param="response_id", code="response_not_found")  # fmt: skip
    assert isinstance(found, Recording)
    return found


def _before(service: Service, name: str | None) -> list[Message]:
    """The conversation that a request goes on with.

    Raises:
        HTTPError: 404.
    """
    if name is None:
        return []
    recording = _found(service, name)
    output = msgspec.convert(recording.response()["output"], list[InputItem])
    return [*recording.messages, *messages_of(output)]


def _told(asked: ResponsesRequest) -> dict[str, Any]:
    """What the response repeats of its request."""
    plain = msgspec.to_builtins(asked)
    text = plain["text"] if plain["text"] and plain["text"].get("format") else {"format": {"type": "text"}}
    return {name: idle if plain[name] is None else plain[name] for name, idle in TOLD} | {
        "text": text,
        "truncation": "disabled",
    }


def _json(content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON, headers=headers)
