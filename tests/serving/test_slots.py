"""Every slot is released, whether the client leaves, its task is canceled or the answer ends early."""

import asyncio
import contextlib
import gc
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from detcompile.serving import app as app_module
from detcompile.serving.app import new_app
from detcompile.serving.grammar_check import GrammarCheck
from detcompile.serving.journal.journal import Journal
from detcompile.serving.responses import unless_left
from detcompile.serving.service import Service
from tests.serving.instant_fleet import EMBEDDER, InstantFleet
from tests.serving.scripted_service import SPEC
from tests.serving.test_waiting import envelope_of

LONG = "return " * 600  # over 4096 letters: tokenized in a thread
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    embeds: bool = False
    keeps: bool = False  # with a journal


KEY = {"idempotency-key": "{number}"}  # another one each time
KINDS = {
    "completion": Kind("/v1/completions", {"prompt": [5]}),
    "samples": Kind("/v1/completions", {"prompt": [[5], [6]], "n": 2, "stream": True}),
    "long text, echoed": Kind("/v1/completions", {"prompt": [LONG, "b"], "echo": True, "logprobs": 1}),
    "grammar": Kind("/v1/completions", {"prompt": [5], "guided_regex": "a+"}),
    "chat": Kind("/v1/chat/completions", CHAT),
    "chat, streamed": Kind("/v1/chat/completions", CHAT | {"stream": True}),
    "message": Kind("/v1/messages", CHAT),
    "message, streamed": Kind("/v1/messages", CHAT | {"stream": True}),
    "response": Kind("/v1/responses", {"input": "x"}),
    "response, not stored": Kind("/v1/responses", {"input": "x", "store": False}),
    "response, streamed": Kind("/v1/responses", {"input": "x", "stream": True}),
    "response in the background": Kind("/v1/responses", {"input": "x", "background": True}),
    "background, streamed": Kind("/v1/responses", {"input": "x", "background": True, "stream": True}),
    "verification": Kind("/v1/verify", envelope_of()),
    "embeddings": Kind("/v1/embeddings", {"input": ["a", "b"]}, embeds=True),
    "tokens": Kind("/tokenize", {"prompt": LONG}),
    "kept": Kind("/v1/completions", {"prompt": [5]}, KEY, keeps=True),
    "kept, streamed": Kind("/v1/chat/completions", CHAT | {"stream": True}, KEY, keeps=True),
    "kept response": Kind("/v1/responses", {"input": "x"}, keeps=True),
    "kept, of a large body": Kind("/v1/completions", {"prompt": [5], "pad": "x" * 200_000}, KEY, keeps=True),
}


class Stepped:
    """An awaitable that runs a coroutine and calls ``act`` at one of the points where that waits.

    Args:
        act: called with the future that it waits for.
        at: which point, from 1.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, act: Callable[[Any], None]) -> None:
        self._coroutine = coroutine
        self._at = at
        self._act = act
        self.count = 0

    def __await__(self) -> Generator[Any, None, Any]:
        step: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731
        while True:
            try:
                waited = step()
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self._at:
                self._act(waited)
            try:
                yield waited
                step = lambda: self._coroutine.send(None)  # noqa: E731
            except BaseException as raised:
                step = lambda error=raised: self._coroutine.throw(error)  # noqa: E731


def cancel_now(_waited: Any) -> None:
    """Cancel the task, which waits."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def cancel_with_result(waited: Any) -> None:
    """Cancel a task in the turn in which its result arrives, before it sees the result."""
    task = asyncio.current_task()
    assert task is not None
    if waited is None:  # asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(task.cancel)
    else:
        waited.add_done_callback(lambda _: task.cancel())


async def deaf(making: Coroutine[Any, Any, Any]) -> Any:
    """Ignore cancellation, as asyncio.wait_for of Python 3.11 may."""
    inner = asyncio.ensure_future(making)
    while not inner.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(inner)
    return inner.result()


