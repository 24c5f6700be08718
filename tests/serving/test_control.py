"""Control routes: who may use them, and what they do to answers, over scripted engines."""

import asyncio
import copy
import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from detcompile.commands import serve
from detcompile.errors import InvalidInput
from detcompile.serving.control import CONTROL_PATHS
from detcompile.serving.journal.journal import Journal
from detcompile.serving.service import Service
from detcompile.serving.weight_store import FIRST, WeightStore
from tests.draws import seed_of_run
from tests.exhaustive import EXHAUSTIVE
from tests.serving import scripted_service
from tests.serving.instant_fleet import EMBEDDER, InstantFleet
from tests.serving.scripted_service import running
from tests.serving.test_fuzz import other_value, places

pytestmark = pytest.mark.usefixtures("in_the_root")
KEY, ADMIN = "key", "admin"
DIGESTS, ADMINS = ([hashlib.sha256(key.encode()).digest()] for key in (KEY, ADMIN))
GETS = {"/get_world_size", "/is_paused", "/is_sleeping", "/server_info", "/weight_info"}
ASK = {"prompt": [5], "max_tokens": 30, "seed": 3, "logprobs": 1, "return_token_ids": True}
DRAWN = list(range(40, 70))  # what the scripted engine answers


def scripted(**options: Any) -> Service:
    return scripted_service.scripted(first_weights=FIRST, **options)


def run(scenario: Any) -> None:
    """Run a test of test_weight_updates."""
    asyncio.run(asyncio.wait_for(scenario, 60))


async def call(client: httpx.AsyncClient, path: str, key: str = "", **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    method = "GET" if path.partition("?")[0] in GETS else "POST"
    return await client.request(method, path, headers=headers | options.pop("headers", {}), **options)


async def posted(client: httpx.AsyncClient, path: str, **options: Any) -> Any:
    answer = await call(client, path, **options)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json() if answer.content else None


async def begun(service: Service, count: int = 1) -> None:
    """Wait until answers have tokens."""
    while sum(answer.num_tokens > 2 for answer in service.open.values()) < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("digests", "admin", "expected"),
    [
        ([], None, {"": 404, KEY: 404, ADMIN: 404}),
        (DIGESTS, None, {"": 401, KEY: 404, ADMIN: 401}),
        ([], ADMINS, {"": 401, KEY: 401, ADMIN: 0}),
        (DIGESTS, ADMINS, {"": 401, KEY: 403, ADMIN: 0}),
        ([], [], {"": 0, KEY: 0, ADMIN: 0}),
    ],
)
async def test_control_routes_require_admin_key(
    digests: list[bytes], admin: list[bytes] | None, expected: dict[str, int]
) -> None:
    async with running(scripted(), digests, admin=admin) as client:
        for path in sorted(CONTROL_PATHS):
            for key, status in expected.items():
                answer = await call(client, path, key, params={"mode": "odd", "level": "odd"})
                actual = answer.status_code
                assert actual == status if status else actual in (200, 400, 409), (path, key, answer.text)
                assert actual == 200 or "message" in answer.json()["error"]
        ordinary = {key: (await call(client, "/v1/completions", key, json=ASK)).status_code for key in expected}
        known = {"", KEY, ADMIN} if not digests else {KEY} | ({ADMIN} if admin else set())
        assert {key for key, status in ordinary.items() if status == 200} == known


async def test_control_routes_without_key_refuse_browser_pages() -> None:
    async with running(scripted(), admin=[], origins=["https://site.example"]) as client:
        for path in sorted(CONTROL_PATHS):
            answer = await call(client, path, headers={"Origin": "https://site.example"})
            assert answer.status_code == 403, path
        assert not (await posted(client, "/is_paused"))["is_paused"]


def test_admin_key_option_reads_keys(tmp_path: Path) -> None:
    assert serve.Web().admin_keys() is None
    assert serve.Web(admin_key="none").admin_keys().digests == []
    (tmp_path / "keys").write_text(f"trainer:{hashlib.sha256(b'admin').hexdigest()}\n")
    assert serve.Web(admin_key=str(tmp_path / "keys")).admin_keys().digests == ADMINS
    with pytest.raises(InvalidInput, match="--admin-key"):
        serve.Web(admin_key=str(tmp_path / "missing")).admin_keys()


