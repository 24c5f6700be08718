"""Requests with a key are answered once, for any client and any server with the journal."""

import asyncio
import collections
import contextlib
import hashlib
import json
import os
import random
import sqlite3
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from detcompile.errors import DetcompileError, InvalidInput, StorageError
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer, AnswerSample, AnswerSignal
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.job import Ask, Job, ServedModel
from detcompile.serving.journal.journal import Journal, JournalFull
from detcompile.serving.journal.records import Record, ask_of, outcome_of, record_of, restore
from tests.serving.scripted_service import running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")
BODY = {"prompt": [5, 6], "max_tokens": 60, "return_token_ids": True, "logprobs": None}
WHOLE = list(range(40, 100))
MODEL = ServedModel("tiny", "fingerprint", {"weights": "w", "tokenizer": "t"})
PARAMS = SamplingParams(
    n=2, seed=7, logit_bias={5: 2.0}, stop=["x"], logprobs=1, grammar=Grammar.regex("[a-z]+"), allowed_token_ids=[1, 2]
)


def record(name: str, key: str, *, created: int = 1000, body: bytes = b"{}", owner: str = "") -> Record:
    ask = Ask([[1, 2]], PARAMS, 3, "cmpl-", "template")
    return record_of(job_of(ask, [], name=name, created=created), (owner, key), ("/v1/completions", body))


def job_of(ask: Ask, answers: list[Answer], **named: Any) -> Job:
    return Job(ask, answers, b"salt", MODEL, kept=True, **named)


def opened(path: Path, *options: Any, now: int = 1000, **named: Any) -> Journal:
    """Return a journal with a fixed clock."""
    return Journal(path, *options, **named, clock=lambda: now)


def answered(ask: Ask) -> list[Answer]:
    answers = [Answer("", prompt, ask.params, AnswerSignal()) for prompt in ask.prompts]
    for sample in answers[0].samples:
        sample.token_ids = array("i", [4, 5])
        sample.logprobs = [Token(4, -1.5, [(4, -1.5)]), Token(5, float("-inf"), [])]
        sample.finish_reason, sample.stop_reason = "stop", "x"
    answers[0].prompt_logprobs = [None, Token(2, -0.1, [])]
    answers[0].num_cached_tokens, answers[0].finished = 1, True
    return answers


def slots(sample: AnswerSample) -> list[Any]:
    return [getattr(sample, name) for name in AnswerSample.__slots__]


def test_journal_roundtrip(tmp_path: Path) -> None:
    path, new = tmp_path / "journal", record("cmpl-1", "key", owner="me")
    journal = opened(path)
    assert path.stat().st_mode & 0o777 == 0o600
    journal.add(new)
    assert (tmp_path / "journal-wal").stat().st_mode & 0o777 == 0o600
    actual = journal.find("me", key="key")
    assert (
        actual is not None and actual == journal.find("me", name="cmpl-1") and ask_of(actual.work) == ask_of(new.work)
    )
    assert (actual.name, actual.body, actual.created, actual.work.salt) == ("cmpl-1", b"{}", 1000, b"salt")
    assert journal.find("", key="key") is journal.find("you", name="cmpl-1") is journal.find("me", key="k") is None
    assert actual.work.model == MODEL
    ask = ask_of(new.work)
    assert ask == Ask([[1, 2]], PARAMS, 3, "cmpl-", "template")
    job = job_of(ask, answered(ask), name="cmpl-1", created=1000)
    journal.finish("cmpl-1", outcome_of(job))
    journal.close()
    actual = opened(path).find("me", key="key")
    assert actual is not None and actual.outcome == outcome_of(job)
    again = [Answer("", prompt, ask.params, AnswerSignal()) for prompt in ask.prompts]
    restore(again, actual.outcome)
    for name in ("samples", "prompt_logprobs", "num_cached_tokens", "finished", "error"):
        ours, theirs = getattr(again[0], name), getattr(job.answers[0], name)
        assert (
            ours == theirs if name != "samples" else [slots(item) for item in ours] == [slots(item) for item in theirs]
        )


