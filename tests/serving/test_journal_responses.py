"""Responses in a journal are read, resumed and continued on the next server."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from detcompile.serving.openai import schema
from detcompile.serving.openai.schema import decode_body
from tests.serving.test_journal import keeping, until_drawn

pytestmark = pytest.mark.usefixtures("in_the_root")
ASKED: dict[str, Any] = {"input": "a", "max_output_tokens": 40, "seed": 5}
OPTIONS = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}


async def respond(client: httpx.AsyncClient, key: str | None = None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    answer = await client.post("/v1/responses", json=ASKED | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def events(client: httpx.AsyncClient, name: str, **options: Any) -> bytes:
    answer = await client.get(f"/v1/responses/{name}", params={"stream": "true", **options})
    assert answer.status_code == 200, answer.text
    return answer.content


async def after(client: httpx.AsyncClient, name: str, number: int) -> Any:
    """Return the events after one, or the error."""
    answer = await client.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": number})
    return answer.content if answer.status_code == 200 else answer.json()["error"]


@pytest.mark.parametrize("background", [True, False])
async def test_response_continues_on_next_server(tmp_path: Path, background: bool) -> None:
    path = tmp_path / "journal"
    async with keeping(path, **OPTIONS) as (service, client):
        whole = (await respond(client)).json()
        asking = asyncio.create_task(respond(client, background=background, stream=not background))
        await until_drawn(service, 1, 10)
        ((_, name),) = service.responses._running.keys() - {("", whole["id"])}
        seen = list(service.responses.find("", name).events)
        assert len(seen) >= 10
        assert (await after(client, name, 10**6))["param"] == "starting_after"  # at once
        assert not service.responses.find("", name).ended
    await asyncio.gather(asking, return_exceptions=True)
    async with keeping(path, **OPTIONS) as (service, client):
        begun = (await client.get(f"/v1/responses/{name}")).json()
        assert begun["status"] == "in_progress" and begun["id"] == name
        waiting = asyncio.create_task(after(client, name, 10**6))
        for number in (0, 4, len(seen) - 1):
            rest = await events(client, name, starting_after=number)
            assert (await events(client, name)) == b"".join(seen[: number + 1]) + rest
        assert next(service._numbers) == 1  # once, however many ask
        known = await events(client, name)
        count = known.count(b"event: ")
        assert await after(client, name, count - 1) == b""
        for refused in (await waiting, await after(client, name, count)):
            assert refused["param"] == "starting_after" and f"the last event has {count - 1}" in refused["message"]
        actual = (await client.get(f"/v1/responses/{name}")).json()
        assert actual["output"][0]["content"] == whole["output"][0]["content"]
        assert actual["status"] == whole["status"] == "incomplete" and actual["usage"]["output_tokens"] == 40
        receipt = (await client.get(f"/v1/receipts/{name}")).json()
    async with keeping(path, **OPTIONS) as (service, client):
        assert (await client.get(f"/v1/responses/{name}")).json() == actual  # it had ended: nothing is drawn again
        assert await events(client, name) == known and next(service._numbers) == 0
        assert service.responses.find("", name)._job.issued.envelope.payload == receipt["payload"]
        again = json.loads(known.split(b"data: ")[1].split(b"\n")[0])["response"]
        assert again["created_at"] == actual["created_at"]


async def test_a_key_has_one_response(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with keeping(path, **OPTIONS) as (service, client):
        first, second = await asyncio.gather(*(respond(client, "a") for _ in range(2)))
        assert first.content == second.content and next(service._numbers) == 1
        leaving = asyncio.create_task(respond(client, "b", max_output_tokens=100))
        await until_drawn(service, 1, 3)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert len(service.open) == 1  # it goes on
        other = await client.post("/v1/responses", json=ASKED | {"seed": 6}, headers={"Idempotency-Key": "a"})
        assert other.status_code == 422
        await respond(client, "c", store=False, max_output_tokens=1)
    async with keeping(path, **OPTIONS) as (service, client):
        assert (await respond(client, "a")).content == first.content
        rest = (await respond(client, "b", max_output_tokens=100)).json()
        assert rest["usage"]["output_tokens"] == 100 and next(service._numbers) == 1  # of b alone


async def test_next_server_keeps_cancellations_and_deletions(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with keeping(path, **OPTIONS) as (service, client):
        names = {}
        for item in ("cancelled", "dropped", "left"):
            names[item] = (await respond(client, background=True)).json()["id"]
        names["not stored"] = (await respond(client, store=False)).json()["id"]
        asking = asyncio.create_task(respond(client, max_output_tokens=900))
        await until_drawn(service, 1, 3)
        names["alone"] = next(item for _, item in service.responses._running if item not in names.values())
        asking.cancel()  # nobody comes back for a response that is neither in the background nor has a key
        await asyncio.gather(asking, return_exceptions=True)
        long = (await respond(client, background=True, max_output_tokens=900)).json()["id"]
        await until_drawn(service, 1, 3)
        recording = service.responses.find("", long)
        recording.answer.samples[0].token_ids.append(41)  # drawn, and canceled before anybody has read it
        recording.cancel()
        cancelled = (await client.post(f"/v1/responses/{long}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert (await client.delete(f"/v1/responses/{names['dropped']}")).json()["deleted"]
        known = await events(client, long)
    async with keeping(path, **OPTIONS) as (service, client):
        assert (await client.get(f"/v1/responses/{long}")).json() == cancelled
        assert await events(client, long) == known
        assert (await client.get(f"/v1/responses/{names['alone']}")).json()["status"] == "cancelled"
        for item in ("dropped", "not stored"):
            assert (await client.get(f"/v1/responses/{names[item]}")).status_code == 404
        assert (await client.get(f"/v1/responses/{names['left']}")).json()["status"] == "incomplete"
        assert next(service._numbers) == 0
        assert (await client.get(f"/v1/streams/{names['left']}")).status_code == 404
        completion = await client.post("/v1/completions", json={"prompt": [5]}, headers={"Idempotency-Key": "x"})
        assert (await client.get(f"/v1/responses/{completion.json()['id']}")).status_code == 404


async def test_conversation_continues_on_next_server(tmp_path: Path) -> None:
    """Even if the previous response has expired."""

    path = tmp_path / "journal"
    async with keeping(path, **OPTIONS) as (service, client):
        first = (await respond(client)).json()["id"]
        second = (await respond(client, previous_response_id=first, background=True)).json()["id"]
        expected = (await respond(client, previous_response_id=first)).json()["usage"]["input_tokens"]
        messages = service.responses.find("", second).messages
        assert len(messages) == 3
    async with keeping(path, **OPTIONS) as (service, client):
        third = (await respond(client, previous_response_id=first)).json()
        assert third["usage"]["input_tokens"] == expected
        await client.delete(f"/v1/responses/{first}")
        assert (await client.get(f"/v1/responses/{second}")).json()["usage"]["input_tokens"] == expected
        assert service.responses.find("", second).messages == messages


async def test_responses_belong_to_their_api_key(tmp_path: Path) -> None:
    path, keys = tmp_path / "journal", ("mine", "yours")
    async with keeping(path, keys, **OPTIONS) as (_, client):
        client.headers["Authorization"] = "Bearer mine"
        name = (await respond(client)).json()["id"]
    async with keeping(path, keys, **OPTIONS) as (_, client):
        for key, status in (("yours", 404), ("mine", 200)):
            client.headers["Authorization"] = f"Bearer {key}"
            assert (await client.get(f"/v1/responses/{name}")).status_code == status


async def test_long_bodies_are_decoded_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come from the journal."""
    threads: list[threading.Thread] = []

    def decode(body: bytes, kind: type[Any]) -> Any:
        threads.append(threading.current_thread())
        return decode_body(body, kind)

    monkeypatch.setattr(schema, "decode_body", decode)
    long = {"pad": "x" * schema.SHORT_BODY}
    async with keeping(tmp_path / "journal", **OPTIONS) as (_, client):
        response = await respond(client, **long)
        body = {"prompt": [5], "max_tokens": 2} | long
        completion = await client.post("/v1/completions", json=body, headers={"Idempotency-Key": "a"})
        assert (await client.get(f"/v1/streams/{completion.headers['x-request-id']}")).content == completion.content
    async with keeping(tmp_path / "journal", **OPTIONS) as (_, client):
        assert (await client.get(f"/v1/responses/{response.json()['id']}")).status_code == 200
    assert len(threads) == 4 and threading.main_thread() not in threads