@pytest.mark.parametrize("replicas", [1, 2])
async def test_paused_answers_continue_after_resume(replicas: int) -> None:
    service = scripted(replicas=replicas)
    async with running(service, admin=[]) as client:
        requests = [asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(3)]
        await begun(service, 3)
        assert await posted(client, "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
        assert await posted(client, "/is_paused") == {"is_paused": True}
        requests.append(asyncio.create_task(client.post("/v1/completions", json=ASK)))  # waits
        while len(service.open) < 4:
            await asyncio.sleep(0.01)
        counts = [answer.num_tokens for answer in service.open.values()]
        await asyncio.sleep(0.15)
        assert [answer.num_tokens for answer in service.open.values()] == counts
        assert await posted(client, "/resume") == {"status": "resumed"}
        for task in requests:
            [choice] = (await task).json()["choices"]
            assert (choice["token_ids"], choice["finish_reason"]) == (DRAWN, "length")
        assert service.fleet.num_resumed == 0


async def test_pause_abort_returns_partial_answers() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000}
    bodies = {
        "/v1/completions": ASK | {"max_tokens": 1000},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "x", "max_output_tokens": 1000},
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1000}},
    }

    service = scripted(chat_template="{{ messages[0].content }}")
    async with running(service, admin=[]) as client:
        for stream in (False, True):
            requests = {
                path: asyncio.create_task(client.post(path, json=body | {"stream": stream}))
                for path, body in bodies.items()
            }
            sglang = client.post("/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 1000}})
            requests["/generate"] = asyncio.create_task(sglang)
            await begun(service, len(requests))
            await posted(client, "/pause")
            for path, task in requests.items():
                answer = await task
                assert answer.status_code == 200 and '"abort"' in answer.text, (path, answer.text)
                assert "X-Detcompile-Receipt" not in answer.headers
            if not stream:
                [choice] = requests["/v1/completions"].result().json()["choices"]
                assert choice["finish_reason"] == "abort"
                assert choice["token_ids"] == list(range(40, 40 + len(choice["token_ids"])))
            assert not service.open
            await posted(client, "/resume")


async def test_pause_waits_for_running_answers() -> None:
    service = scripted()
    async with running(service, admin=[]) as client:
        first = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await begun(service)
        pausing = asyncio.create_task(posted(client, "/pause?mode=wait"))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 2}))
        await pausing
        assert first.done() and (await first).json()["choices"][0]["token_ids"] == DRAWN
        assert not second.done()
        await posted(client, "/resume")
        assert (await second).json()["choices"][0]["token_ids"] == DRAWN[:2]
        third = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 1000}))
        await begun(service)
        pausing = asyncio.create_task(call(client, "/pause?wait_for_inflight_requests=true"))
        while not service.fleet.holds("pause"):
            await asyncio.sleep(0.01)
        await posted(client, "/resume")
        assert (await pausing).status_code == 409
        third.cancel()


async def test_requests_are_aborted_by_id() -> None:
    service = scripted()
    async with running(service, admin=[]) as client:
        requests = [asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 500, "n": 2}))]
        await begun(service)
        [first] = [answer.name for answer in service.open.values()]
        requests.append(asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 20})))
        await begun(service, 2)
        body = {"request_ids": [first, "unknown"]}
        assert await posted(client, "/abort_requests", json=body) == {"status": "aborted", "aborted": 1}
        reasons = [choice["finish_reason"] for choice in (await requests[0]).json()["choices"]]
        assert reasons == ["abort", "abort"]
        assert (await requests[1]).json()["choices"][0]["finish_reason"] == "length"
        assert (await posted(client, "/abort_requests"))["aborted"] == 0


