"""New weights of a server: all engines or none, versions by token, and what survives lost engines and servers."""

import asyncio
import base64
import contextlib
import functools
import itertools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import reduce_tensor

import detcompile
from detcompile import Numerics, cuda_ipc
from detcompile.commands.receipts.whole_answers import answer_difference
from detcompile.digests import fingerprint, weights_digest
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.models.hub import TINY_FOLDER
from detcompile.serving.engines.protocol import Weights
from detcompile.serving.receipts.decoding import Redrawn, RedrawnSample
from detcompile.serving.receipts.envelope import Envelope, payload_of, read_answer
from detcompile.serving.receipts.receipt import decode_receipt
from detcompile.serving.receipts.replay import Replayer, replay
from detcompile.serving.receipts.verdict import Verdict
from detcompile.serving.tokenizer_pool import TokenizerPool
from detcompile.serving.weight_store import WeightStore
from detcompile.weight_transfer import TransferGroup
from detcompile.weights import weight_digests
from tests.serving.conftest import ROOT, Server, started
from tests.serving.scripted_engine import FIRST_FAILS, HELLO, NEVER
from tests.serving.scripted_service import running
from tests.serving.test_control import ASK, DRAWN, begun, call, posted, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")


def new_weights(folder: Path, text: str) -> str:
    """A folder with weights of the scripted engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    return str(folder)


def receipt_of(answer: httpx.Response) -> dict[str, Any]:
    return json.loads(base64.b64decode(answer.json()["receipt"]["payload"]))


def difference(reply: dict[str, Any]) -> Verdict | None:
    """The difference between a whole answer and its receipt, as if the receipt had been replayed."""
    envelope, fields = read_answer(json.dumps(reply).encode())
    receipt, redrawn = decode_receipt(payload_of(envelope)), list[Redrawn]()
    for prompt in receipt.prompts:
        assert not isinstance(prompt.token_ids, str)
        ends = [(sample.token_ids, None, sample.finish_reason, sample.stop_reason) for sample in prompt.samples]
        redrawn.append(Redrawn(prompt.token_ids, [], [RedrawnSample(*end) for end in ends]))  # type: ignore[arg-type]
    return answer_difference(fields, envelope, receipt, redrawn, TokenizerPool(HELLO))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("paused", [True, False])
async def test_each_token_names_its_weights(tmp_path: Path, replicas: int, paused: bool) -> None:
    service = scripted(replicas=replicas)
    async with running(service, admin=[]) as client:
        ask = ASK | {"receipt": True, "n": 2}
        requests = [asyncio.create_task(client.post("/v1/completions", json=ask)) for _ in range(3)]
        await begun(service, 3)
        if paused:
            await posted(client, "/pause?mode=keep&clear_cache=false")
        body = {"weight_dir": new_weights(tmp_path / "new", "b"), "weight_version": "step-7"}
        info = await posted(client, "/update_weights", json=body)
        whole = fingerprint({"weights": "b"})
        assert info.pop("message") == "Weights updated"
        assert info == {"status": "ok", "weight_version": "step-7", "fingerprint": whole, "weights": "b"}
        if paused:
            assert (await posted(client, "/is_paused"))["is_paused"]
            await posted(client, "/resume")
        for task in requests:
            answer = await task
            reply, receipt = answer.json(), receipt_of(answer)
            assert (reply["weight_version"], reply["system_fingerprint"]) == ("step-7", whole)
            assert (receipt["weight_version"], receipt["fingerprint"]) == ("step-7", whole)
            for choice, sample in zip(reply["choices"], receipt["prompts"][0]["samples"], strict=True):
                assert choice["token_ids"] == DRAWN
                versions = choice["weight_versions"]
                old = versions.count("0")
                assert 0 < old < len(DRAWN) and versions == ["0"] * old + ["step-7"] * (len(DRAWN) - old)
                first = {"start": 0, "version": "0", "weights": ""}
                assert sample["drawn_by"] == [first, {"start": old, "version": "step-7", "weights": "b"}]
        later = await client.post("/v1/completions", json=ask)
        assert later.json()["choices"][0]["weight_versions"] == ["step-7"] * len(DRAWN)
        assert "drawn_by" not in receipt_of(later)["prompts"][0]["samples"][0]
        model = (await client.get("/v1/models")).json()["data"][0]
        assert model["fingerprint"] == whole and await posted(client, "/weight_info") == {
            "weight_version": "step-7", "fingerprint": whole, "weights": "b",
        }  # fmt: skip


async def test_chunks_name_the_newest_weights(tmp_path: Path) -> None:
    service = scripted(chat_template="{{ messages[0].content }}")
    async with running(service, admin=[]) as client:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30}
        bodies = {
            "/v1/completions": ASK | {"stream": True},
            "/v1/chat/completions": chat | {"stream": True},
            "/v1/messages": chat,
            "/v1/responses": {"input": "x", "max_output_tokens": 30},
        }
        requests = {path: asyncio.create_task(client.post(path, json=body)) for path, body in bodies.items()}
        await begun(service, len(bodies))
        await posted(client, "/update_weights", json={"weight_dir": new_weights(tmp_path, "b")})
        for path, task in requests.items():
            answer = await task
            if not path.endswith("completions"):
                assert answer.json()["weight_version"] == "1"
                continue
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
            versions = [chunk["weight_version"] for chunk in chunks]
            assert set(versions) == {"0", "1"} and versions == sorted(versions)
            for chunk in chunks:
                whole = {"0": "f" * 64, "1": fingerprint({"weights": "b"})}[chunk["weight_version"]]
                assert chunk["system_fingerprint"] == whole


@pytest.mark.parametrize("replicas", [1, 2])
async def test_refused_weights_change_nothing(tmp_path: Path, replicas: int) -> None:
    service = scripted(replicas=replicas)
    async with running(service, admin=[]) as client:
        before = await posted(client, "/weight_info")
        requests = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await begun(service)
        good = new_weights(tmp_path / "good", "b")
        for body in (
            {"weight_dir": new_weights(tmp_path / "bad", "bad")}, {"weight_dir": str(tmp_path / "none")},
            {"weight_dir": None}, {"weight_dir": 1}, {"weight_dir": ["x"]}, {}, {"update_info": 3},
            {"weight_dir": good, "weight_version": ""}, {"weight_dir": good, "weight_version": "a\n"},
            {"weight_dir": good, "weight_version": "x" * 300}, {"weight_dir": "\x00"}, {"weight_dir": ""},
        ):  # fmt: skip
            answer = await call(client, "/update_weights", json=body)
            assert answer.status_code == 400, (body, answer.text)
            assert await posted(client, "/weight_info") == before
        assert set((await requests).json()["choices"][0]["weight_versions"]) == {"0"}
        assert service.fleet.num_restarts == 0


@pytest.mark.parametrize("stored", [True, False])
async def test_lost_engine_returns_with_new_weights(tmp_path: Path, stored: bool) -> None:
    service = scripted(replicas=2, spare=True, most_restarts=3)
    store = WeightStore(tmp_path / "store") if stored else None
    async with running(service, admin=[], store=store) as client:
        given = Path(new_weights(tmp_path / "new", "b"))
        await posted(client, "/update_weights", json={"weight_dir": str(given)})
        if stored:
            shutil.rmtree(given)
        requests = [asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(2)]
        await begun(service, 2)
        for link in service.fleet.links:
            os.kill(link.pid, 9)
        for task in requests:
            [choice] = (await task).json()["choices"]
            assert choice["token_ids"] == DRAWN and set(choice["weight_versions"]) == {"1"}
        await service.fleet.all_ready()
        assert service.fleet.num_restarts == 2
        assert all(link.hello.fingerprint == service.hello.fingerprint for link in service.fleet.links)


async def test_engines_lost_in_the_switch_keep_old_weights(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    service = scripted(most_restarts=5)
    async with running(service, admin=[], store=store) as client:
        requests = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await begun(service)
        body = {"weight_dir": new_weights(tmp_path / "new", "deadly")}
        assert (await call(client, "/update_weights", json=body)).status_code == 503
        [choice] = (await requests).json()["choices"]
        assert choice["token_ids"] == DRAWN and set(choice["weight_versions"]) == {"0"}
        assert (await posted(client, "/weight_info"))["weight_version"] == "0"
        assert store.kept is None and not (tmp_path / "store" / "current.json").exists()


async def test_next_server_starts_with_kept_weights(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    async with running(scripted(), admin=[], store=store) as client:
        for number in range(1, 4):
            body = {"weight_dir": new_weights(tmp_path / "new", f"w{number}"), "weight_version": f"v{number}"}
            await posted(client, "/update_weights", json=body)
    assert [path.name for path in sorted((tmp_path / "store").iterdir())] == ["current.json", "version-3"]
    store = WeightStore(tmp_path / "store")
    assert store.kept is not None and store.kept.weights == Weights("v3", 3, "", "w3")
    assert (store.folder / "model.safetensors").read_text() == "w3"


@pytest.mark.parametrize("stored", [True, False])
async def test_received_weights_outlive_engines_if_kept(tmp_path: Path, stored: bool) -> None:
    service = scripted(replicas=2, most_restarts=5)
    store = WeightStore(tmp_path / "store") if stored else None
    async with running(service, admin=[], store=store) as client:
        await posted(client, "/init_weight_transfer_engine", json={"init_info": INIT})
        await posted(client, "/start_weight_update")
        await posted(client, "/update_weights", json={"update_info": SENT})
        assert (await posted(client, "/weight_info"))["weight_version"] == "0"
        await posted(client, "/finish_weight_update", json={"weight_version": "v"})
        assert (await posted(client, "/weight_info"))["weights"] == "w"
        slept = await call(client, "/sleep")
        assert slept.status_code == (200 if stored else 409), slept.text
        await posted(client, "/wake_up")
        assert await service.fleet.roll() == stored
        [choice] = (await posted(client, "/v1/completions", json=ASK))["choices"]
        assert set(choice["weight_versions"]) == {"v"} and choice["token_ids"] == DRAWN
        assert service.fleet.num_restarts == 0


@pytest.mark.parametrize("stored", [True, False])
async def test_renamed_weights_name_later_tokens(tmp_path: Path, stored: bool) -> None:
    service = scripted(replicas=2, most_restarts=5)
    store = WeightStore(tmp_path / "store") if stored else None
    async with running(service, admin=[], store=store) as client:
        for before, name in ((None, "a"), (new_weights(tmp_path / "new", "b"), "c")):
            if before is not None:
                await posted(client, "/update_weights", json={"weight_dir": before})
            info = await posted(client, "/weight_info")
            body = ASK | {"receipt": True, "logprobs": None}
            requests = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
            await begun(service, 3)
            named = await posted(client, "/update_weight_version", json={"new_version": name})
            assert named == {"success": True, "new_version": name}
            assert await posted(client, "/weight_info") == info | {"weight_version": name}
            for task in requests:
                reply = (await task).json()
                assert await asyncio.to_thread(difference, reply) is None
                [choice] = reply["choices"]
                old = choice["weight_versions"].count(info["weight_version"])
                assert 0 < old < len(DRAWN) and choice["token_ids"] == DRAWN
                assert choice["weight_versions"][old:] == [name] * (len(DRAWN) - old)
                assert (reply["weight_version"], reply["system_fingerprint"]) == (name, info["fingerprint"])
        for odd in ({}, {"new_version": ""}, {"new_version": 1}, {"new_version": "a\n"}, {"new_version": None}):
            assert (await call(client, "/update_weight_version", json=odd)).status_code == 400
        assert (await posted(client, "/weight_info"))["weight_version"] == "c"
        for link in service.fleet.links:
            link.kill()
        await service.fleet.all_ready()
        [choice] = (await posted(client, "/v1/completions", json=ASK))["choices"]
        assert set(choice["weight_versions"]) == {"c"}
    if stored:
        kept = WeightStore(tmp_path / "store").kept
        assert kept is not None and (kept.version, kept.digest) == ("c", "b")


INIT = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 3}
SENT = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}


async def test_waiting_transfers_block_no_request(tmp_path: Path) -> None:
    service = scripted(replicas=2)
    async with running(service, admin=[]) as client:

        async def init(port: int) -> httpx.Response:
            body = {"init_info": INIT | {"master_port": port}}
            return await call(client, "/init_weight_transfer_engine", json=body)

        async def serves() -> None:
            async with asyncio.timeout(5):
                request = asyncio.create_task(client.post("/v1/completions", json=ASK))
                await begun(service)
                for path in ("/pause?mode=keep", "/resume", "/reset_prefix_cache", "/health", "/is_paused"):
                    await posted(client, path) if path != "/health" else await client.get(path)
                assert (await request).json()["choices"][0]["token_ids"] == DRAWN
                request = asyncio.create_task(client.post("/v1/completions", json=ASK))
                await begun(service)
                assert (await posted(client, "/abort_requests"))["aborted"] == 1
                await request
                await posted(client, "/pause?mode=wait")
                await posted(client, "/resume")
                await posted(client, "/weight_checker", json={"action": "checksum"})

        waiting = asyncio.create_task(init(NEVER))
        await serves()
        await posted(client, "/update_weights", json={"weight_dir": new_weights(tmp_path, "b")})
        assert (await init(9)).status_code == 200 and (await waiting).status_code == 409
        never = {"update_info": SENT | {"names": ["never"]}}
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": INIT}), ("/shutdown_weight_transfer_engine", None),
        ):  # fmt: skip
            waiting = asyncio.create_task(call(client, "/update_weights", json=never))
            await serves()
            assert not waiting.done()
            await posted(client, path, json=body)
            assert (await waiting).status_code == 409
        assert (await call(client, "/update_weights", json={"update_info": SENT})).status_code == 400
        assert (await posted(client, "/weight_info"))["weights"] == "b"
        assert (await init(9)).status_code == 200
        assert (await posted(client, "/update_weights", json={"update_info": SENT}))["weights"] == "w"


async def test_one_failing_engine_ends_a_transfer() -> None:
    service = scripted(replicas=2, most_restarts=5, spare=True)
    async with running(service, admin=[]) as client:
        never = {"update_info": SENT | {"names": ["never"]}}
        failing = {"init_info": INIT | {"master_port": FIRST_FAILS}}
        refused = await call(client, "/init_weight_transfer_engine", json=failing)
        assert refused.status_code == 400 and "cannot join" in refused.text
        silent = {"init_info": INIT | {"master_port": NEVER}}
        for path, body in (("/init_weight_transfer_engine", silent), ("/update_weights", never)):
            await posted(client, "/init_weight_transfer_engine", json={"init_info": INIT})
            waiting = asyncio.create_task(call(client, path, json=body))
            await asyncio.sleep(0.1)
            service.fleet.links[1].kill()
            assert (await waiting).status_code == 503
            await service.fleet.all_ready()
            again = await call(client, "/update_weights", json={"update_info": SENT})
            assert again.status_code == 400 and "init it again" in again.text


async def test_checksums_are_compared_by_name() -> None:
    async with running(scripted(replicas=2), admin=[]) as client:

        async def check(**body: Any) -> Any:
            return await posted(client, "/weight_checker", json=body)

        actual = await check(action="checksum")
        assert actual == {"checksums": {"a": "1", "b": "2"}, "weights": "3"}
        same = await check(action="compare", baseline=actual["checksums"])
        assert same["match"] and same["mismatches"] == [] and same["weights"] == same["baseline"]
        assert (await check(action="compare", baseline={"b": "2"}))["match"]
        other = await check(action="compare", baseline={"a": "1", "b": "x", "c": "y"})
        assert not other["match"] and other["mismatches"] == ["b", "c"]
        report = await check(action="compare", baseline={"a": "1"}, checksums=[{"a": "1"}, {"a": "9"}])
        assert report["mismatches"] == ["a"]
        odd = [{"action": "compare", "baseline": [1]}, {"action": "compare", "baseline": {"a": 1}}, {}]
        for body in (*odd, *({"action": action} for action in ("reset", "compare", "x", None))):
            assert (await call(client, "/weight_checker", json=body)).status_code == 400, body


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the embedded model after a change of every parameter."""
    folder = tmp_path_factory.mktemp("trained")
    draw = torch.Generator().manual_seed(0)
    tensors = load_file(TINY_FOLDER / "model.safetensors")
    new = {name: (t * (1 + 0.02 * torch.randn(t.shape, generator=draw))).to(t.dtype) for name, t in tensors.items()}
    save_file(new, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def trainable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the embedded model whose weights can change."""
    folder = tmp_path_factory.mktemp("trainable")
    actual = started(folder, "--admin-key", "none", "--weights", str(folder / "weights"))
    yield actual
    if actual.process.poll() is None:
        assert actual.stop() == 0
    assert not any("Traceback" in line for line in actual.lines), "".join(actual.lines)


@pytest.fixture
def trainer(trainable: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=trainable.url, timeout=120) as client:
        yield client
        client.post("/update_weights", json={"weight_dir": str(TINY_FOLDER)}).raise_for_status()


@pytest.fixture(scope="module")
def tiny_model() -> CompiledModel:
    return detcompile.compile("tiny", device="cpu")


PROMPT = {"prompt": "def mean(values):\n" * 12, "max_tokens": 24, "seed": 5, "temperature": 1.0, "logprobs": 0}


def drawn(client: httpx.Client, **more: Any) -> Any:
    answer = client.post("/v1/completions", json=PROMPT | {"return_token_ids": True} | more)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_served_weights_are_those_of_the_folder(trainer: httpx.Client, trained: Path) -> None:
    before, info = drawn(trainer), trainer.get("/weight_info").json()
    done = trainer.post("/update_weights", json={"weight_dir": str(trained)})
    assert done.status_code == 200, done.text
    actual = trainer.post("/weight_checker", json={"action": "checksum"}).json()
    ours = weight_digests(load_file(trained / "model.safetensors"))
    assert {name: actual["checksums"][name] for name in ours} == ours
    assert actual["weights"] == weights_digest(actual["checksums"]) == done.json()["weights"] != info["weights"]
    compared = trainer.post("/weight_checker", json={"action": "compare", "baseline": ours}).json()
    assert compared["match"] and compared["weights"] == compared["baseline"]
    after = drawn(trainer)
    assert after != before and drawn(trainer) == after  # the second from the prefix cache
    assert trainer.post("/reset_prefix_cache").json() == {"success": True} and drawn(trainer) == after
    back = trainer.post("/update_weights", json={"weight_dir": str(TINY_FOLDER)}).json()
    assert back["fingerprint"] == info["fingerprint"] and drawn(trainer) == before


def test_unfit_tensors_are_refused_by_name(trainer: httpx.Client, trained: Path, tmp_path: Path) -> None:
    before = drawn(trainer), trainer.get("/weight_info").json()
    tensors = load_file(trained / "model.safetensors")
    names = sorted(tensors)
    name, other = names[0], names[-1]
    whole = (trained / "model.safetensors").read_bytes()

    def refused(what: str, new: dict[str, torch.Tensor] | bytes) -> None:
        folder = tmp_path / "odd"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if isinstance(new, bytes):
            (folder / "model.safetensors").write_bytes(new)
        else:
            save_file(new, folder / "model.safetensors")
        answer = trainer.post("/update_weights", json={"weight_dir": str(folder)})
        assert answer.status_code == 400 and what in answer.json()["error"]["message"], answer.text
        assert (drawn(trainer), trainer.get("/weight_info").json()) == before

    refused(other, {key: value for key, value in tensors.items() if key != other})
    refused(name, tensors | {name: tensors[name][:-1].contiguous()})
    refused(name, tensors | {name: tensors[name].to(torch.float16)})
    refused("extra.weight", tensors | {"extra.weight": torch.zeros(2)})
    for data in (whole[:-1], whole[: len(whole) // 2], whole[:3], b"", b"version https://git-lfs.github.com/spec/v1"):
        refused("model.safetensors", data)
    refused("model.safetensors", whole + b"more")

    def refused_parts(what: str, parts: dict[str, list[str]], places: dict[str, str]) -> None:
        folder = tmp_path / "parts"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for part, held in parts.items():
            save_file({name: tensors[name] for name in held}, folder / part)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        answer = trainer.post("/update_weights", json={"weight_dir": str(folder)})
        assert answer.status_code == 400 and what in answer.json()["error"]["message"], answer.text

    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    places = {name: part for part, held in parts.items() for name in held}
    refused_parts(names[9], parts | {"b.safetensors": names[10:]}, places)
    refused_parts("b.safetensors is missing", {"a.safetensors": names[:9]}, places)
    refused_parts(names[8], parts | {"b.safetensors": names[8:]}, places)
    refused_parts("outside", parts, places | {name: "../b.safetensors"})
    refused_parts("weight_map", parts, {})
    for place, what in (("x" * 300, "cannot be read"), (str(tmp_path / "parts" / "a.safetensors"), "not a folder")):
        answer = trainer.post("/update_weights", json={"weight_dir": place})
        assert answer.status_code == 400 and what in answer.json()["error"]["message"], answer.text
    assert (drawn(trainer), trainer.get("/weight_info").json()) == before


def test_replay_checks_each_span_with_its_weights(
    trainer: httpx.Client, trained: Path, tiny_model: CompiledModel
) -> None:
    body = PROMPT | {"max_tokens": 400, "receipt": True, "stream": True, "return_token_ids": True, "ignore_eos": True}
    versions, tokens, changes = [], [], [TINY_FOLDER, trained]
    admin = httpx.Client(base_url=trainer.base_url)
    with trainer.stream("POST", "/v1/completions", json=body) as answer, admin:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if len(changes) > 0 and len(tokens) >= 60 * (2 - len(changes)):
                assert admin.post("/pause?mode=keep", timeout=60).status_code == 200
                body = {"weight_dir": str(changes.pop())}
                admin.post("/update_weights", json=body, timeout=60).raise_for_status()
                assert admin.post("/resume").status_code == 200
            assert "choices" in chunk, chunk
            for choice in chunk["choices"]:
                tokens += choice["token_ids"]
                versions += choice["weight_versions"]
            receipt = chunk.get("receipt")
    names = list(dict.fromkeys(versions))  # the first and the last are the same weights
    assert len(tokens) == 400 == len(versions) and versions == sorted(versions, key=names.index) and len(names) == 3
    verdict = trainer.post("/v1/verify", json=receipt).json()
    assert verdict["outcome"] == "incomparable" and verdict["field"] == "drawn_by" and names[1] in verdict["message"]
    envelope = Envelope(**receipt)
    parts = tiny_model.fingerprint_parts
    checked = replay(tiny_model, envelope, folders=[trained])
    assert (checked.outcome, checked.num_tokens) == ("equal", 400), checked
    changed = json.loads(base64.b64decode(receipt["payload"]))
    changed["prompts"][0]["samples"][0]["drawn_by"][1]["start"] += 40
    other = receipt | {"payload": base64.b64encode(json.dumps(changed).encode()).decode()}
    assert replay(tiny_model, Envelope(**other), folders=[trained]).outcome == "differs"
    assert tiny_model.fingerprint_parts == parts


def test_partial_updates_keep_the_other_weights(
    trainable: Server, trainer: httpx.Client, trained: Path, tmp_path: Path
) -> None:
    """Digests, fingerprint and answers are those of the whole weights, also after the engine is lost."""
    first, new = (load_file(folder / "model.safetensors") for folder in (TINY_FOLDER, trained))
    names = ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"]
    folders = {name: tmp_path / name for name in ("whole", "part", "unknown", "odd")}
    parts: dict[str, dict[str, torch.Tensor]] = {
        "whole": first | {name: new[name] for name in names},
        "part": {name: new[name] for name in names},
        "unknown": {"model.layers.99.weight": new[names[0]]},
        "odd": {names[0]: new[names[0]].float()},
    }
    for name, folder in folders.items():
        folder.mkdir()
        save_file(parts[name], folder / "model.safetensors")

    def update(name: str, **more: Any) -> httpx.Response:
        return trainer.post("/update_weights", json={"weight_dir": str(folders[name])} | more)

    before, info = drawn(trainer), trainer.get("/weight_info").json()
    update("whole").raise_for_status()
    expected, whole = drawn(trainer), trainer.get("/weight_info").json()
    assert expected != before
    trainer.post("/update_weights", json={"weight_dir": str(TINY_FOLDER)}).raise_for_status()
    refused = [update("part"), update("unknown", partial=True), update("odd", partial=True), update("part", partial=1)]
    for answer, text in zip(refused, ("is missing", "layers.99", names[0], "partial"), strict=True):
        assert answer.status_code == 400 and text in answer.json()["error"]["message"], answer.text
    assert drawn(trainer) == before and trainer.get("/weight_info").json()["weights"] == info["weights"]
    done = update("part", partial=True, weight_version="part").json()
    assert (done["weights"], done["fingerprint"]) == (whole["weights"], whole["fingerprint"])
    body = {"action": "compare", "baseline": weight_digests(parts["whole"])}
    assert trainer.post("/weight_checker", json=body).json()["match"] and drawn(trainer) == expected
    trainer.post("/sleep").raise_for_status()  # ends the engine
    trainer.post("/wake_up").raise_for_status()
    assert drawn(trainer) == expected and trainer.get("/weight_info").json()["weight_version"] == "part"


def test_replayer_restores_the_weights_on_errors(trained: Path, tiny_model: CompiledModel, tmp_path: Path) -> None:
    """Whether the first, second or last folder is bad."""
    tensors = load_file(trained / "model.safetensors")
    name = next(iter(tensors))
    odd = {
        "shape": {name: tensors[name][:-1].contiguous()},
        "dtype": {name: tensors[name].double()},
        "unknown": {"extra.weight": torch.zeros(2)},
    }
    for case, change in odd.items():
        (tmp_path / case).mkdir()
        save_file(tensors | change, tmp_path / case / "model.safetensors")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:-1])
    parts = tiny_model.fingerprint_parts
    for case in (*odd, "cut", "missing", "x" * 300):
        for before in ([], [trained], [trained, TINY_FOLDER]):
            with pytest.raises(InvalidInput):
                Replayer(tiny_model, folders=[*before, tmp_path / case])
            assert tiny_model.fingerprint_parts == parts, (case, before)

    def interrupted() -> Iterator[Path]:
        yield trained
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Replayer(tiny_model, folders=interrupted())
    assert tiny_model.fingerprint_parts == parts


class Trainer:
    """A client that makes the calls of vLLM's trainer side, and sends tensors over gloo, or from a GPU over NCCL."""

    def __init__(self, client: httpx.Client, device: str = "cpu", seconds: float = 60.0) -> None:
        self._client = client
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        size = 1 + client.get("/get_world_size").json()["world_size"]
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
        info |= {"packed": True, "timeout_seconds": seconds}
        with self.posting("/init_weight_transfer_engine", {"init_info": info}) as status:
            self.group = TransferGroup("127.0.0.1", port, 0, size, torch.device(device), seconds)
        assert status == [200]

    @contextlib.contextmanager
    def posting(self, path: str, body: Any = None) -> Iterator[list[int]]:
        """Post beside the block's work; the status comes at its end."""
        status: list[int] = []

        def post() -> None:
            with httpx.Client(base_url=self._client.base_url, timeout=120) as client:
                answer = client.post(path, json=body)
                status.append(answer.status_code)
                self.answer = answer.json()

        thread = threading.Thread(target=post)
        thread.start()
        try:
            yield status
        finally:
            thread.join()

    def send(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        packed: bool = True,
        bucket_bytes: int = 1 << 20,
        sent: dict[str, torch.Tensor] | None = None,
        **more: Any,
    ) -> int:
        """Announce tensors, and send them or others; return the status of /update_weights."""
        info = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "packed": packed,
            "packed_buffer_size_bytes": bucket_bytes,
            "packed_num_buffers": 2,
        }
        with self.posting("/update_weights", {"update_info": info} | more) as status:
            self.group.send((sent or tensors).items(), packed=packed, bucket_bytes=bucket_bytes)
        return status[0]


