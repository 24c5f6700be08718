"""The unmodified openai client against the server; one request has one sha256 by every way through it."""

import asyncio
import base64
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import DEFAULTS, ROOT, Server, started

PROMPT = "def add(a, b):"
MESSAGES = [{"role": "user", "content": "Write a function."}]
PARAMS = {**DEFAULTS, "seed": 11, "max_tokens": 24, "frequency_penalty": 0.3, "logprobs": 3}
EXTRA = {"repetition_penalty": 1.1, "return_token_ids": True}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def another(folder: Path) -> Iterator[Server]:
    """A second server, which ignores the model's default parameters."""
    actual = started(folder, "--generation-config", "vllm")
    yield actual
    assert actual.stop() == 0


def sha256(choice: dict) -> str:
    """The digest of what decides a choice: text, token ids, logprobs to the last bit, and why it ended."""
    kept = {name: choice[name] for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def whole(client: openai.OpenAI, **changes) -> list[dict]:
    requests = {"model": "tiny", "prompt": PROMPT, "extra_body": EXTRA, **PARAMS, **changes}
    return [choice.model_dump() for choice in client.completions.create(**requests).choices]


def streamed(client: openai.OpenAI, **changes) -> list[dict]:
    """Return the choices that the chunks of a stream add up to."""
    requests = {"model": "tiny", "prompt": PROMPT, "extra_body": EXTRA, **PARAMS, **changes}
    actual: dict[int, dict] = {}
    for chunk in client.completions.create(stream=True, **requests):
        for part in (choice.model_dump() for choice in chunk.choices):
            known = actual.setdefault(part["index"], part | {"text": "", "token_ids": [], "logprobs": None})
            known["text"] += part["text"]
            known["token_ids"] += part["token_ids"]
            known["finish_reason"], known["stop_reason"] = part["finish_reason"], part.get("stop_reason")
            if part["logprobs"] is not None:
                before = known["logprobs"] or {name: [] for name in part["logprobs"]}
                known["logprobs"] = {name: before[name] + part["logprobs"][name] for name in part["logprobs"]}
    return [actual[index] for index in sorted(actual)]


def test_request_has_one_sha256_on_every_path(client: openai.OpenAI, another: Server) -> None:
    alone = whole(client)
    digests = {"whole": sha256(alone[0]), "stream": sha256(streamed(client)[0])}
    digests["first of n"] = sha256(whole(client, n=3)[0])
    digests["n streamed"] = sha256(streamed(client, n=3)[0])
    digests["one of prompts"] = sha256(whole(client, prompt=["other", PROMPT])[1])
    ids = client.post("/tokenize", body={"prompt": PROMPT}, cast_to=object)["tokens"]
    digests["token ids"] = sha256(whole(client, prompt=ids)[0])

    def among_others(number: int) -> str:
        return sha256((streamed if number % 2 else whole)(client, **({} if number % 3 else {"seed": number}))[0])

    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(among_others, range(24)))
    digests |= {f"in a crowd {number}": actual for number, actual in enumerate(crowd) if number % 3}
    assert len({actual for number, actual in enumerate(crowd) if number % 3 == 0}) > 1  # other seeds, other answers
    few = {name: value for name, value in PARAMS.items() if name not in DEFAULTS}
    requests = {"model": "tiny", "prompt": PROMPT, "extra_body": EXTRA, **few}
    digests["by the model's defaults"] = sha256(client.completions.create(**requests).choices[0].model_dump())
    item = openai.OpenAI(base_url=f"{another.url}/v1", api_key="none")
    digests["another server"] = sha256(whole(item)[0])
    assert sha256(item.completions.create(**requests).choices[0].model_dump()) != digests["whole"]
    assert item.get("/fingerprint", cast_to=object)["default_sampling_params"] == {}
    assert set(digests.values()) == {digests["whole"]}, digests


