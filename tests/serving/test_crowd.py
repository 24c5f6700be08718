"""Mixed requests under load repeat by their seeds in another order, streamed or not, and as receipts."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.draws import seed_of_run
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import Server
from tests.serving.receipts.receipt_cases import REQUESTS

WORDS = ["def ", "class ", "return ", "é東", "x = 1\n", "# a comment\n", "for i in (1, 2):\n    ", "\t", "import os\n"]
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
CHAT = [{"temperature": 0}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "top_p": 0.8}, {"stop": ["e"]}]


def drawn(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a request, some with a seed."""
    text = "".join(draw.choices(WORDS, k=draw.randrange(1, 30)))
    requests: dict[str, Any] = {"max_tokens": draw.randrange(1, 24), "return_token_ids": True, "receipt": True}
    if draw.random() < 0.3:
        requests["seed"] = draw.choice([0, -1, draw.getrandbits(62)])
    if draw.random() < 0.2:
        return "chat", requests | {"messages": [{"role": "user", "content": text}]} | draw.choice(CHAT)
    requests |= {"prompt": text} | draw.choice(list(REQUESTS.values()))
    return "completion", requests | {"max_tokens": max(requests["max_tokens"], requests.get("min_tokens", 0))}


def joined(choices: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return tokens, text, logprobs and finish reason of every choice, of an answer or of a stream's chunks."""
    actual: dict[int, dict[str, Any]] = {}
    for choice in choices:
        item = actual.setdefault(choice["index"], {"ids": [], "text": "", "logprobs": [], "end": None})
        item["ids"] += choice.get("token_ids", [])
        item["text"] += choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        logprobs = choice.get("logprobs") or {}
        item["logprobs"] += logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or ()]
        item["end"] = (choice["finish_reason"], choice.get("stop_reason")) if choice["finish_reason"] else item["end"]
    return actual


async def answered(client: httpx.AsyncClient, kind: str, body: dict[str, Any], stream: bool) -> tuple[Any, int, Any]:
    """The choices, the seed, and the receipt."""
    answer = await client.post(PATHS[kind], json=body | {"stream": stream})
    assert answer.status_code == 200, (body, answer.text)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line] if stream else [answer.text]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    receipts = [chunk["receipt"] for chunk in chunks if "receipt" in chunk]
    return joined([choice for chunk in chunks for choice in chunk["choices"]]), chunks[0]["seed"], receipts[0]


async def crowd(url: str, requests: list[tuple[str, dict[str, Any]]], streams: list[bool], most: int) -> list[Any]:
    """Send all requests, ``most`` at a time."""
    room = asyncio.Semaphore(most)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=most)) as client:

        async def one(kind: str, body: dict[str, Any], stream: bool) -> Any:
            async with room:
                return await answered(client, kind, body, stream)

        return await asyncio.gather(*(one(*item, stream) for item, stream in zip(requests, streams, strict=True)))


@pytest.mark.parametrize(
    ("count", "part"), [(300, 0), *(pytest.param(1000, part, marks=EXHAUSTIVE) for part in range(10))]
)
def test_seeds_repeat_mixed_requests(count: int, part: int, server: Server, http: httpx.Client) -> None:
    draw = random.Random(f"{seed_of_run()} crowd {count} {part}")
    requests = [drawn(draw) for _ in range(count)]
    streams = [draw.random() < 0.5 for _ in range(count)]
    first = asyncio.run(crowd(server.url, requests, streams, 48))
    order = draw.sample(range(count), count)
    seeded = [(requests[row][0], requests[row][1] | {"seed": first[row][1]}) for row in order]
    again = asyncio.run(crowd(server.url, seeded, [not streams[row] for row in order], 5))
    different = [requests[row] for row, (choices, seed, _) in zip(order, again) if (choices, seed) != first[row][:2]]
    assert different == []
    for row in draw.sample(range(count), count // 4):
        verdict = http.post("/v1/verify", json=first[row][2]).json()
        assert verdict["outcome"] == "equal", (requests[row], verdict)