class Requests:
    """Sends requests of one kind to an application, without a connection."""

    def __init__(self, app: Any, kind: Kind) -> None:
        self._app = app
        self._kind = kind
        self.number = 0
        self.left = asyncio.Event()

    def ask(self, other: dict[str, Any] | None = None) -> Coroutine[Any, Any, None]:
        """The coroutine of one more request, or of one with another body."""
        self.number += 1
        self.left = left = asyncio.Event()
        kind = self._kind
        body = json.dumps(kind.body if other is None else other).encode()
        headers = {"content-type": "application/json"} | kind.headers
        raw = [(name.encode(), value.format(number=self.number).encode()) for name, value in headers.items()]
        path, _, query = kind.path.partition("?")
        scope = {"type": "http", "method": kind.method, "path": path, "headers": raw, "query_string": query.encode()}
        parts = [{"type": "http.request", "body": part, "more_body": part != body} for part in (body, body[:0])]

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0)
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                self.status, self.content = message["status"], b""
            else:
                self.content += message["body"]

        return self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(
    kind: Kind, folder: Path, digests: Sequence[bytes] = (), fleet: type[InstantFleet] = InstantFleet
) -> AsyncIterator[tuple[Service, Requests]]:
    """A service over instant engines."""
    fleet = type("Embedding", (InstantFleet,), {"known": EMBEDDER}) if kind.embeds else fleet
    journal = Journal(folder / "journal") if kind.keeps else None
    service = Service(fleet=fleet, chat_template="{{ messages[0].content }}", journal=journal)
    await service.start(SPEC)
    try:
        yield service, Requests(new_app(service, "test", digests), kind)
    finally:
        await service.stop()


async def settle(service: Service) -> None:
    """Wait until nothing runs, then fail if any slot is held."""
    async with asyncio.timeout(5):
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        await asyncio.sleep(0)  # callbacks of the last task
    limiter = service.limiter
    held = (limiter.num_open, limiter.num_queued, limiter.num_waiting)
    assert held == (0, 0, 0), held
    assert not service.bodies.num_bytes and not service.bodies._arriving and not service.bodies._owners
    assert not (service.open or service._slots or service.deadlines._timers or service.jobs._live)


@pytest.fixture(autouse=True)
def quick_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refusal(self: GrammarCheck, *_arguments: Any) -> str:
        await asyncio.sleep(0)
        return ""

    monkeypatch.setattr(GrammarCheck, "_refusal", refusal)


async def reached(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[Any], None], where: str
) -> bool:
    """Send a request and ``act`` where it waits for the ``at``-th time; return whether it came that far.

    Args:
        where: "request": points of the whole of it; "making": points of the task that makes its response; "deaf":
            those of the whole, and that task ignores that it is canceled.
    """
    stepped: list[Stepped] = []

    async def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
        stepped.append(Stepped(coroutine, at, act))
        return await stepped[0]

    async def watched(request: Any, making: Coroutine[Any, Any, Any]) -> Any:
        return await unless_left(request, {"request": pass_on, "making": finish, "deaf": deaf}[where](making))

    monkeypatch.setattr(app_module, "unless_left", watched)
    requested = requests.ask()
    await asyncio.gather(
        asyncio.create_task(requested if where == "making" else finish(requested)), return_exceptions=True
    )
    return stepped[0].count >= at


async def pass_on(making: Coroutine[Any, Any, Any]) -> Any:
    return await making