async def by_every_route(url: str, num_others: int) -> dict[str, str]:
    """sha256 of the prompt and the answer of one conversation, as the receipts of its routes have them, in a crowd."""
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    limits = httpx.Limits(max_connections=num_others + 20)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        prompt = (await client.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
        ways: dict[str, tuple[str, dict[str, Any]]] = {
            "completion": ("/v1/completions", {"prompt": prompt, "max_tokens": 24}),
            "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24}),
            "chat of three": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24, "n": 3}),
            "response": ("/v1/responses", {"input": MESSAGES, "max_output_tokens": 24}),
            "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 24}),
            "token ids": (
                "/inference/v1/generate",
                {"token_ids": prompt, "sampling_params": params | {"max_tokens": 24}},
            ),
            "chat of token ids": (
                "/v1/chat/completions/tokens",
                {"messages": [{"role": "user", "content": "not read"}], "tokens": prompt, "max_tokens": 24},
            ),
        }

        async def digest(path: str, body: dict[str, Any]) -> str:
            answer = await client.post(path, json=params | body)
            assert answer.status_code == 200, answer.text
            receipt = await client.get(f"/v1/receipts/{answer.headers['x-request-id']}")
            [requests] = json.loads(base64.b64decode(receipt.json()["payload"]))["prompts"]
            first = requests["samples"][0]
            kept = [requests["token_ids"], first["token_ids"], first["text"], first["finish_reason"]]
            return hashlib.sha256(json.dumps(kept).encode()).hexdigest()

        others = [digest("/v1/completions", {"prompt": f"{seed}", "seed": seed, "max_tokens": 8 + seed % 30})
                  for seed in range(num_others)]  # fmt: skip
        item = {f"{name}, stream {stream}": digest(path, body | {"stream": stream})
               for name, (path, body) in ways.items() for stream in (False, True)}  # fmt: skip
        half = num_others // 2  # some come before, some behind
        actual = await asyncio.gather(*others[:half], *item.values(), *others[half:])
    return dict(zip(item, actual[half : half + len(item)], strict=True))


def test_conversation_has_one_sha256_on_every_route(server: Server, another: Server) -> None:
    alone, among = asyncio.run(by_every_route(another.url, 0)), asyncio.run(by_every_route(server.url, 100))
    assert len({*alone.values(), *among.values()}) == 1, (alone, among)


def test_n_samples_differ_and_repeat(client: openai.OpenAI) -> None:
    first, second = whole(client, n=3), streamed(client, n=3)
    assert [sha256(choice) for choice in first] == [sha256(choice) for choice in second]
    assert len({choice["text"] for choice in first}) == 3


def test_generated_seed_is_returned_and_repeats_answer(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="tiny", prompt=PROMPT, max_tokens=16)
    drawn = raw.parse()
    assert raw.headers["x-detcompile-seed"] == str(drawn.seed) and 0 <= drawn.seed < 1 << 53
    again = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, seed=drawn.seed)
    assert again.choices[0].text == drawn.choices[0].text
    assert again.system_fingerprint == drawn.system_fingerprint == fingerprint_of(client)
    negative = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, seed=-3)
    assert negative.seed == -3


def fingerprint_of(client: openai.OpenAI) -> str:
    return client.get("/fingerprint", cast_to=object)["fingerprint"]


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_stop_string(client: openai.OpenAI, stream: bool) -> None:
    text = whole(client)[0]["text"]
    stop = text[9:12]
    choice = (streamed if stream else whole)(client, stop=[stop])[0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


def test_echo_returns_prompt_and_logprobs(client: openai.OpenAI) -> None:
    plain = whole(client, n=2)
    for actual in (whole(client, n=2, echo=True), streamed(client, n=2, echo=True)):
        for choice, item in zip(actual, plain):
            logprobs = choice["logprobs"]
            num_prompt = len(choice["prompt_token_ids"])
            assert choice["text"] == PROMPT + item["text"]
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert len(logprobs["tokens"]) == num_prompt + len(item["token_ids"])
            assert logprobs["token_logprobs"][num_prompt:] == item["logprobs"]["token_logprobs"]
            assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:num_prompt])
    scored = whole(client, echo=True, max_tokens=0)[0]
    assert scored["text"] == PROMPT and scored["token_ids"] == [] and scored["finish_reason"] == "length"
    assert scored["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:num_prompt]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_have_vllm_format(http: httpx.Client, path: str) -> None:
    requests = {"messages": MESSAGES} if "chat" in path else {"prompt": PROMPT}
    body = {**requests, "max_tokens": 4, "seed": 2, "n": 2, "prompt_logprobs": 2, "return_token_ids": True}
    answer = http.post(path, json=body).json()
    holders = [answer] if "chat" in path else answer["choices"]
    prompt = holders[0]["prompt_token_ids"]
    echoed = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 2}
    [scored] = http.post("/v1/completions", json=echoed).json()["choices"]
    for known in (*(holder["prompt_logprobs"] for holder in holders), scored["prompt_logprobs"]):
        assert known[0] is None and len(known) == len(prompt)
        for token, entry, logprob in zip(prompt[1:], known[1:], scored["logprobs"]["token_logprobs"][1:]):
            assert next(iter(entry)) == str(token) and entry[str(token)]["logprob"] == logprob
            ranks = {name: one["rank"] for name, one in entry.items()}
            assert {1, 2} <= {*ranks.values()} and len(entry) == (2 if ranks[str(token)] <= 2 else 3)
            assert all(isinstance(one["decoded_token"], str) for one in entry.values())
    assert max(len(top) for top in scored["logprobs"]["top_logprobs"][1:]) <= 2  # one alternative, and the token
    lines = http.post(path, json=body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = chunks if "chat" in path else [choice for chunk in chunks for choice in chunk["choices"]]
    streamed = [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part]
    assert streamed == [holder["prompt_logprobs"] for holder in holders]


def test_sampling_logprobs_are_of_the_filtered_distribution(http: httpx.Client) -> None:
    filters = {"top_k": 4, "top_p": 0.9, "temperature": 1.3, "frequency_penalty": 0.5, "logit_bias": {"40": 2}}
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 2, "logprobs": 0, "return_sampling_mask": True, **filters}
    [choice] = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"]
    names = ("sampling_logprobs", "sampling_mask", "sampling_mask_logprobs")
    for token, logprob, mask, logprobs in zip(choice["token_ids"], *map(choice.get, names), strict=True):
        assert 1 <= len(mask) <= 4 and logprobs[mask.index(token)] == logprob
        assert math.isclose(sum(map(math.exp, logprobs)), 1, abs_tol=1e-5) and logprobs == sorted(logprobs)[::-1]
    assert choice["sampling_logprobs"] != choice["logprobs"]["token_logprobs"]
    lines = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert all([one for part in parts for one in part[name]] == choice[name] for name in names)
    chat = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True, "return_sampling_mask": True}
    [greedy] = http.post("/v1/chat/completions", json=chat | {"return_token_ids": True}).json()["choices"]
    assert greedy["sampling_mask"] == [[token] for token in greedy["token_ids"]]
    assert greedy["sampling_logprobs"] == [0.0] * len(greedy["token_ids"])


