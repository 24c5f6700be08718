"""A record is served as it was written, whichever model and receipts the server has now."""

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from detcompile.serving.journal.job import ServedModel
from detcompile.serving.journal.records import Record, Work, differing
from detcompile.serving.receipts.issuer import Issuer
from detcompile.serving.receipts.keys import write_key_pair
from detcompile.serving.receipts.log import ReceiptLog
from tests.serving.test_journal import keeping, until_drawn

pytestmark = pytest.mark.usefixtures("in_the_root")
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "seed": 5}
TOOL = {"name": "f", "parameters": {"type": "object"}}
CALL = 'so <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEMPLATE = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
PLAIN = "{{ messages[0].content }}"
MISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}{{ messages[0].content }}"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": [5, 6], "n": 2, "logprobs": 1, "echo": True, "seed": 5}),
    "chat": ("/v1/chat/completions", CHAT | {"logprobs": True}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": TOOL}]}),
    "message": ("/v1/messages", CHAT),
    "response": ("/v1/responses", {"input": "x", "max_output_tokens": 9, "seed": 5}),
    "response with tools": ("/v1/responses", {"input": "x", "seed": 5, "tools": [TOOL | {"type": "function"}]}),
}


async def answers(client: httpx.AsyncClient, **fields: Any) -> dict[str, httpx.Response]:
    actual = {}
    for name, (path, body) in REQUESTS.items():
        sent = body if path == "/v1/responses" else body | fields
        actual[name] = await client.post(path, json=sent, headers={"Idempotency-Key": name})
        assert actual[name].status_code in (200, 409), actual[name].text
    return actual


@pytest.mark.parametrize("level", ["off", "hashes", "tokens"])
async def test_record_is_served_unchanged_by_another_model(
    level: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the first server's fingerprint and name, with its receipt or none, and nothing is signed or logged.

    Also where the server's chat template writes calls in another way, takes no tools, or there is none.
    """
    model, path = tmp_path / "model", tmp_path / "journal"
    monkeypatch.setenv("SCRIPTED_MODEL", str(model))
    monkeypatch.setenv("SCRIPTED_TEXT", CALL)
    shows = {} if level == "off" else {"receipt": True}

    model.write_text("a")
    issuer = Issuer(level)
    async with keeping(path, chat_template=TEMPLATE, name="first", receipts=issuer) as (service, client):
        first = await answers(client, **shows)
        fingerprint, made = service.hello.fingerprint, issuer
    model.write_text("b")
    log = ReceiptLog(tmp_path / "log")
    issuer = Issuer("tokens", write_key_pair(tmp_path / "key"), log)
    for template in (MISTRAL, PLAIN, None) if level == "tokens" else (MISTRAL,):
        async with keeping(path, chat_template=template, name="second", receipts=issuer) as (service, client):
            assert service.hello.fingerprint != fingerprint
            for _ in range(2):
                again = await answers(client, **shows)
                assert {name: item.content for name, item in again.items()} == {
                    name: item.content for name, item in first.items()
                }
            for name, item in again.items():
                body = item.json()
                assert body["model"] == "first" and body["system_fingerprint"] == fingerprint, name
                assert item.headers.get("x-detcompile-receipt") == first[name].headers.get("x-detcompile-receipt")
                receipt = await client.get(f"/v1/receipts/{body['id']}")
                assert receipt.status_code == (404 if level == "off" else 200)
                assert level == "off" or receipt.content == made.find("", body["id"])
            assert log.place.index == 0 and next(service._numbers) == 0, "nothing was drawn, signed or logged"
    calls = first["tools"].json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}


async def test_damaged_or_foreign_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open record depends on every part, a finished one on the parts of its reply."""
    model, path = tmp_path / "model", tmp_path / "journal"
    monkeypatch.setenv("SCRIPTED_MODEL", str(model))

    async def ask(client: httpx.AsyncClient, key: str) -> httpx.Response:
        body = {"prompt": [5, 6], "max_tokens": 900 if key == "open" else 3}
        return await client.post("/v1/completions", json=body, headers={"Idempotency-Key": key})

    async def refused(client: httpx.AsyncClient, key: str, part: str) -> None:
        answer = await ask(client, key)
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "fingerprint_changed"
        assert answer.headers["x-should-retry"] == "false" and f"differ in {part}." in answer.json()["error"]["message"]

    model.write_text("a")
    async with keeping(path) as (service, client):
        for key in ("ended", "damaged"):
            assert (await ask(client, key)).status_code == 200
        begun = asyncio.create_task(ask(client, "open"))
        await until_drawn(service, 1, 5)
    assert (await begun).status_code == 503
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("UPDATE requests SET created = created + 1 WHERE key = 'damaged'")
        file.commit()
    model.write_text("b")
    async with keeping(path) as (service, client):
        damaged = await ask(client, "damaged")
        assert damaged.status_code == 503 and damaged.json()["error"]["code"] == "record_damaged"
        assert damaged.headers["x-should-retry"] == "false"
        await refused(client, "open", "weights")
        assert (await ask(client, "ended")).status_code == 200
        for part in ("tokenizer", "special_tokens", "max_context"):
            whole = service.model
            service.model = msgspec.structs.replace(whole, parts=whole.parts | {part: "another"})
            await refused(client, "ended", part)
            service.model = whole


def test_open_record_continues_under_same_bits_version() -> None:
    parts = {"bits_version": "exact-1", "weights": "w", "source": "a"}
    recorded, here = (ServedModel("m", "f", parts | more) for more in ({}, {"source": "b"}))
    record = Record("name", "", "key", "/v1/completions", b"", 0, Work([[1]], {}, 0, "", None, None, recorded))
    assert differing(record, here) == []
    for part in ("bits_version", "weights"):
        other = ServedModel("m", "f", here.parts | {part: "another"})
        assert part in differing(record, other)