def test_weights_arrive_through_vllm_calls(trainer: httpx.Client, trained: Path) -> None:
    before = drawn(trainer), trainer.get("/weight_info").json()
    tensors = load_file(trained / "model.safetensors")
    assert trainer.get("/health").status_code == 200
    assert trainer.get("/v1/models").json()["data"][0]["max_model_len"] > 0
    config = trainer.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    trainer.post("/shutdown_weight_transfer_engine").raise_for_status()  # an earlier test may have started one
    missing = trainer.post("/update_weights", json={"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    assert missing.status_code == 400 and "weight transfer" in missing.json()["error"]["message"]
    sender = Trainer(trainer)
    for number, packed in enumerate((True, False)):
        trainer.post("/pause", params={"mode": "keep"}).raise_for_status()
        trainer.post("/start_weight_update", json={"is_checkpoint_format": True}).raise_for_status()
        names = sorted(tensors)
        for part in (names[:30], names[30:]):
            assert sender.send({name: tensors[name] for name in part}, packed=packed) == 200
        finished = trainer.post("/finish_weight_update", json={"weight_version": f"step-{number}"})
        assert finished.status_code == 200 and finished.json()["weight_version"] == f"step-{number}"
        trainer.post("/resume").raise_for_status()
    after, info = drawn(trainer), trainer.get("/weight_info").json()
    assert after != before[0] and info["weights"] != before[1]["weights"]
    ours = weight_digests(tensors)
    assert trainer.post("/weight_checker", json={"action": "compare", "baseline": ours}).json()["match"]
    assert trainer.post("/finish_weight_update").status_code == 409
    odd = dict(tensors)
    del odd["model.norm.weight"]
    for new, named in ((odd, "model.norm.weight"), (tensors | {names[0]: tensors[names[0]].float()}, names[0])):
        trainer.post("/start_weight_update").raise_for_status()
        assert sender.send(new) == 200
        refused = trainer.post("/finish_weight_update", json={})
        assert refused.status_code == 400 and named in refused.json()["error"]["message"], refused.text
        assert sender.send(new) == 400 and named in sender.answer["error"]["message"]  # without a start
        assert (drawn(trainer), trainer.get("/weight_info").json()) == (after, info)
    first = load_file(TINY_FOLDER / "model.safetensors")
    assert sender.send(first) == 200 and sender.answer["weights"] == before[1]["weights"]
    assert drawn(trainer) == before[0]


def test_partial_transfer_keeps_other_weights(trainer: httpx.Client, trained: Path, tmp_path: Path) -> None:
    """In one call or several. Weights of wrong shape or lost in transfer change nothing."""
    first, new = (load_file(folder / "model.safetensors") for folder in (TINY_FOLDER, trained))
    names = ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"]
    part = {name: new[name] for name in names}
    before, info = drawn(trainer), trainer.get("/weight_info").json()
    save_file(first | part, tmp_path / "model.safetensors")
    whole = trainer.post("/update_weights", json={"weight_dir": str(tmp_path)}).json()
    expected, sender = drawn(trainer), Trainer(trainer)
    assert expected != before
    for several in (False, True):
        assert sender.send(first) == 200 and drawn(trainer) == before
        if several:
            trainer.post("/start_weight_update", json={"partial": True}).raise_for_status()
            for name in names:
                assert sender.send({name: new[name]}, partial=name == names[0]) == 200
            done = trainer.post("/finish_weight_update", json={"weight_version": "part"}).json()
        else:
            assert sender.send(part, partial=True) == 200
            done = sender.answer
        assert (done["weights"], done["fingerprint"]) == (whole["weights"], whole["fingerprint"])
        body = {"action": "compare", "baseline": weight_digests(first | part)}
        assert trainer.post("/weight_checker", json=body).json()["match"] and drawn(trainer) == expected
    odd = {"model.layers.99.weight": new[names[0]]}, {names[1]: new[names[1]].float()}
    for tensors, text in zip(odd, ("layers.99", names[1]), strict=True):
        assert sender.send(tensors, partial=True) == 400 and text in sender.answer["error"]["message"]
    assert sender.send(part) == 400 and "is missing" in sender.answer["error"]["message"]
    trainer.post("/start_weight_update").raise_for_status()
    info = {"update_info": SENT, "partial": True}
    refused = trainer.post("/update_weights", json=info)
    assert refused.status_code == 400 and "/start_weight_update" in refused.json()["error"]["message"]
    trainer.post("/start_weight_update", json={"partial": True}).raise_for_status()
    assert sender.send({names[0]: first[names[0]]}) == 200
    sender = Trainer(trainer)  # the engines forget what they received
    assert sender.send({names[1]: first[names[1]]}) == 200
    refused = trainer.post("/finish_weight_update")
    assert refused.status_code == 400 and "lost" in refused.json()["error"]["message"]
    assert trainer.post("/weight_checker", json=body).json()["match"] and drawn(trainer) == expected


def test_weights_arrive_through_skyrl_calls(trainer: httpx.Client, trained: Path) -> None:
    """As RemoteInferenceClient of skyrl 0.3.0 sends them: it calls methods of its vLLM workers."""
    tensors = load_file(trained / "model.safetensors")

    def called(method: str, **kwargs: Any) -> httpx.Response:
        return trainer.post("/collective_rpc", json={"method": method, "kwargs": kwargs})

    assert trainer.request("GET", "/get_world_size", json={}).json() == {"world_size": 1}
    sender = Trainer(trainer)
    trainer.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
    assert called("skyrl_start_weight_update", is_checkpoint_format=True).json() == {"results": [None]}
    info = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "packed": True,
    }
    body = {"method": "update_weights_nccl", "kwargs": {"update_info": info}}
    with sender.posting("/collective_rpc", body) as status:
        sender.group.send(tensors.items())
    assert status == [200]
    trainer.post("/collective_rpc", json={"method": "skyrl_finish_weight_update"}).raise_for_status()
    trainer.post("/resume").raise_for_status()
    trainer.post("/reset_prefix_cache", json={"reset_running_requests": False}).raise_for_status()
    baseline = {"action": "compare", "baseline": weight_digests(tensors)}
    assert trainer.post("/weight_checker", json=baseline).json()["match"]
    ask = {"sampling_params": {"max_tokens": 4, "logprobs": 0}, "model": "tiny", "token_ids": [5, 6, 7]}
    answer = trainer.post("/inference/v1/generate", json=ask, headers={"X-Session-ID": "a"}).json()
    [choice] = answer["choices"]
    assert len(choice["token_ids"]) == 4 == len([each["logprob"] for each in choice["logprobs"]["content"]])
    assert called("skyrl_finish_weight_update").status_code == 409
    for method in ("sleep", "update_weights_nccl", "update_weights_ipc"):
        assert called(method).status_code == 400


def test_weights_arrive_through_prime_rl_calls(trainer: httpx.Client, trained: Path, tmp_path: Path) -> None:
    """As the client of prime-rl 0.8.0 sends them, with its marker in the folder; it also scores tokens."""
    folder = tmp_path / "broadcasts" / "step_1"
    shutil.copytree(trained, folder)
    (folder / "NCCL_READY").touch()
    assert trainer.get("/health").status_code == 200
    assert "tiny" in [model["id"] for model in trainer.get("/v1/models").json()["data"]]
    trainer.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
    trainer.post("/update_weights", json={"weight_dir": folder.as_posix()}).raise_for_status()
    trainer.post("/resume").raise_for_status()
    baseline = {"action": "compare", "baseline": weight_digests(load_file(trained / "model.safetensors"))}
    assert trainer.post("/weight_checker", json=baseline).json()["match"]
    tokens = drawn(trainer)[0]
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    ask = {"model": "tiny", "token_ids": tokens, "sampling_params": sampling}
    first, *scored = trainer.post("/inference/v1/generate", json=ask).json()["prompt_logprobs"]
    assert first is None and [int(next(iter(entry))) for entry in scored] == tokens[1:]


def test_silent_sender_times_out(trainer: httpx.Client, trained: Path) -> None:
    """The server answers requests meanwhile and accepts another sender afterwards."""
    tensors = load_file(trained / "model.safetensors")
    expected = drawn(trainer), trainer.get("/weight_info").json()
    sender = Trainer(trainer, seconds=1.5)
    body = {"update_info": SENT | {"names": ["model.norm.weight"]}}
    start = time.monotonic()
    with sender.posting("/update_weights", body) as status:
        assert (drawn(trainer), trainer.get("/weight_info").json()) == expected and status == []
    assert status == [400] and 1 < time.monotonic() - start < 30
    assert "the weight transfer broke off at model.norm.weight" in sender.answer["error"]["message"]
    assert (drawn(trainer), trainer.get("/weight_info").json()) == expected
    again = trainer.post("/update_weights", json=body)
    assert again.status_code == 400 and "init it again" in again.json()["error"]["message"]
    assert Trainer(trainer).send(tensors) == 200
    baseline = {"action": "compare", "baseline": weight_digests(tensors)}
    assert trainer.post("/weight_checker", json=baseline).json()["match"]


DYING = """
import sys, time, torch
from detcompile.weight_transfer import SENT, TransferGroup
port, size, device = int(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3])
group = TransferGroup("127.0.0.1", port, 0, size, device, 60)
group.send([("model.norm.weight", torch.ones(64))], packed=False)
group._store.set(f"{SENT}/1", "256")  # announced, never sent
print("announced", flush=True)
time.sleep(600)
"""


def refuse_dying_sender(client: httpx.Client, device: str) -> None:
    """Kill a sender in the middle of a transfer: the error comes long before the time limit."""
    expected = drawn(client), client.get("/weight_info").json()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = 1 + client.get("/get_world_size").json()["world_size"]
    arguments = [sys.executable, "-c", DYING, str(port), str(size), device]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
        client.post("/init_weight_transfer_engine", json={"init_info": info}).raise_for_status()
        names = ["model.norm.weight", "model.layers.0.input_layernorm.weight"]
        body = {"update_info": {"names": names, "dtype_names": ["float32"] * 2, "shapes": [[64]] * 2}}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/update_weights", json=body)
            assert sender.stdout.readline() == "announced\n"
            time.sleep(0.5)
            assert not waiting.done()
            sender.kill()
            refused = waiting.result(timeout=30)
    assert refused.status_code == 400, refused.text
    assert f"the weight transfer broke off at {names[1]}" in refused.json()["error"]["message"]
    assert (drawn(client), client.get("/weight_info").json()) == expected


def test_dead_sender_is_detected(trainer: httpx.Client) -> None:
    refuse_dying_sender(trainer, "cpu")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("packed", [True, False])
def test_unannounced_sizes_are_refused(trainer: httpx.Client, size: int, packed: bool) -> None:
    before, tensors = trainer.get("/weight_info").json(), load_file(TINY_FOLDER / "model.safetensors")
    sender, [name, *_] = Trainer(trainer), tensors
    with contextlib.suppress(InvalidInput):  # the receiver has left
        sender.send(tensors, packed=packed, sent=tensors | {name: torch.zeros(size, dtype=torch.bfloat16)})
    assert "bytes instead of" in sender.answer["error"]["message"]
    again = trainer.post("/update_weights", json={"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    assert again.status_code == 400 and "init it again" in again.json()["error"]["message"]
    assert trainer.get("/weight_info").json() == before and drawn(trainer)


def test_malformed_transfers_are_refused(trainer: httpx.Client) -> None:
    init = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    tensors = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}
    bodies = [
        ("/init_weight_transfer_engine", {"init_info": init | {name: value}})
        for name, value in [
            ("master_address", ""), ("master_address", None), ("master_port", 0), ("master_port", 1 << 20),
            ("timeout_seconds", 0), ("timeout_seconds", 1e9), ("timeout_seconds", "1"),
            ("rank_offset", 0), ("rank_offset", 2), ("world_size", 1), ("world_size", "2"), ("world_size", 1 << 70),
        ]
    ] + [
        ("/init_weight_transfer_engine", {"init_info": {}}), ("/init_weight_transfer_engine", {}),
        ("/init_weight_transfer_engine", {"init_info": {"packed": True}}), ("/start_weight_update", {"partial": 1}),
        ("/start_weight_update", {"is_checkpoint_format": False}), ("/start_weight_update", []),
        ("/finish_weight_update", {"weight_version": ""}), ("/finish_weight_update", {"weight_version": 7}),
        ("/update_weights", {"update_info": {}}), ("/update_weights", {"update_info": None}),
        ("/update_weights", {"update_info": tensors, "weight_dir": "/x"}),
    ] + [
        ("/update_weights", {"update_info": tensors | change})
        for change in [
            {"names": []}, {"names": [1]}, {"dtype_names": ["x"]}, {"dtype_names": ["nn"]}, {"shapes": [[-1]]},
            {"shapes": [[1 << 39, 1 << 39]]}, {"shapes": [[1 << 50]]}, {"shapes": [2]}, {"update_kind": "sparse_flat"},
            {"packed": 3}, {"packed_buffer_size_bytes": 0}, {"ipc_handles_pickled": ""}, {"ipc_handles_pickled": 1},
            {"ipc_handles_pickled": "", "packed": True, "tensor_sizes": [4]}, {"tensor_sizes": 4},
        ]
    ]  # fmt: skip
    before = trainer.get("/weight_info").json()
    for path, body in bodies:
        answer = trainer.post(path, json=body)
        assert answer.status_code == 400, (path, body, answer.text)
    assert trainer.get("/weight_info").json() == before


NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


@pytest.mark.gpu
@NEEDS_TWO_GPUS
def test_weights_arrive_over_nccl(tmp_path: Path, trained: Path) -> None:
    """From the second GPU to an engine on the first."""
    tensors = load_file(trained / "model.safetensors")
    server = started(tmp_path, "--admin-key", "none", "--device", "cuda")
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            sender = Trainer(client, "cuda:1")
            before = drawn(client)
            for packed, bucket_bytes in ((True, 1 << 30), (True, 1 << 16), (False, 1)):
                client.post("/start_weight_update").raise_for_status()
                assert sender.send(tensors, packed=packed, bucket_bytes=bucket_bytes) == 200, sender.answer
                client.post("/finish_weight_update").raise_for_status()
                body = {"action": "compare", "baseline": weight_digests(tensors)}
                assert client.post("/weight_checker", json=body).json()["match"]
                assert drawn(client) != before
                first = load_file(TINY_FOLDER / "model.safetensors")
                assert sender.send(first) == 200 and drawn(client) == before
            refuse_dying_sender(client, "cuda:1")
            silent = Trainer(client, "cuda:1", seconds=20.0)
            silent.group._store.set("sent/0", "4")  # announced, never sent: only NCCL waits
            with silent.posting("/update_weights", {"update_info": SENT}) as status:
                assert drawn(client) == before
            assert status == [400] and "took more than 20 s" in silent.answer["error"]["message"]
            assert Trainer(client, "cuda:1").send(tensors) == 200 and drawn(client) != before
    finally:
        server.stop()


def packed_infos(tensors: dict[str, torch.Tensor], num_bytes: int) -> Iterator[dict[str, Any]]:
    """Fill one buffer on the GPU again and again, as vLLM's packed IPC does; yield the body of each."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    handle = {cuda_ipc.gpu_uuid(buffer.device): reduce_tensor(buffer)[1]}
    waiting = list(tensors.items())
    while waiting:
        sizes = list(itertools.accumulate(tensor.nbytes for _, tensor in waiting))
        count = sum(size <= num_bytes for size in sizes)
        chunk, waiting = waiting[:count], waiting[count:]
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in chunk])
        buffer[: len(flat)].copy_(flat)
        torch.cuda.synchronize()
        yield {
            "names": [name for name, _ in chunk],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
            "tensor_sizes": [tensor.nbytes for _, tensor in chunk],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handle)).decode(),
        }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_arrive_over_cuda_ipc(tmp_path: Path, trained: Path) -> None:
    """From this process to an engine on the same GPU, by the calls of vLLM's HTTP client."""
    new, first = (load_file(folder / "model.safetensors") for folder in (trained, TINY_FOLDER))
    names = list(new)
    server = started(tmp_path, "--admin-key", "none", "--device", "cuda")
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:

            def sent(tensors: dict[str, torch.Tensor], **more: Any) -> httpx.Response:
                on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
                body = {"update_info": cuda_ipc.update_info(on_gpu.items())}
                return client.post("/update_weights", json=body | more)

            client.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
            before = drawn(client)
            for parts in ([names], [names[:30], names[30:]]):
                client.post("/start_weight_update").raise_for_status()
                for part in parts:
                    sent({name: new[name] for name in part}).raise_for_status()
                client.post("/finish_weight_update").raise_for_status()
                body = {"action": "compare", "baseline": weight_digests(new)}
                assert client.post("/weight_checker", json=body).json()["match"]
                after = drawn(client)
                assert after != before
                refused = sent(first | {names[0]: first[names[0]].float()})
                assert refused.status_code == 400 and names[0] in refused.json()["error"]["message"], refused.text
                assert drawn(client) == after
                sent(first).raise_for_status()
                assert drawn(client) == before
            sent({names[0]: new[names[0]]}, partial=True).raise_for_status()
            body = {"action": "compare", "baseline": weight_digests(first | {names[0]: new[names[0]]})}
            assert client.post("/weight_checker", json=body).json()["match"]
            client.post("/init_weight_transfer_engine", json={"init_info": {"packed": True}}).raise_for_status()
            sizes = [tensor.nbytes for tensor in new.values()]
            for num_bytes in (max(sizes), sum(sizes)):
                sent(first).raise_for_status()
                client.post("/start_weight_update").raise_for_status()
                for info in packed_infos(new, num_bytes):
                    client.post("/update_weights", json={"update_info": info}).raise_for_status()
                client.post("/finish_weight_update").raise_for_status()
                body = {"action": "compare", "baseline": weight_digests(new)}
                assert client.post("/weight_checker", json=body).json()["match"] and drawn(client) == after
    finally:
        server.stop()


@pytest.fixture(scope="module")
def expected_of(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Callable[[str], tuple[Any, str]]:
    """Answers and digest of the trained weights on a device, from one process."""

    @functools.cache
    def expected(device: str) -> tuple[Any, str]:
        server = started(tmp_path_factory.mktemp(device), "--admin-key", "none", "--device", device)
        try:
            with httpx.Client(base_url=server.url, timeout=120) as client:
                client.post("/update_weights", json={"weight_dir": str(trained)}).raise_for_status()
                return drawn(client), client.get("/weight_info").json()["weights"]
        finally:
            server.stop()

    return expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", ["--tp", "--pp"])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_TWO_GPUS])],
)
def test_ranks_take_new_weights(
    tmp_path: Path, trained: Path, expected_of: Callable[[str], tuple[Any, str]], device: str, split: str
) -> None:
    """Two ranks or stages give the result of one. Weights missing on any of them are refused by name."""
    expected, digest = expected_of(device)
    tensors = load_file(trained / "model.safetensors")
    del tensors["model.norm.weight"]
    first = {name: load_file(TINY_FOLDER / "model.safetensors")[name] for name in ("model.norm.weight", *tensors)[:9]}
    for name, part in (("odd", tensors), ("part", first)):
        (tmp_path / name).mkdir()
        save_file(part, tmp_path / name / "model.safetensors")
    server = started(tmp_path, "--admin-key", "none", "--device", device, split, "2")
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            before = drawn(client)
            refused = client.post("/update_weights", json={"weight_dir": str(tmp_path / "odd")})
            assert refused.status_code == 400 and "model.norm.weight" in refused.json()["error"]["message"]
            assert drawn(client) == before
            part = {"weight_dir": str(tmp_path / "part"), "partial": True}
            refused = client.post("/update_weights", json=part)
            assert refused.status_code == 400 and "first give whole weights" in refused.json()["error"]["message"]
            actual = client.post("/update_weights", json={"weight_dir": str(trained)}).json()
            assert actual["weights"] == digest and drawn(client) == expected
            body = {"action": "compare", "baseline": weight_digests(tensors | first)}
            client.post("/update_weights", json=part).raise_for_status()
            assert client.post("/weight_checker", json=body).json()["match"]
            partly = drawn(client)
            assert partly != expected
            if device == "cpu":
                sender, whole = Trainer(client), load_file(trained / "model.safetensors")
                client.post("/update_weights", json={"weight_dir": str(trained)}).raise_for_status()
                assert sender.send(first, partial=True) == 200, sender.answer
                assert client.post("/weight_checker", json=body).json()["match"] and drawn(client) == partly
                assert sender.send(first, partial=True) == 400
                assert "first give whole weights" in sender.answer["error"]["message"]
                assert sender.send(whole) == 200 and drawn(client) == expected
    finally:
        server.stop()


@pytest.mark.exhaustive  # 80 CPU seconds
def test_exact_server_quantizes_new_weights(tmp_path: Path, trained: Path) -> None:
    """On one rank and on three. A restarted engine has them, and a replay quantizes them, too."""
    tensors = load_file(trained / "model.safetensors")
    for name, part in (("odd", dict([*tensors.items()][1:])), ("wide", {n: t.float() for n, t in tensors.items()})):
        (tmp_path / name).mkdir()
        save_file(part, tmp_path / name / "model.safetensors")
    model = detcompile.compile("tiny", device="cpu", numerics=Numerics(arithmetic="exact8x16"))
    expected = None
    for tp in ("1", "3"):
        options = ("--admin-key", "none", "--device", "cpu", "--numerics", "exact8x16", "--tp", tp)
        server = started(tmp_path, *options, "--weights", str(tmp_path / f"store{tp}"))
        try:
            with httpx.Client(base_url=server.url, timeout=120) as client:
                before, info = drawn(client), client.get("/weight_info").json()
                assert info["fingerprint"] == model.fingerprint
                for folder, more in (("odd", {}), ("wide", {}), ("odd", {"partial": True})):
                    refused = client.post("/update_weights", json={"weight_dir": str(tmp_path / folder)} | more)
                    assert refused.status_code == 400, refused.text
                assert drawn(client) == before and client.get("/weight_info").json() == info
                client.post("/update_weights", json={"weight_dir": str(trained)}).raise_for_status()
                after = drawn(client), client.get("/weight_info").json()["fingerprint"]
                expected = expected or after
                assert after == expected and after[0] != before
                client.post("/sleep").raise_for_status()  # ends the engine
                client.post("/wake_up").raise_for_status()
                assert drawn(client) == after[0]
                receipt = client.post("/v1/completions", json=PROMPT | {"receipt": True}).json()["receipt"]
        finally:
            server.stop()
        replayed = replay(model, Envelope(**receipt), folders=[trained])
        assert replayed.outcome == "equal", replayed
        assert model.fingerprint == info["fingerprint"]


@pytest.mark.exhaustive
def test_killed_run_resumes_to_same_weights() -> None:
    command = [sys.executable, "-m", "benchmarks.rl_drill", "--steps", "3", "--kills", "2"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0 and '"equal": 1' in finished.stdout, finished.stdout + finished.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_updates_under_load_never_mix_versions(mode: str) -> None:
    command = [sys.executable, "-m", "benchmarks.weight_switches", "--answers", "20", "--clients", "4", "--mode", mode]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0 and '"mixed": 0' in finished.stdout, finished.stdout + finished.stderr