def test_key_maps_to_one_request(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    journal.add(record("cmpl-1", "key"))
    journal.add(record("cmpl-2", "key", owner="you"))
    with pytest.raises(DetcompileError):
        journal.add(record("cmpl-3", "key"))
    journal.drop("cmpl-1")
    journal.add(record("cmpl-3", "key"))
    assert journal.find("", key="key").name == "cmpl-3" and journal.find("you", key="key").name == "cmpl-2"


def test_expired_records_are_dropped(tmp_path: Path) -> None:
    """A record expires after its lifetime, even without any later request."""
    path, now = tmp_path / "journal", [1000]
    journal = Journal(path, seconds=100, clock=lambda: now[0])
    journal.add(record("cmpl-1", "1", created=1000))
    journal.add(record("cmpl-2", "2", created=1050))
    now[0] = 1100
    assert journal.find("", key="1") is not None
    now[0] = 1101
    assert journal.find("", key="1") is journal.find("", name="cmpl-1") is None
    journal.add(record("cmpl-3", "1", created=1101, body=b"another one"))  # the key is free again
    actual = journal.find("", key="1")
    assert actual is not None and actual.name == "cmpl-3"
    assert [journal.find("", key=key) is not None for key in "12"] == [True, True]
    journal.close()
    with opened(path, seconds=100, now=1151)._file as file:  # nobody has asked for it
        assert [name for (name,) in file.execute("SELECT name FROM requests")] == ["cmpl-3"]


def test_file_is_bounded_and_keeps_open_requests(tmp_path: Path) -> None:
    path, most = tmp_path / "journal", 4 << 20
    journal, body = opened(path, most), bytes(1 << 18)
    for number in range(100):
        journal.add(record(f"cmpl-{number}", f"{number}", body=body, created=1000 + number))
        if number:  # the first one stays open
            ask = ask_of(record("", "").work)
            journal.finish(f"cmpl-{number}", outcome_of(job_of(ask, answered(ask))))
        assert path.stat().st_size < most + 2 * len(body) and journal.num_bytes < most + 2 * len(body)
    assert journal.find("", key="0") is not None and journal.find("", key="99") is not None
    assert journal.find("", key="1") is None
    with pytest.raises(JournalFull, match="open requests fill it"):
        for number in range(100, 200):
            journal.add(record(f"cmpl-{number}", f"{number}", body=body, created=1000 + number))
    assert journal.find("", key="0") is not None and journal.find("", key="100") is not None


def test_dropped_texts_are_not_left_in_the_file(tmp_path: Path) -> None:
    journal, secret = opened(tmp_path / "journal"), b"do not keep this" * 400
    journal.add(record("cmpl-1", "1", body=secret))
    journal.drop("cmpl-1")
    journal.close()
    assert secret[:16] not in (tmp_path / "journal").read_bytes() and not (tmp_path / "journal-wal").exists()


@pytest.mark.parametrize("kind", ["text", "torn", "other database", "another version"])
def test_other_file_is_refused_unchanged(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal"
    if kind == "text":
        path.write_text("a letter\n" * 1000)
    elif kind == "other database":
        with contextlib.closing(sqlite3.connect(path)) as file:
            file.execute("CREATE TABLE letters (text TEXT)")
    else:
        journal = opened(path)
        for number in range(200):
            journal.add(record(f"cmpl-{number}", f"{number}", body=bytes(5000)))
        journal.close()
        if kind == "torn":
            data = bytearray(path.read_bytes())
            data[len(data) // 3 : len(data) // 3 + 8192] = bytes(8192)
            path.write_bytes(data)
        else:
            with contextlib.closing(sqlite3.connect(path)) as file:
                file.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    message = "give another file" if kind in ("other database", "another version") else "move it away"
    with pytest.raises((StorageError, InvalidInput), match=message) as actual:
        Journal(path)
    assert str(path) in str(actual.value)
    after = path.read_bytes()
    assert after[100:] == before[100:], "but for SQLite's own header"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_non_file_is_refused_unchanged(tmp_path: Path, kind: str) -> None:
    """A server run by root would otherwise replace /dev/null for everyone."""
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path, 0o644)
    elif kind == "folder":
        path.mkdir(0o755)
    else:
        terminal, named = os.openpty()
        path.symlink_to(os.ttyname(named))
    before = path.stat()
    with pytest.raises((InvalidInput, StorageError), match=f"--journal {path}"):
        Journal(path)
    assert path.stat().st_mode == before.st_mode
    if kind == "device":
        os.close(terminal)
        os.close(named)


def test_a_journal_has_one_server(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(InvalidInput, match="another server uses it"):
        Journal(tmp_path / "journal")
    journal.close()
    Journal(tmp_path / "journal").close()
    with pytest.raises(StorageError, match="No such file"):
        Journal(tmp_path / "no folder" / "journal")


def test_a_flipped_bit_is_reported(tmp_path: Path) -> None:
    """For any bit, each record read equals the one written, or reading it raises."""
    path, ask = tmp_path / "journal", ask_of(record("", "").work)
    journal = opened(path)
    for number in range(6):
        journal.add(record(f"cmpl-{number}", f"{number}", owner="me", body=b'{"prompt": "abc"}'))
        if number:
            journal.finish(f"cmpl-{number}", outcome_of(job_of(ask, answered(ask))))
    journal.close()
    whole, places = path.read_bytes(), [{"key": str(number)} for number in range(6)] + [{"name": "cmpl-3"}]
    written = read(path, places)
    drawn, seen = random.Random(7), collections.Counter[str]()
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[drawn.randrange(len(whole))] ^= 1 << drawn.randrange(8)
        path.write_bytes(damaged)
        seen.update(read(path, places, written))
    needed = {"equal", "DamagedRecord", "refused"}
    assert needed <= set(seen) <= needed | {"StorageError"}, seen


def read(path: Path, places: list[dict[str, str]], expected: list[Record] | None = None) -> list[Any]:
    """Return a journal's records; with ``expected``, whether each is equal, or the exception that was raised."""
    try:
        journal = opened(path)
    except (StorageError, InvalidInput):
        return ["refused"]
    with contextlib.closing(journal):
        if expected is None:
            return [journal.find("me", **place) for place in places]
        seen = []
        for place, item in zip(places, expected, strict=True):
            try:
                seen.append("equal" if journal.find("me", **place) == item else "another")
            except StorageError as error:
                seen.append(type(error).__name__)
        return seen


@contextlib.asynccontextmanager
async def keeping(path: Path, keys: tuple[str, ...] = (), **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A service with a journal, and a client of it."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    service = scripted(journal=Journal(path), **options)
    async with running(service, digests) as client:
        yield service, client


async def ask(client: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY | fields, headers={"Idempotency-Key": key})


async def until_drawn(service: Any, count: int, num_tokens: int) -> None:
    while sum(not item.finished and item.num_tokens >= num_tokens for item in service.open.values()) < count:
        await asyncio.sleep(0.01)


def streamed_tokens(response: httpx.Response) -> list[int]:
    """The tokens of a stream of one choice."""
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [token for data in events for choice in json.loads(data)["choices"] for token in choice["token_ids"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_with_a_key_is_answered_once(tmp_path: Path, stream: bool) -> None:
    async with keeping(tmp_path / "journal") as (service, client):
        first, second = await asyncio.gather(*(ask(client, "a", stream=stream) for _ in range(2)))
        third = await ask(client, "a", stream=stream)  # it has ended
        assert next(service._numbers) == 1  # one answer was made
    async with keeping(tmp_path / "journal") as (_, client):
        fourth = await ask(client, "a", stream=stream)
        another = await ask(client, "b", stream=stream)
    actual = [first, second, third, fourth]
    assert {response.status_code for response in actual} == {200}
    assert len({response.headers["x-request-id"] for response in actual}) == 1
    assert len({response.headers["x-detcompile-seed"] for response in actual}) == 1
    assert another.headers["x-request-id"] != first.headers["x-request-id"]
    if stream:
        assert all(streamed_tokens(response) == WHOLE for response in actual)
    else:
        assert len({response.content for response in actual}) == 1
        assert first.json()["choices"][0]["token_ids"] == WHOLE


async def test_lost_stream_can_be_resumed(tmp_path: Path) -> None:
    """By the key or the answer's id: while it runs, after a server restart, and after it has ended."""

    async with keeping(tmp_path / "journal") as (service, client):
        lost = asyncio.create_task(ask(client, "a", stream=True))
        await until_drawn(service, 1, 5)
        (name,) = [job.name for _, task in service.jobs._live.values() for job in [task.result()]]
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert len(service.open) == 1  # it goes on
        for place in ("60", "5*"):  # nobody was sent that yet
            wrong = await client.get(f"/v1/streams/{name}", headers={"Last-Event-ID": f"{name}:{place}"})
            assert wrong.status_code == 400 and len(service.open) == 1
        headers = {"Last-Event-ID": f"{name}:5", "Idempotency-Key": "a"}
        rest = await client.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)
        assert streamed_tokens(rest) == WHOLE[5:]
        ended = asyncio.create_task(ask(client, "b", stream=True))
        await until_drawn(service, 1, 5)
    assert "error" in (await ended).text  # the server has ended in the midst of it
    async with keeping(tmp_path / "journal") as (_, client):
        other = (await ask(client, "b", stream=True)).headers["x-request-id"]
        for item in (name, other):
            assert streamed_tokens(await client.get(f"/v1/streams/{item}")) == WHOLE
            for place in ("7", "60", "60*"):
                actual = await client.get(f"/v1/streams/{item}", headers={"Last-Event-ID": f"{item}:{place}"})
                assert actual.status_code == 200 and streamed_tokens(actual) == WHOLE[int(place.split("*")[0]) :]
            for place in ("x:7", f"{item}:61", f"{item}:99*", f"{item}:7*", f"{item}:7+1", f"{item}:60*+1"):
                wrong = await client.get(f"/v1/streams/{item}", headers={"Last-Event-ID": place})
                assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "Last-Event-ID"
        assert (await client.get("/v1/streams/cmpl-none")).status_code == 404


async def test_a_message_with_a_key_is_answered_once(tmp_path: Path) -> None:
    """Its stream has no event ids, so a returning client reads it from the start."""
    requested = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    options = {"chat_template": "{{ messages[0].content }}"}

    async def send(client: httpx.AsyncClient, key: str, **fields: Any) -> httpx.Response:
        return await client.post("/v1/messages", json=requested | fields, headers={"Idempotency-Key": key})

    async with keeping(tmp_path / "journal", **options) as (service, client):
        first, second = await asyncio.gather(send(client, "a"), send(client, "a"))
        stream = await send(client, "b", stream=True)
        assert next(service._numbers) == 2
    async with keeping(tmp_path / "journal", **options) as (_, client):
        third = await send(client, "a")
        again = await client.get(f"/v1/streams/{stream.headers['x-request-id']}", headers={"Last-Event-ID": "x"})
    assert first.status_code == 200 and first.json()["id"].startswith("msg_")
    assert first.content == second.content == third.content
    texts = [[json.loads(line[6:]) for line in item.text.splitlines() if line.startswith("data: ")]
             for item in (stream, again)]  # fmt: skip
    message = ["".join(event["delta"]["text"] for event in item if "delta" in event and "text" in event["delta"])
            for item in texts]  # fmt: skip
    assert texts[0][0] == texts[1][0] and message[0] == message[1] == first.json()["content"][0]["text"] != ""


async def test_a_key_of_another_request_is_refused(tmp_path: Path) -> None:
    for _ in range(2):  # while it runs, and once it is in the journal
        async with keeping(tmp_path / "journal") as (_, client):
            running_one = asyncio.create_task(ask(client, "a"))
            await asyncio.sleep(0.1)
            chat = {"messages": [{"role": "user", "content": "x"}]}
            for path, body in (("/v1/completions", BODY | {"seed": 1}), ("/v1/chat/completions", chat)):
                wrong = await client.post(path, json=body, headers={"Idempotency-Key": "a"})
                assert wrong.status_code == 422, wrong.text
                assert wrong.json()["error"]["code"] == "idempotency_key_reused"
            assert (await running_one).status_code == 200
            for key in ("", "x" * 256, "a\tb"):
                assert (await ask(client, key)).status_code == 400


async def test_requests_belong_to_their_api_key(tmp_path: Path) -> None:
    async with keeping(tmp_path / "journal", ("mine", "yours")) as (_, client):
        names = []
        for key in ("mine", "yours"):
            client.headers["Authorization"] = f"Bearer {key}"
            names.append((await ask(client, "a")).headers["x-request-id"])
        assert names[0] != names[1]
        assert (await client.get(f"/v1/streams/{names[1]}")).status_code == 200
        assert (await client.get(f"/v1/streams/{names[0]}")).status_code == 404
        client.headers.pop("Authorization")
        assert (await client.get(f"/v1/streams/{names[0]}")).status_code == 401


async def test_refused_requests_are_not_journaled(tmp_path: Path) -> None:
    async with keeping(tmp_path / "journal", max_queue=1) as (service, client):
        first = asyncio.create_task(ask(client, "a"))
        await until_drawn(service, 1, 1)
        assert (await ask(client, "b")).status_code == 429
        assert (await ask(client, "c", n=2)).status_code == 400
        assert (await first).status_code == 200
        for key in ("b", "c"):
            actual = await ask(client, key)
            assert actual.status_code == 200 and actual.json()["choices"][0]["token_ids"] == WHOLE


async def test_last_event_id_requires_a_key(tmp_path: Path) -> None:
    async with keeping(tmp_path / "journal") as (service, client):
        for place in ("cmpl-1:7", "nonsense"):
            headers = {"Last-Event-ID": place}
            actual = await client.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)
            assert streamed_tokens(actual) == WHOLE and not service.open


async def test_unwritable_journal_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(tmp_path / "journal") as (service, client):
        for error, code in ((StorageError("disk"), "journal_error"), (JournalFull("full"), "journal_full")):

            def fails(self: Any, record: Any, error: Exception = error) -> None:
                raise error

            monkeypatch.setattr(Journal, "add", fails)
            refused = await ask(client, "a")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == code
            assert "retry-after" in refused.headers and not service.open
        plain = await client.post("/v1/completions", json=BODY)
        assert plain.json()["choices"][0]["token_ids"] == WHOLE  # requests without a key need no journal
