"""/v1/responses: text and function calls, in streams that clients can resume."""

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
from detcompile.serving.openai.chat import ask_chat, count_chat
from detcompile.serving.openai.recording import Recording
from detcompile.serving.openai.response_schema import InputItem, ResponsesRequest, chat_request, messages_of
from detcompile.serving.openai.schema import Message, decoded_body
from detcompile.serving.openai.tools import recorded_use
from detcompile.serving.responses import Events, Whole, json_response
from detcompile.serving.service import Service

RESPONSES = "/v1/responses"  # the path
DEFAULTS: tuple[tuple[str, Any], ...] = (  # request fields that a response repeats, and their defaults
    ("background", False), ("instructions", None), ("max_output_tokens", None), ("metadata", {}), ("store", True),
    ("parallel_tool_calls", True), ("previous_response_id", None), ("tool_choice", "auto"), ("tools", []),
    ("top_logprobs", 0), ("max_tool_calls", None), ("prompt_cache_key", None), ("reasoning", None),
    ("safety_identifier", None),
)  # fmt: skip
REPEATED = (*(name for name, _ in DEFAULTS), "service_tier", "text", "truncation")
DRAWN_WITH = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
UNFINISHED: dict[str, str] = {  # statuses with incomplete output, and what to do
    "in_progress": "still runs: wait for its end",
    "failed": "has failed: send its input again",
    "cancelled": "was canceled: send its input again",
}


async def respond(service: Service, request: ResponsesRequest, call: Call) -> Response:
    """Answer a request. A stored response is kept in the journal, even without an idempotency key.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the chat template rejects the messages.
    """
    service.require_generation(request.receipt)
    background, stores = bool(request.background), request.store is not False
    if background and not stores:
        raise HTTPError(400, "background requires store, or the response is lost", param="background")
    kept = service.jobs.kept(call) if stores else replace(call, key=None)
    recording = await _recorded(service, request, kept, functools.partial(_ask, service, request, call.owner))
    if not background and not (stores and call.key is not None):
        call.reservation.add(recording.cancel)
    return await _answered(recording, request, call.reservation, background=background)


async def count_input(service: Service, request: ResponsesRequest, call: Call) -> Response:
    """Return the number of tokens in a request's prompt.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the chat template rejects the messages.
    """
    service.require_generation()
    service.require_model(request.model)
    chat = chat_request(request, await _before(service, call.owner, request.previous_response_id))
    count = await count_chat(service, chat, call.owner, param="input")
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def kept_response(
    service: Service, place: tuple[str, str], *, stream: bool, starting_after: int | None
) -> Response:
    """Return a response in its current state, or its events after ``starting_after``.

    Args:
        place: sha256 of the API key, and the response's id.

    Raises:
        HTTPError: 404, or 400 for an unknown sequence number.
    """
    recording = await _find(service, *place)
    if starting_after is not None and starting_after < 0:
        raise HTTPError(400, "starting_after must be an event's sequence_number, 0 or more", param="starting_after")
    if stream:
        events = recording.read(0 if starting_after is None else starting_after + 1)
        return Events([recording.answer], Reservation(), {}, events, last=b"")
    return json_response(recording.response())


async def cancelled_response(service: Service, place: tuple[str, str]) -> Response:
    """Cancel a response unless it has ended; return its state.

    Raises:
        HTTPError: 404.
    """
    recording = await _find(service, *place)
    recording.cancel()
    await recording.settled()
    return json_response(recording.response())


async def dropped_response(service: Service, place: tuple[str, str]) -> Response:
    """Cancel and delete a response.

    Raises:
        HTTPError: 404.
    """
    recording = await _find(service, *place)
    recording.cancel()
    service.responses.drop(*place)
    await service.jobs.drop(*place)
    return json_response({"id": recording.name, "object": "response", "deleted": True})


