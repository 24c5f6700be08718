"""/v1/responses: text and calls of functions, whose streams can be read on by whoever has lost them."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.job import Ask
from detcompile.serving.journal.jobs import Call
from detcompile.serving.limiter import Reservation
from detcompile.serving.openai.messages import prompt_of, template_of
from detcompile.serving.openai.parameters import chat_params
from detcompile.serving.openai.recording import Recording
from detcompile.serving.openai.response_schema import InputItem, ResponsesRequest, chat_request, messages_of
from detcompile.serving.openai.schema import ChatRequest, Message, decode_body
from detcompile.serving.openai.tools import ToolUse, in_family, tool_use
from detcompile.serving.responses import JSON, Events, Whole
from detcompile.serving.service import Service

__all__ = [
    "DRAWN_WITH",
    "REPEATED",
    "RESPONSES",
    "cancelled_response",
    "count_input",
    "dropped_response",
    "kept_response",
    "respond",
]

RESPONSES = "/v1/responses"  # the path
TOLD: tuple[tuple[str, Any], ...] = (  # fields that a response repeats of its request, and what they are by default
    ("background", False), ("instructions", None), ("max_output_tokens", None), ("metadata", {}), ("store", True),
    ("parallel_tool_calls", True), ("previous_response_id", None), ("tool_choice", "auto"), ("tools", []),
    ("top_logprobs", 0), ("max_tool_calls", None), ("prompt_cache_key", None), ("reasoning", None),
    ("safety_identifier", None),
)  # fmt: skip
REPEATED = (*(name for name, _ in TOLD), "service_tier", "text", "truncation")
DRAWN_WITH = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
UNFINISHED: dict[str, str] = {  # statuses whose output is not what the model says, but a part of it, cut anywhere
    "in_progress": "still runs: wait until it has ended",
    "failed": "has failed: send its input again",
    "cancelled": "was cancelled: send its input again",
}


async def respond(service: Service, asked: ResponsesRequest, call: Call) -> Response:
    """Answer a request. One that is stored is kept in the journal, with a key or without.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its messages.
    """
    service.require_ready()
    service.require_model(asked.model)
    service.require_causal()
    service.require_receipts(asked.receipt)
    background, keeps = bool(asked.background), asked.store is not False
    if background and not keeps:
        raise HTTPError(400, "background needs store: nobody could ask for the response", param="background")
    own = service.jobs.kept(call) if keeps else replace(call, key=None)
    recording = await _recorded(service, asked, own, functools.partial(_ask, service, asked, call.owner))
    if not background and not (keeps and call.key is not None):
        call.reservation.add(recording.cancel)
    return await _answered(recording, asked, call.reservation, background=background)


async def count_input(service: Service, asked: ResponsesRequest, call: Call) -> Response:
    """Return how many tokens the prompt of a request has.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its messages.
    """
    service.require_ready()
    service.require_model(asked.model)
    service.require_causal()
    chat, use = _chat(service, asked, await _before(service, call.owner, asked.previous_response_id))
    tools = () if use is None else use.tools
    ids = await prompt_of(service, chat.messages, tools, counts=True, param="input", owner=call.owner)
    return _json({"object": "response.input_tokens", "input_tokens": len(ids)})


async def kept_response(
    service: Service, place: tuple[str, str], *, stream: bool, starting_after: int | None
) -> Response:
    """A response as it stands; or its events behind the one of number ``starting_after``.

    Args:
        place: sha256 of the API key, and the response's id.

    Raises:
        HTTPError: 404, or 400 for a number that no event has.
    """
    recording = await _found(service, *place)
    if starting_after is not None and starting_after < 0:
        raise HTTPError(400, "starting_after is the sequence_number of an event, from 0", param="starting_after")
    if stream:
        events = recording.read(0 if starting_after is None else starting_after + 1)
        return Events([recording.answer], Reservation(), {}, events, last=b"")
    return _json(recording.response())


async def cancelled_response(service: Service, place: tuple[str, str]) -> Response:
    """Cancel a response, unless it has ended; as it stands then.

    Raises:
        HTTPError: 404.
    """
    recording = await _found(service, *place)
    recording.cancel()
    await recording.settled()
    return _json(recording.response())


async def dropped_response(service: Service, place: tuple[str, str]) -> Response:
    """Cancel a response and keep it no longer.

    Raises:
        HTTPError: 404.
    """
    recording = await _found(service, *place)
    recording.cancel()
    service.responses.drop(*place)
    await service.jobs.drop(*place)
    return _json({"id": recording.name, "object": "response", "deleted": True})


async def _ask(service: Service, asked: ResponsesRequest, owner: str) -> Ask:
    """What a request asks of the engines."""
    before = await _before(service, owner, asked.previous_response_id)
    chat, use = _chat(service, asked, before)
    params = chat_params(chat, service.hello.default_params, use)
    service.limiter.require(owner, 1)
    tools = () if use is None else use.tools
    template = template_of(service, tools).digest
    prompt = await prompt_of(service, chat.messages, tools, param="input", owner=owner)
    messages, family = msgspec.json.encode(before), None if use is None else use.family.name
    return Ask([prompt], params, chat.priority or 0, "resp_", template, messages, family, chat.cache_salt or "")


def _chat(service: Service, asked: ResponsesRequest, before: list[Message]) -> tuple[ChatRequest, ToolUse | None]:
    chat = chat_request(asked, before)
    return chat, tool_use(service, chat.tools, chat.tool_choice, chat.parallel_tool_calls)


async def _recorded(
    service: Service, asked: ResponsesRequest, call: Call, ask: Callable[[], Awaitable[Ask]]
) -> Recording:
    """The recording of a request, which is the one that it has, or a new one."""
    job = await service.jobs.job(call, ask)
    found = service.responses.find(job.owner, job.name)
    if found is not None:
        assert isinstance(found, Recording)
        return found
    chat, use = _chat(service, asked, msgspec.json.decode(job.ask.before, type=list[Message]))
    use, params = in_family(use, job.ask.family), job.ask.params
    told = _told(asked) | {name: getattr(params, name) for name in DRAWN_WITH}
    messages = chat.messages[asked.instructions is not None :]
    recording = Recording(
        service, job, told, None if use is None else use.family, messages, with_receipt=bool(asked.receipt)
    )
    call.reservation.move_to(recording.reservation)
    call.held.move_to(recording.reservation)
    recording.num_bytes += len(call.body) + len(job.ask.before)
    if asked.store is not False:
        service.responses.add(recording)
    return recording


class _Result(Whole):
    """A response, once it has ended; one that failed has a status of its own."""

    def __init__(self, recording: Recording, reservation: Reservation) -> None:
        async def response() -> dict[str, Any]:
            return recording.response()

        super().__init__([recording.answer], reservation, recording.headers, response)
        self._recording = recording

    async def _ended(self) -> None:
        await self._recording.settled()
        if self._recording.error is not None:
            raise self._recording.error


async def _answered(
    recording: Recording, asked: ResponsesRequest, reservation: Reservation, *, background: bool
) -> Response:
    headers = recording.headers
    if asked.stream:
        events = recording.read() if background else _once_begun(recording)
        return Events([recording.answer], reservation, headers, events, last=b"")
    if background:
        return _json(recording.response(), headers)
    return _Result(recording, reservation)


async def _once_begun(recording: Recording) -> AsyncIterator[bytes]:
    """The events, from the first token on, so that a request which the engine refuses has a status of its own.

    Raises:
        DetcompileError: the refusal.
    """
    await recording.begun()
    async for data in recording.read():
        yield data


async def _found(service: Service, owner: str, name: str) -> Recording:
    """A response by its id, which goes on where a server before this one has begun it."""
    found = service.responses.find(owner, name)
    if found is None:
        call = await service.jobs.call(owner, name)
        if call is None or call.endpoint != RESPONSES:
            raise _unknown()
        found = await _recorded(service, decode_body(call.body, ResponsesRequest), call, _gone)
    assert isinstance(found, Recording)
    if found.answer.finished:
        await found.settled()
    return found


async def _gone() -> Ask:
    """The journal has dropped a request since it was found there."""
    raise _unknown()


def _unknown() -> HTTPError:
    return HTTPError(404, "there is no response of this id: none was made, or it is kept no longer",
                     param="response_id", code="response_not_found")  # fmt: skip


async def _before(service: Service, owner: str, name: str | None) -> list[Message]:
    """The conversation that a request goes on with.

    Raises:
        HTTPError: 404, or 400 for a response that has no whole output.
    """
    if name is None:
        return []
    recording = await _found(service, owner, name)
    found = recording.response()
    if found["status"] in UNFINISHED:
        said = f"previous_response_id names a response that {UNFINISHED[found['status']]}"
        raise HTTPError(400, said, param="previous_response_id", code="response_not_finished")
    output = msgspec.convert(found["output"], list[InputItem])
    return [*recording.messages, *messages_of(output)]


def _told(asked: ResponsesRequest) -> dict[str, Any]:
    """What the response repeats of its request."""
    plain = msgspec.to_builtins(asked)
    text = plain["text"] if plain["text"] and plain["text"].get("format") else {"format": {"type": "text"}}
    return {name: idle if plain[name] is None else plain[name] for name, idle in TOLD} | {
        "text": text,
        "truncation": "disabled",
        "service_tier": "default",
    }


def _json(content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON, headers=headers)