def test_chat_stream_equals_whole_answer(client: openai.OpenAI) -> None:
    requests = {"model": "tiny", "messages": MESSAGES, "seed": 4, "max_completion_tokens": 12, "logprobs": True}
    answer = client.chat.completions.create(top_logprobs=2, **requests)
    choice = answer.choices[0]
    chunks = list(
        client.chat.completions.create(stream=True, top_logprobs=2, stream_options={"include_usage": True}, **requests)
    )
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant" and deltas[0].delta.content == ""
    assert "".join(part.delta.content or "" for part in deltas) == choice.message.content
    entries = [entry for part in deltas if part.logprobs for entry in part.logprobs.content]
    assert entries == choice.logprobs.content and len(entries) == 12 and len(entries[0].top_logprobs) == 2
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    template = "<user>Write a function.\n<assistant>"
    same = client.completions.create(
        model="tiny", prompt=template, seed=4, max_tokens=12, extra_body={"add_special_tokens": False}
    )
    assert same.choices[0].text == choice.message.content


def test_manual_examples_run(server: Server) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    codes = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(codes) == 2 and all("http://127.0.0.1:8000" in code for code in codes)
    for code in codes:
        if "anthropic" not in code or importlib.util.find_spec("anthropic") is not None:
            exec(code.replace("http://127.0.0.1:8000", server.url), {})


def test_async_client_streams_many_at_once(server: Server, client: openai.OpenAI) -> None:
    expected = whole(client)[0]["text"]

    async def one(item: openai.AsyncOpenAI) -> str:
        stream = await item.completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body=EXTRA, **PARAMS)
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as item:
            return await asyncio.gather(*(one(item) for _ in range(16)))

    assert set(asyncio.run(many())) == {expected}


def test_model_fingerprint_and_status_routes(client: openai.OpenAI, http: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    actual = http.get("/v1/fingerprint").json()
    assert actual["default_sampling_params"] == DEFAULTS
    assert actual["fingerprint"] == model.fingerprint and {"weights", "source"} <= actual["fingerprint_parts"].keys()
    assert http.get("/v1/certificate").json()["entries"]
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert http.post("/v1/detokenize", json={"tokens": ids}).json() == {"prompt": PROMPT}
    assert http.get("/health").json() == {"status": "ok"} and http.get("/ready").status_code == 200
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert "messages" in schemas["ChatRequest"]["properties"]
    lines = http.get("/metrics").text.splitlines()
    assert any(line.startswith("vllm:generation_tokens_total") and not line.endswith(" 0.0") for line in lines)
    assert f'detcompile:model_info{{fingerprint="{model.fingerprint}"}} 1.0' in lines