@pytest.mark.parametrize("keyed", [False, True])
async def test_requests_are_aborted_by_client_ids(tmp_path: Path, keyed: bool) -> None:
    """By the plain id and by the ids that vLLM derives from it. An id in the header overrides the body's."""
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500}
    tokens = {"token_ids": [5], "sampling_params": {"max_tokens": 500}}
    sglang = {"input_ids": [5], "sampling_params": {"max_new_tokens": 500}}
    header = {"X-Request-Id": "x"}
    cases: list[tuple[str, dict[str, Any], dict[str, str], list[str]]] = [
        ("/v1/completions", ASK | {"max_tokens": 500}, header, ["x", "cmpl-x", "cmpl-x-0"]),
        ("/v1/completions", ASK | {"max_tokens": 500, "request_id": "y"}, header, ["x"]),
        ("/v1/completions", ASK | {"max_tokens": 500, "request_id": "x"}, {}, ["cmpl-x-0"]),
        ("/v1/chat/completions", chat, header, ["x", "chatcmpl-x"]),
        ("/v1/chat/completions", chat | {"request_id": "x"}, {}, ["x"]),
        ("/v1/responses", {"input": "x", "max_output_tokens": 500}, header, ["x"]),
        ("/v1/messages", chat, header, ["x"]),
        ("/inference/v1/generate", tokens, header, ["x", "generate-tokens-x"]),
        ("/inference/v1/generate", tokens | {"request_id": "x"}, {}, ["x"]),
        ("/generate", sglang | {"rid": "x"}, {}, ["x"]),
    ]

    journal = Journal(tmp_path / "j", 1 << 24, 3600) if keyed else None
    service = scripted(chat_template="{{ messages[0].content }}", journal=journal)
    async with running(service, admin=[]) as client:
        for number, (path, body, headers, ids) in enumerate(cases):
            for given in ids:
                more = {"Idempotency-Key": f"{number}-{given}"} if keyed else {}
                request = asyncio.create_task(client.post(path, json=body, headers=headers | more))
                await begun(service)
                others = {"request_ids": ["other", "y", "cmpl-", "", "cmpl-x-1", f"{given}x"]}
                assert (await posted(client, "/abort_requests", json=others))["aborted"] == 0
                aborted = await posted(client, "/abort_requests", json={"request_ids": ["other", given]})
                assert aborted["aborted"] == 1, (path, given)
                assert '"abort"' in (await request).text
        both = [[5], [6]]
        request = asyncio.create_task(client.post("/v1/completions", json=ASK | {"prompt": both}, headers=header))
        await begun(service, 2)
        assert (await posted(client, "/abort_requests", json={"request_ids": ["cmpl-x-1"]}))["aborted"] == 1
        reasons = [choice["finish_reason"] for choice in (await request).json()["choices"]]
        assert reasons == ["length", "abort"]


async def test_pause_stops_deadlines() -> None:
    service = scripted(queue_timeout=0.4, timeout=1.0)
    async with running(service, admin=[]) as client:
        first = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await begun(service)
        await posted(client, "/pause?mode=keep")
        second = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 2}))
        await asyncio.sleep(1.2)
        await posted(client, "/resume")
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        late = await client.post("/v1/completions", json=ASK | {"max_tokens": 1000})
        assert late.status_code == 504


async def test_aborted_answer_is_not_journaled(tmp_path: Path) -> None:
    service = scripted(journal=Journal(tmp_path / "j", 1 << 24, 3600))
    async with running(service, admin=[]) as client:
        key = {"Idempotency-Key": "a"}
        requests = asyncio.create_task(client.post("/v1/completions", json=ASK, headers=key))
        await begun(service)
        await posted(client, "/abort_requests")
        assert (await requests).json()["choices"][0]["finish_reason"] == "abort"
        again = await client.post("/v1/completions", json=ASK, headers=key)
        assert again.json()["choices"][0]["token_ids"] == DRAWN


@pytest.mark.parametrize("replicas", [1, 2])
async def test_sleep_ends_engines_and_wake_restores_answers(replicas: int) -> None:
    service = scripted(replicas=replicas, spare=True)
    async with running(service, admin=[]) as client:
        requests = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await begun(service)
        assert await posted(client, "/sleep?level=2&mode=keep") is None
        assert await posted(client, "/sleep") is None  # again
        assert (await posted(client, "/is_sleeping"))["is_sleeping"]
        assert not any(link.ready for link in service.fleet.links)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert await posted(client, "/reset_prefix_cache") == {"success": True}
        await posted(client, "/wake_up?tags=weights")
        assert (await posted(client, "/is_sleeping"))["is_sleeping"] and not requests.done()
        await posted(client, "/wake_up?tags=kv_cache")
        assert (await requests).json()["choices"][0]["token_ids"] == DRAWN
        assert (await client.get("/ready")).status_code == 200
        assert service.fleet.num_restarts == 0 and service.fleet.failure is None


