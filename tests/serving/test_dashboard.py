"""The page and the JSON that it reads, over the scripted engine."""

import asyncio
import hashlib
import re
from typing import Any

import httpx
import pytest

from tests.serving.scripted_engine import HELLO, POISON
from tests.serving.scripted_service import running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")


async def state_of(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/dashboard/state")
    assert answer.status_code == 200
    return answer.json()


async def state_when(client: httpx.AsyncClient, holds: Any) -> dict[str, Any]:
    """Return the first state that satisfies ``holds``; fail after some seconds."""
    for _ in range(200):
        state = await state_of(client)
        if holds(state):
            return state
        await asyncio.sleep(0.02)
    raise AssertionError(state)


async def test_page_is_one_file_safe_from_injection() -> None:
    async with running(scripted()) as client:
        answer = await client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy and "default-src 'none'" in policy
    assert len(re.findall(r"'sha256-[\w+/]{43}='", policy)) == 2
    text = answer.text
    assert text.count("<script>") == text.count("<style>") == 1
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\sstyle=|\son\w+=", text)
    assert not re.search(r"""(src|href)=["'](?!data:,)|@import|url\(""", text)
    assert len(answer.content) < 150_000


async def test_page_needs_no_key_but_its_data_does() -> None:
    async with running(scripted(), [hashlib.sha256(b"secret").digest()]) as client:
        assert (await client.get("/")).status_code == 200
        for path in ("/dashboard/state", "/dashboard", "/v1/certificate"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post("/")).status_code == 401
        known = await client.get("/dashboard/state", headers={"Authorization": "Bearer secret"})
        assert known.status_code == 200


async def test_state_before_engine_is_ready() -> None:
    service = scripted()

    from detcompile.serving.app import new_app

    transport = httpx.ASGITransport(new_app(service, "test"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        state = await state_of(client)
    assert (state["status"], state["model"], state["engines"], state["requests"]) == ("starting", None, [], [])


async def test_the_state_follows_a_request() -> None:
    async with running(scripted()) as client:
        state = await state_of(client)
        assert state["status"] == "ready"
        assert (state["model"]["name"], state["model"]["vocab_size"]) == ("scripted", HELLO.vocab_size)
        body = {"prompt": [5, 6, 7], "max_tokens": 60, "seed": 2**63 + 1, "n": 2}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        state = await state_when(client, lambda state: state["requests"] and state["requests"][0]["num_tokens"])
        row, engine = state["requests"][0], state["engines"][0]
        assert (row["state"], row["seed"], row["engine"]) == ("running", str(2**63 + 1), 0)
        assert (row["num_prompt_tokens"], row["num_samples"], state["num_open"]) == (3, 2, 1)
        state = await state_when(client, lambda state: state["engines"][0]["holdings"] and state["engines"][0]["steps"])
        engine = state["engines"][0]
        assert engine["holdings"] == [[row["request_id"], 1]]
        assert engine["steps"][-1] == [0.02, 0, 1, 0]
        answer = (await asking).json()
        state = await state_of(client)
        row = state["requests"][0]
        assert (row["name"], row["state"], row["num_tokens"]) == (answer["id"], "length", 120)
        assert row["has_receipt"]
        assert 0 < row["first_seconds"] < row["seconds"]
        assert state["num_open"] == 0 and sum(state["latencies"]["first"]) == 1
        assert sum(state["latencies"]["between"]) > 40
        assert len(state["latencies"]["first"]) == len(state["buckets"]) + 1
        assert (await client.get(f"/v1/receipts/{row['name']}")).status_code == 200


async def test_rows_are_bounded_and_newest_first() -> None:
    async with running(scripted()) as client:
        bodies = [{"prompt": [[place]] * 60, "max_tokens": 1} for place in range(2)]
        for body in bodies:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": [[9]] * 200, "max_tokens": 50}))
        state = await state_when(client, lambda state: state["num_open"] == 200)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        states = [row["state"] for row in state["requests"]]
        assert len(states) == 256 and "length" not in states[:200] and set(states[200:]) == {"length"}
        numbers = [int(row["request_id"]) for row in state["requests"]]
        assert numbers[:200] == sorted(numbers[:200], reverse=True)
        state = await state_when(client, lambda state: state["num_open"] == 0)
        assert len(state["requests"]) == 100 and state["requests"][0]["state"] == "cancelled"
        assert not state["requests"][0]["has_receipt"]  # it had not ended, so none was made


async def test_state_lists_lost_engines() -> None:
    async with running(scripted(most_restarts=5)) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": [POISON], "max_tokens": 9}))
        state = await state_when(client, lambda state: state["losses"])
        assert state["status"] == "recovering" and "SIGABRT" in state["losses"][0]["why"]
        assert (state["losses"][0]["num_answers"], state["losses"][0]["seconds"]) == (1, None)
        state = await state_when(client, lambda state: state["losses"][0]["seconds"])
        assert state["num_restarts"] >= 1 and state["num_resumed"] >= 1
        assert (await asking).status_code == 500
        state = await state_of(client)
        assert state["requests"][0]["state"] == "failed" and state["requests"][0]["num_moves"] >= 1


async def tokens_of_request(client: httpx.AsyncClient, num_tokens: int) -> list[int]:
    body = {"prompt": [5], "max_tokens": num_tokens, "return_token_ids": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_kill_switch_loses_no_token(replicas: int) -> None:
    service = scripted(replicas=replicas, most_restarts=2)
    async with running(service, demo=True) as client:
        assert (await state_of(client))["demo"]
        asking = [asyncio.create_task(tokens_of_request(client, 60)) for _ in range(3)]
        state = await state_when(
            client, lambda state: [row["num_tokens"] > 3 for row in state["requests"]] == [True] * 3
        )
        row = state["requests"][1]
        pids = [link.pid for link in service.fleet.links]
        actual = (await client.post("/dashboard/kill", json={"id": row["name"]})).json()
        assert actual == {"engine": row["engine"], "pid": pids[row["engine"]]}
        assert await asyncio.gather(*asking) == [list(range(40, 100))] * 3
        state = await state_when(client, lambda state: state["losses"] and state["losses"][0]["seconds"])
        assert "SIGKILL" in state["losses"][0]["why"] and state["losses"][0]["num_answers"] >= 1
        moved = {row["name"]: row["num_moves"] for row in state["requests"]}
        assert moved[row["name"]] == 1 and sum(moved.values()) == state["losses"][0]["num_answers"]


async def test_the_kill_switch_does_not_end_the_server() -> None:
    async with running(scripted(most_restarts=1), demo=True) as client:
        assert (await client.post("/dashboard/kill", json={})).status_code == 200
        await state_when(client, lambda state: state["status"] == "recovering")
        assert (await client.post("/dashboard/kill", json={})).status_code == 503
        await state_when(client, lambda state: state["status"] == "ready")
        refused = await client.post("/dashboard/kill", json={})
        assert refused.status_code == 429 and "retry-after" in refused.headers
        assert await tokens_of_request(client, 3) == [40, 41, 42]


async def test_without_demo_there_is_no_kill_switch() -> None:
    async with running(scripted()) as client:
        assert not (await state_of(client))["demo"]
        assert (await client.post("/dashboard/kill", json={})).status_code == 404
    async with running(scripted(), [hashlib.sha256(b"secret").digest()], demo=True) as client:
        assert (await client.post("/dashboard/kill", json={})).status_code == 401
