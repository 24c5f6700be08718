"""Requests become parameters and tokens become chunks, without a server."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer, AnswerSignal
from detcompile.serving.engines.protocol import Delta, SampleDelta, Statistics, Token
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.metrics import Metrics
from detcompile.serving.openai.chat import ChatReply
from detcompile.serving.openai.completions import CompletionReply
from detcompile.serving.openai.parameters import chat_params, completion_params
from detcompile.serving.openai.schema import ChatRequest, CompletionRequest, Message, StreamOptions
from detcompile.serving.tokenizer_pool import TokenizerPool
from tests.serving.scripted_engine import HELLO


async def no_receipt(job: Job) -> None:
    return None


SERVICE: Any = SimpleNamespace(texts=TokenizerPool(HELLO), issue=no_receipt)
MODEL = ServedModel("scripted", HELLO.fingerprint, {})
DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_tokens": 10}
MESSAGES = [Message(role="user", content="x")]


def job_of(length: int, *, kept: bool = False, **params: Any) -> Job:
    """Return a job of ``n`` samples that has started."""
    requested = SamplingParams(seed=1, max_tokens=length, **params)
    answer = Answer("1", [5], requested, AnswerSignal())
    return Job(Ask([[5]], requested, 0, "cmpl-"), [answer], None, MODEL, kept)


def json_of(raw: Any) -> Any:
    """A choice of an answer in one piece, which is JSON already."""
    return json.loads(bytes(raw))


async def draw(answer: Answer, ids: list[int]) -> None:
    for place, token in enumerate(ids, 1):
        ended = place == len(ids)
        samples = [
            SampleDelta(index, [token], [Token(token, -0.5, [])], "length" if ended else None, None)
            for index in range(answer.params.n)
        ]
        answer.extend(Delta("1", samples, ended, None, None, 0, None))
        answer.signal.notify()
        await asyncio.sleep(0.001)


def test_missing_fields_get_defaults() -> None:
    requested = CompletionRequest(prompt="x"), ChatRequest(messages=MESSAGES)
    for params in (completion_params(requested[0], DEFAULTS), chat_params(requested[1], DEFAULTS)):
        assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 10)
    params = completion_params(CompletionRequest(prompt="x", temperature=0.0, top_k=0, max_tokens=7), DEFAULTS)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 0, 7)
    assert completion_params(CompletionRequest(prompt="x"), {}).max_tokens == 16
    assert chat_params(ChatRequest(messages=MESSAGES), {}).max_tokens is None
    with pytest.raises(HTTPError, match="min_tokens 12"):
        completion_params(CompletionRequest(prompt="x", max_tokens=20, min_tokens=12), DEFAULTS)


@pytest.mark.parametrize("stop", [None, [], "a", ["a", "b"]])
def test_stop_strings_in_every_form(stop: Any) -> None:
    params = completion_params(CompletionRequest(prompt="x", stop=stop), {})
    assert list(params.stop) == ([stop] if isinstance(stop, str) else stop or [])


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
@pytest.mark.parametrize("with_ids", [True, False])
def test_token_ids_of_incomplete_text_are_kept(kind: type, with_ids: bool) -> None:
    """A character may take several tokens. The first have no text but must be in some chunk."""
    ids = SERVICE.texts._encode("x東京🎉y", False)
    assert len(ids) > 5

    async def chunks() -> list[dict]:
        job = job_of(len(ids))
        drawing, actual = asyncio.create_task(draw(job.answers[0], ids)), b""
        async for data in kind(SERVICE, job, with_ids=with_ids).events():
            actual += data
        await drawing
        return [json.loads(line.removeprefix("data: ")) for line in actual.decode().split("\n\n") if line]

    choices = [choice for chunk in asyncio.run(chunks()) for choice in chunk["choices"]]
    texts_of = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    assert "".join(texts_of) == "x東京🎉y" and len(choices) > 2
    shown = [token for choice in choices for token in choice.get("token_ids", [])]
    assert shown == (ids if with_ids else [])


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
def test_prompt_tokens_are_placed_as_in_vllm(kind: type) -> None:
    """For a chat beside the choices, once per stream. For a completion, which may have many prompts, in each choice."""

    async def summary() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        job = job_of(3, n=2)
        await draw(job.answers[0], [40, 41, 42])
        whole = json.loads(json.dumps(await kind(SERVICE, job, with_ids=True).whole(), default=json_of))
        actual = b"".join([data async for data in kind(SERVICE, job, with_ids=True).events()])
        return whole, [json.loads(line.removeprefix("data: ")) for line in actual.decode().split("\n\n") if line]

    whole, chunks = asyncio.run(summary())
    beside = [chunk["prompt_token_ids"] for chunk in (whole, *chunks) if "prompt_token_ids" in chunk]
    inside = [choice["prompt_token_ids"] for chunk in (whole, *chunks) for choice in chunk["choices"]
              if "prompt_token_ids" in choice]  # fmt: skip
    assert (beside, inside) == (([[5]] * 2, []) if kind is ChatReply else ([], [[5]] * 4))
    assert kind is not ChatReply or "prompt_token_ids" in chunks[0]


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
@pytest.mark.parametrize("stop", [[], ["🎉y"]])
def test_lost_stream_resumes_after_any_event(kind: type, stop: list[str]) -> None:
    """Whether the rest comes token by token or in one event."""
    ids = SERVICE.texts._encode("x東京🎉 and y東", False)
    options = {"with_ids": True, "stream_options": StreamOptions(include_usage=True)}

    async def read(job: Job, last_event: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        actual = b""
        async for data in kind(SERVICE, job, last_event=last_event, **options).events():
            actual += data
        events = [text.split("\ndata: ") for text in actual.decode().split("\n\n") if text]
        return [(name.removeprefix("id: "), json.loads(data)) for name, data in events]

    def summary(events: list[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Text, tokens, logprobs and the end of each choice, and the usage, as often as it comes."""
        actual: dict[int, list[Any]] = {}
        for _, chunk in events:
            for choice in chunk["choices"]:
                item = actual.setdefault(choice["index"], ["", [], [], None])
                item[0] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                item[1] += choice.get("token_ids", [])
                item[2] += (choice.get("logprobs") or {}).get("tokens") or []
                item[3] = choice["finish_reason"]
        return [actual, [chunk["usage"] for _, chunk in events if chunk["usage"]]]

    async def scenario() -> None:
        job = job_of(len(ids), kept=True, n=2, stop=stop, logprobs=0)
        drawing = asyncio.create_task(draw(job.answers[0], ids))
        events = await read(job)
        await drawing
        names = [name for name, _ in events]
        assert len(set(names)) >= len(names) - 2 > 10, "each event has an id of its own, but the openings"
        for place in range(len(events)):
            again = job_of(len(ids), kept=True, n=2, stop=stop, logprobs=0)
            again.name, again.begun_before = job.name, True
            for other in (job, again):
                drawing = asyncio.create_task(draw(again.answers[0], ids)) if other is again else drawing
                rest = await read(other, names[place])
                await drawing
                assert summary([*events[: place + 1], *rest]) == summary(events), names[place]

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
@pytest.mark.parametrize("hidden", [False, True])
def test_each_chunk_counts_the_tokens_so_far(kind: type, hidden: bool) -> None:
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)

    async def usages(last_event: str | None = None) -> list[tuple[str, dict[str, int]]]:
        job = job_of(3, kept=True, n=2)
        job.name, job.begun_before = "one-name", last_event is not None
        reply = kind(SERVICE, job, stream_options=options, hidden=hidden, last_event=last_event)
        drawing = asyncio.create_task(draw(job.answers[0], [40, 41, 42]))
        events = b"".join([data async for data in reply.events()]).decode().split("\n\n")
        await drawing
        names = [text.partition("\n")[0].removeprefix("id: ") for text in events if text]
        return list(zip(names, [json.loads(text.partition("data: ")[2])["usage"] for text in events if text]))

    counted = asyncio.run(usages())
    numbers = [usage["completion_tokens"] for _, usage in counted]
    assert numbers == sorted(numbers) and numbers[-1] == (0 if hidden else 6)
    assert hidden or len(set(numbers)) > 2
    assert all(usage["total_tokens"] == usage["completion_tokens"] + 1 for _, usage in counted)
    name, _ = counted[len(counted) // 2]
    assert asyncio.run(usages(name))[-1] == counted[-1]


@pytest.mark.parametrize("text", ["", "x", "cmpl-other:1", "{}:1,2", "{}:1*+", "{}:-1", "{}:1\n", "{}:1+1", "{}:3*+1"])
def test_unknown_event_id_is_refused(text: str) -> None:
    job = job_of(3, kept=True)
    with pytest.raises(HTTPError, match="is not an event"):
        CompletionReply(SERVICE, job, last_event=text.format(job.name))


@pytest.mark.parametrize("begun_before", [False, True])
@pytest.mark.parametrize("place", ["4,3*", "3*,4*", "3*,99", "2*,3*", "0*,0", "3*,3*+2"])
async def test_event_id_past_the_answer_is_refused(place: str, begun_before: bool) -> None:
    """Immediately; or, when tokens are computed again after a restart, once the choice has ended."""

    async def read(job: Job) -> bytes:
        options = {"last_event": f"{job.name}:{place}", "stream_options": StreamOptions(include_usage=True)}
        return b"".join([data async for data in CompletionReply(SERVICE, job, **options).events()])

    job = job_of(3, kept=True, n=2)
    job.begun_before = begun_before
    reading = asyncio.create_task(read(job))
    if begun_before:
        await draw(job.answers[0], [40, 41, 42])
    with pytest.raises(HTTPError, match=rf"Last-Event-ID '{job.name}:.*' is not an event") as actual:
        await reading
    assert actual.value.content["error"]["message"].startswith(f"Last-Event-ID '{job.name}:{place}'")
    if begun_before:
        with pytest.raises(HTTPError, match="is not an event"):
            await read(job)  # it has ended


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
@pytest.mark.parametrize(("length", "in_threads"), [(2, False), (100, True)])
async def test_many_logprobs_are_written_in_threads(
    kind: type, length: int, in_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()

    def name_of(token: int) -> str:
        threads.add(threading.current_thread())
        return str(token)

    monkeypatch.setattr(SERVICE.texts, "name_of", name_of)
    job = job_of(length, logprobs=20, prompt_logprobs=20)
    top = [(token, -1.0) for token in range(20)]
    logprobs = [Token(40, -0.5, top)] * length
    sample = SampleDelta(0, [40] * length, logprobs, None, None)
    job.answers[0].extend(Delta("1", [sample], False, logprobs, None, 0, None))
    stream = kind(SERVICE, job, with_prompt_logprobs=True).events()
    await anext(stream)  # of an answer that has not ended
    job.answers[0].extend(Delta("1", [SampleDelta(0, [], [], "length", None)], True, None, None, 0, None))
    await kind(SERVICE, job, with_prompt_logprobs=True).whole()
    assert (threading.main_thread() not in threads) == in_threads and threads


def test_prefill_rate_counts_only_step_time() -> None:
    fleet: Any = SimpleNamespace(statistics=Statistics(), hello=None)
    metrics = Metrics(fleet, 1, 1)
    assert metrics.prefill_rate() == 1000.0
    fleet.statistics = Statistics(num_prefill_tokens=5000, busy_seconds=2.0)
    assert metrics.prefill_rate() == 2500.0