async def _ask(service: Service, request: ResponsesRequest, owner: str) -> Ask:
    """Return a request's work for the engines."""
    before = await _before(service, owner, request.previous_response_id)
    ask = await ask_chat(service, chat_request(request, before), owner, "resp_", param="input")
    return replace(ask, before=msgspec.json.encode(before))


async def _recorded(
    service: Service, request: ResponsesRequest, call: Call, ask: Callable[[], Awaitable[Ask]]
) -> Recording:
    """Return the recording of a request: the existing one or a new one."""
    job = await service.jobs.job(call, ask)
    existing = service.responses.find(job.owner, job.name)
    if existing is not None:
        assert isinstance(existing, Recording)
        return existing
    chat = chat_request(request, msgspec.json.decode(job.ask.before, type=list[Message]))
    use = recorded_use(job.ask.family, chat.tool_choice)
    fields = _repeated(request) | {name: getattr(job.ask.params, name) for name in DRAWN_WITH}
    messages = chat.messages[request.instructions is not None :]
    recording = Recording(
        service, job, fields, None if use is None else use.family, messages, with_receipt=bool(request.receipt)
    )
    call.reservation.move_to(recording.reservation)
    call.held.move_to(recording.reservation)
    recording.num_bytes += len(call.body) + len(job.ask.before)
    if request.store is not False:
        service.responses.add(recording)
    return recording


class _Result(Whole):
    """A response after its end; a failed one gets an error status."""

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
    recording: Recording, request: ResponsesRequest, reservation: Reservation, *, background: bool
) -> Response:
    headers = recording.headers
    if request.stream:
        events = recording.read() if background else _once_begun(recording)
        return Events([recording.answer], reservation, headers, events, last=b"")
    if background:
        return json_response(recording.response(), headers)
    return _Result(recording, reservation)


async def _once_begun(recording: Recording) -> AsyncIterator[bytes]:
    """Yield the events after the first token, so that a rejected request gets an error status.

    Raises:
        DetcompileError: the engine rejected the request.
    """
    await recording.begun()
    async for data in recording.read():
        yield data


async def _find(service: Service, owner: str, name: str) -> Recording:
    """Return a response by its id; if an earlier server process started it, it is resumed."""
    recording = service.responses.find(owner, name)
    if recording is None:
        call = await service.jobs.call(owner, name)
        if call is None or call.endpoint != RESPONSES:
            raise _unknown()
        recording = await _recorded(service, await decoded_body(call.body, ResponsesRequest), call, _gone)
    assert isinstance(recording, Recording)
    if recording.answer.finished:
        await recording.settled()
    return recording


async def _gone() -> Ask:
    """Raise 404: the journal dropped the request after it was found."""
    raise _unknown()


def _unknown() -> HTTPError:
    return HTTPError(404, "unknown response id: it never existed, or it is no longer stored",
                     param="response_id", code="response_not_found")  # fmt: skip


async def _before(service: Service, owner: str, name: str | None) -> list[Message]:
    """Return the conversation that a request continues.

    Raises:
        HTTPError: 404, or 400 for a response with incomplete output.
    """
    if name is None:
        return []
    recording = await _find(service, owner, name)
    previous = recording.response()
    if previous["status"] in UNFINISHED:
        message = f"previous_response_id: this response {UNFINISHED[previous['status']]}"
        raise HTTPError(400, message, param="previous_response_id", code="response_not_finished")
    output = msgspec.convert(previous["output"], list[InputItem])
    return [*recording.messages, *messages_of(output)]


def _repeated(request: ResponsesRequest) -> dict[str, Any]:
    """Return the request fields that the response repeats."""
    plain = msgspec.to_builtins(request)
    text = plain["text"] if plain["text"] and plain["text"].get("format") else {"format": {"type": "text"}}
    return {name: idle if plain[name] is None else plain[name] for name, idle in DEFAULTS} | {
        "text": text,
        "truncation": "disabled",
        "service_tier": "default",
    }