@pytest.mark.parametrize("name", KINDS)
async def test_slots_are_released_wherever_a_request_ends(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is canceled, canceled in the turn in which its awaited result arrives, or its client disconnects."""

    async with serving(KINDS[name], tmp_path) as (service, requests):
        await requests.ask()
        assert requests.status == 200, requests.content

        def leave(_waited: Any) -> None:
            requests.left.set()

        ways = [(act, where) for act in (cancel_now, cancel_with_result) for where in ("request", "making")]
        for act, where in [*ways, (leave, "request"), (leave, "deaf")]:
            for at in itertools.count(1):
                goes_on = await reached(requests, monkeypatch, at, act, where)
                await settle(service)
                if not goes_on:
                    break


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "grammar"])  # importlib.metadata leaves some behind
@pytest.mark.parametrize("other", [{}, {"model": "other", "messages": 5, "payload": "x"}], ids=["answered", "refused"])
def test_requests_leave_no_reference_cycles(name: str, other: dict[str, Any], tmp_path: Path) -> None:
    """Cycles would keep bodies of megabytes until the garbage collector runs."""

    async def scenario() -> None:
        async with serving(KINDS[name], tmp_path) as (service, requests):
            for collects in (False, True):
                for _ in range(3):
                    await requests.ask(KINDS[name].body | other)
                    assert (requests.status == 200) != bool(other)
                    await settle(service)
                # The first ones leave what is made once. All else that lives in this process is not looked through.
                assert not gc.collect(1) or not collects

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ({f"{number:064}": "x" * 512 for number in range(16)}, 200),
        ({str(number): "" for number in range(17)}, 400),
        ({"x" * 65: ""}, 400),
        ({"x": "x" * 513}, 400),
    ],
)
async def test_metadata_of_a_response_is_bounded(metadata: dict[str, str], status: int, tmp_path: Path) -> None:
    async with serving(KINDS["response"], tmp_path) as (_, requests):
        await requests.ask({"input": "x", "metadata": metadata})
        assert requests.status == status and (status == 200 or b"metadata" in requests.content)


async def test_kept_response_size_counts_all_it_keeps(tmp_path: Path) -> None:
    """Including input that the chat template leaves out of the prompt."""
    large = {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": "y" * 300_000}]}

    async with serving(KINDS["response"], tmp_path) as (service, requests):
        await requests.ask(large)
        names = [json.loads(requests.content)["id"]]
        await requests.ask({"input": "x", "previous_response_id": names[0]})
        names.append(json.loads(requests.content)["id"])
        first, second = (service.responses.find("", name) for name in names)
        assert first.num_bytes > 300_000 and second.num_bytes > 300_000


async def test_answer_finished_before_its_request_is_journaled_is_kept(tmp_path: Path) -> None:
    kind = Kind("/v1/completions", {"prompt": [5], "pad": "x" * 200_000}, {"idempotency-key": "a"}, keeps=True)

    async with serving(kind, tmp_path) as (service, requests):
        actual = set()
        for _ in range(3):
            await requests.ask()
            await settle(service)
            actual.add(requests.content)
        assert len(actual) == 1 and next(service._numbers) == 1  # one answer was drawn


class SilentFleet(InstantFleet):
    """Draws nothing."""

    def _later(self, work: Callable[[Any], None], answer: Any) -> None:
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_leaving_reader_is_removed_from_shared_answer(path: str, stream: bool, tmp_path: Path) -> None:
    """Immediately, or readers would accumulate until the answer ends."""
    kind = next(item for item in KINDS.values() if item.path == path)
    kind = replace(kind, body=kind.body | {"stream": stream}, headers={"idempotency-key": "a"}, keeps=True)

    async def leave(service: Service, requests: Requests) -> None:
        reading = asyncio.create_task(requests.ask())
        while not service.open or (not reading.done() and len(asyncio.all_tasks()) < 3):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert not reading.done()
        requests.left.set()
        await reading

    async def scenario() -> None:
        async with asyncio.timeout(10), serving(kind, tmp_path, fleet=SilentFleet) as (service, requests):
            await leave(service, requests)
            (answer,) = service.open.values()
            again = f"{path}/{answer.name}?stream=true" if "responses" in path else f"/v1/streams/{answer.name}"
            for item in (kind, Kind(again, {}, method="GET")):
                await leave(service, Requests(requests._app, item))
            assert answer.request_id in service.open and len(answer.signal._readers) <= 2  # what writes and records it

    asyncio.run(scenario())