async def test_server_info_uses_vllm_names() -> None:
    service = scripted(replicas=2)
    async with running(service, admin=[]) as client:
        config = (await posted(client, "/server_info?config_format=json"))["vllm_config"]
        assert config["model_config"]["dtype"] == "torch.float32"
        assert config["parallel_config"]["data_parallel_size"] == 2
        assert config["lora_config"] is None and config["weight_transfer_config"] is not None
        service.fleet.spec = replace(service.fleet.spec, max_lora_rank=8)
        config = (await posted(client, "/server_info?config_format=json"))["vllm_config"]
        assert config["lora_config"]["max_lora_rank"] == 8 and config["lora_config"]["max_loras"] > 1000
        assert config["weight_transfer_config"] is None and config["model_config"]["logprobs_mode"]
        assert isinstance((await posted(client, "/server_info"))["vllm_config"], str)
        assert await posted(client, "/get_world_size") == {"world_size": 2}
        assert await posted(client, "/get_world_size?include_dp=false") == {"world_size": 1}
        assert (await posted(client, "/weight_info"))["fingerprint"] == "f" * 64
        requests = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await begun(service)
        assert await posted(client, "/reset_prefix_cache?reset_running_requests=true") == {"success": True}
        assert (await requests).json()["choices"][0]["token_ids"] == DRAWN


async def test_pooling_model_takes_no_weights() -> None:
    class EmbedderFleet(InstantFleet):
        known = EMBEDDER

    async with running(Service(fleet=EmbedderFleet, first_weights=FIRST), admin=[]) as client:
        for path in ("/pause", "/pause?mode=wait", "/resume", "/reset_prefix_cache", "/weight_info"):
            await posted(client, path)
        for path, body in (("/update_weights", {"weight_dir": "/x"}), ("/weight_checker", {"action": "checksum"})):
            refused = await call(client, path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")


ODD_BODIES = [
    b"", b"{", b"[]", b"null", b'"x"', b"{}" * 9, b"\xff", b'{"request_ids": 1}', b'{"request_ids": [1]}',
    b'{"request_ids": [null]}', b"[" * 100, b'{"request_ids": ' + b"[" * 70 + b"]" * 70 + b"}", b'{"\x00": 1}',
]  # fmt: skip
ODD_QUERIES = [
    "", "mode=", "mode=x", "mode=keep&mode=wait", "level=-1", "level=1e9", "level=99999999999999999999", "%00=%ff",
    "clear_cache=maybe", "tags=x", "tags=weights&tags=", "config_format=yaml", "include_dp=2",
]  # fmt: skip


async def test_malformed_control_requests_are_4xx() -> None:
    service = scripted(most_restarts=5)
    async with running(service, admin=[]) as client:
        for path in sorted(CONTROL_PATHS - {"/sleep"}):
            for query in ODD_QUERIES:
                answer = await call(client, f"{path}?{query}")
                assert answer.status_code in (200, 400, 409), (path, query, answer.text)
            for body in ODD_BODIES:
                for kind in ("application/json", "text/plain"):
                    answer = await call(client, path, content=body, headers={"Content-Type": kind})
                    assert answer.status_code in (200, 400, 409, 415), (path, body, answer.text)
        await posted(client, "/resume")
        done = await client.post("/v1/completions", json=ASK)
        assert done.json()["choices"][0]["token_ids"] == DRAWN and service.fleet.num_restarts == 0


BASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # a path, parameters and a body that it takes
    ("/pause", {"mode": "keep", "clear_cache": "false"}, {}), ("/pause", {"mode": "abort"}, {}),
    ("/pause", {"mode": "wait", "wait_for_inflight_requests": "true"}, {}), ("/resume", {}, {}), ("/resume", {}, {}),
    ("/abort_requests", {}, {"request_ids": ["a"]}), ("/abort_requests", {}, {}), ("/reset_prefix_cache", {}, {}),
    ("/sleep", {"level": "1", "mode": "keep"}, {}), ("/wake_up", {"tags": "weights"}, {}), ("/wake_up", {}, {}),
    ("/update_weights", {}, {"weight_dir": "good", "weight_version": "v", "partial": False}),
    ("/update_weights", {}, {"weight_dir": "bad", "partial": True}),
    ("/update_weight_version", {}, {"new_version": "w"}),
    ("/init_weight_transfer_engine", {}, {"init_info": {
        "master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 3, "packed": True}}),
    ("/init_weight_transfer_engine", {}, {"init_info": {}}), ("/shutdown_weight_transfer_engine", {}, {}),
    ("/start_weight_update", {}, {"is_checkpoint_format": True}),
    ("/finish_weight_update", {}, {"weight_version": "x"}),
    ("/update_weights", {}, {"update_info": {
        "names": ["w"], "dtype_names": ["float32"], "shapes": [[1]], "packed": True, "packed_buffer_size_bytes": 9}}),
    ("/weight_checker", {}, {"action": "compare", "baseline": {"a": "1"}, "checksums": [{"a": "1"}]}),
    ("/v1/load_lora_adapter", {}, {"lora_name": "a", "lora_path": "x", "load_inplace": True}),
    ("/v1/unload_lora_adapter", {}, {"lora_name": "a", "lora_int_id": 1}),
    ("/load_lora_adapter", {}, {"lora_name": "a", "lora_path": "x"}),
    ("/collective_rpc", {}, {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}),
    ("/collective_rpc", {}, {"method": "update_weights_nccl", "kwargs": {
        "update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]], "packed": True}}}),
    ("/collective_rpc", {}, {"method": "skyrl_finish_weight_update"}),
    *((path, {"config_format": "json", "include_dp": "false"}, {}) for path in sorted(GETS)),
]  # fmt: skip


@pytest.mark.parametrize("count", [120, pytest.param(5000, marks=EXHAUSTIVE)])
def test_malformed_control_requests_lose_no_answer(count: int, tmp_path: Path) -> None:
    """Almost valid bodies during answers: no 5xx, no lost engine or answer, no access without a key."""
    draw = random.Random(f"{seed_of_run()} control {count}")
    folders = {name: tmp_path / name for name in ("good", "bad")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "model.safetensors").write_text(name)

    def request() -> tuple[str, dict[str, Any], bytes]:
        path, parameters, body = copy.deepcopy(draw.choice(BASES))
        for given in (parameters, body):
            for _ in range(draw.choice([0, 0, 1, 2])):
                if places(given):
                    other_value(draw, given, [other for base in BASES for other in base[1:] if other])
        if body.get("weight_dir") in (*folders,):
            body["weight_dir"] = str(folders[body["weight_dir"]])
        content = json.dumps(body).encode() if body or draw.random() < 0.5 else b""
        if draw.random() < 0.1:
            content = content[: draw.randrange(len(content) + 1)] + draw.randbytes(draw.randrange(4))
        sendable = {name: str(value).encode("utf-8", "replace") for name, value in parameters.items() if name.isascii()}
        return path, sendable, content

    async def scenario() -> None:
        service = scripted(replicas=2, most_restarts=5)
        store = WeightStore(tmp_path / "store")
        async with running(service, DIGESTS, admin=ADMINS, store=store) as client:
            statuses: Counter[int] = Counter()
            answers: set[asyncio.Task[httpx.Response]] = set()
            for number in range(count):
                if number % 8 == 0:
                    answers.add(asyncio.create_task(call(client, "/v1/completions", ADMIN, json=ASK)))
                path, parameters, content = request()
                key, refused = draw.choice([("", 401), (KEY, 403), *[(ADMIN, 0)] * 6])
                what = {"params": parameters, "content": content, "headers": {"Content-Type": "application/json"}}
                try:
                    async with asyncio.timeout(0.5):  # a pause may wait for held answers: this client leaves
                        status = (await call(client, path, key, **what)).status_code
                except TimeoutError:
                    continue
                assert status == refused if refused else status in (200, 400, 404, 409), (path, status, what)
                statuses[status] += 1
            assert min(statuses[status] for status in (200, 400, 401, 403)) > 0, statuses
            await posted(client, "/resume", key=ADMIN)
            await posted(client, "/wake_up", key=ADMIN)
            for task in answers:
                answer = await task
                assert answer.status_code == 200, answer.text
                [choice] = answer.json()["choices"]
                drawn = choice["token_ids"]
                ends = {"abort"} if len(drawn) < len(DRAWN) else {"abort", "length"}
                assert drawn == DRAWN[: len(drawn)] and choice["finish_reason"] in ends
            await posted(client, "/is_paused", key=ADMIN)
            last = (await call(client, "/v1/completions", ADMIN, json=ASK)).json()
            assert last["choices"][0]["token_ids"] == DRAWN and not service.open
            assert service.fleet.num_restarts == 0

    async def bounded() -> None:
        async with asyncio.timeout(60 + count):
            await scenario()

    asyncio.run(bounded())
