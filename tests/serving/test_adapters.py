"""Adapters by name on a server: the routes over scripted engines, and the bits of a real one."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

import detcompile
from detcompile import EngineConfig, SamplingParams
from detcompile.commands.serve import _adapters
from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.serving.control import ADAPTER_PATHS, RELOADS
from detcompile.serving.engines.protocol import AdapterFile
from detcompile.serving.grammar_check import GrammarCheck
from detcompile.serving.journal.journal import Journal
from detcompile.serving.receipts.envelope import read_envelope
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import started
from tests.serving.receipts.receipt_cases import TAMPERINGS, changed
from tests.serving.scripted_engine import PARTS, digest_of
from tests.serving.scripted_service import SPEC, running, scripted
from tests.serving.test_control import begun

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ASK = {"prompt": [5], "max_tokens": 3, "seed": 3, "logprobs": 0, "receipt": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "seed": 3}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.usefixtures("in_the_root")
async def test_adapters_need_an_admin_key() -> None:
    async with running(scripted()) as http:
        for path in ADAPTER_PATHS:
            assert (await http.post(path, json={"lora_name": "a", "lora_path": "a"})).status_code == 404
    async with running(scripted(), admin=[b"0" * 32]) as http:
        for path in ADAPTER_PATHS:
            assert (await http.post(path, json={"lora_name": "a", "lora_path": "a"})).status_code == 401


@pytest.mark.usefixtures("in_the_root")
async def test_model_of_a_request_names_its_adapter() -> None:
    service = scripted(replicas=2, most_restarts=2, chat_template=TEMPLATE)
    async with running(service, admin=[]) as http:
        requests = {"lora_name": "sql", "lora_path": "folder"}
        assert (await http.post("/v1/completions", json=ASK | {"model": "sql"})).status_code == 404
        loaded = await http.post(LOAD, json=requests)
        assert loaded.text == "Success: LoRA adapter 'sql' added successfully." and loaded.status_code == 200
        whole = fingerprint(PARTS | {"adapter": digest_of("folder")})
        models = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
        assert models["sql"]["fingerprint"] == whole and models["sql"]["parent"] == "scripted"
        assert (await http.get("/v1/models/sql")).json() == models["sql"]

        async def answer() -> dict[str, Any]:
            actual = await http.post("/v1/completions", json=ASK | {"model": "sql"})
            assert actual.status_code == 200, actual.text
            return actual.json()

        first = await answer()
        assert (first["model"], first["system_fingerprint"]) == ("sql", whole)
        assert first["choices"][0]["logprobs"]["token_logprobs"] == [-0.25] * 3  # the scripted engine's mark
        plain = (await http.post("/v1/completions", json=ASK)).json()
        assert plain["model"] == "scripted" and plain["system_fingerprint"] == "f" * 64
        assert plain["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions/tokens", CHAT | {"tokens": [5]}),
            ("/v1/messages", CHAT),
            ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3}}),
        ]
        for path, body in bodies:
            actual = (await http.post(path, json=body | {"model": "sql"})).json()
            assert (actual["model"], actual["system_fingerprint"]) == ("sql", whole), path
        short = {"input_ids": [5], "lora_path": "sql", "sampling_params": {"max_new_tokens": 2}}
        assert (await http.post("/generate", json=short)).json()["meta_info"]["system_fingerprint"] == whole
        wrong = (await http.post("/generate", json=short | {"lora_path": "no"})).json()["error"]
        assert wrong["param"] == "lora_path"
        for link in list(service.fleet.links):  # new engines load it, too
            link.kill()
        await asyncio.sleep(0.1)
        await service.fleet.all_ready()
        assert (await answer())["choices"] == first["choices"]
        for body, status, param in [
            (requests, 400, "lora_name"),
            (requests | {"lora_name": "scripted"}, 400, "lora_name"),
            ({"lora_name": "b", "lora_path": "bad"}, 400, None),
            ({"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
            ({"lora_name": "b"}, 400, "lora_path"),
            ({"lora_name": 1, "lora_path": []}, 400, None),
            ([], 400, None),
        ]:
            refused = await http.post(LOAD, json=body)
            assert refused.status_code == status, refused.text
            assert param is None or refused.json()["error"]["param"] == param
        assert [*service.adapters] == ["sql"]
        again = await http.post(LOAD, json=requests | {"load_inplace": True, "lora_path": "other"})
        assert again.status_code == 200 and (await answer())["system_fingerprint"] != whole
        for path in RELOADS:
            again = await http.post(path, json=requests | {"lora_path": path})
            expected = fingerprint(PARTS | {"adapter": digest_of(path)})
            assert again.status_code == 200 and (await answer())["system_fingerprint"] == expected
        gone = await http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 1})
        assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
        assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == 404
        assert (await http.post("/v1/completions", json=ASK | {"model": "sql"})).status_code == 404


@pytest.mark.usefixtures("in_the_root")
@pytest.mark.parametrize(("path", "status"), [("folder", 200), ("other", 400)])
async def test_answer_cannot_continue_with_another_adapter(path: str, status: int) -> None:
    service = scripted()
    async with running(service, admin=[]) as http:
        sql = {"lora_name": "sql", "lora_path": "folder"}
        assert (await http.post(LOAD, json=sql)).status_code == 200
        body = ASK | {"max_tokens": 30, "model": "sql"}
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        await begun(service)
        assert (await http.post("/pause?mode=keep")).status_code == 200
        waiting = asyncio.create_task(http.post("/v1/completions", json=body))
        while len(service.open) < 2:
            await asyncio.sleep(0.01)
        replaced = await http.post(LOAD, json=sql | {"lora_path": path, "load_inplace": True})
        assert replaced.status_code == 200
        assert (await http.post("/resume")).status_code == 200
        for task in (request, waiting):
            assert (await task).status_code == status
        assert (await http.post("/v1/completions", json=body)).status_code == 200 and not service.open


@pytest.mark.usefixtures("in_the_root")
async def test_plain_model_does_not_answer_for_an_unloaded_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is unloaded while the prompt is tokenized."""
    service = scripted(chat_template=TEMPLATE)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "model": "sql"},
        "/v1/chat/completions": CHAT | {"model": "sql"},
        "/v1/messages": CHAT | {"model": "sql"},
        "/v1/responses": {"input": "x", "model": "sql"},
        "/generate": {"text": "x", "lora_path": "sql"},
    }
    async with running(service, admin=[]) as http:
        encode = service.texts.encode

        async def encode_after_unload(*arguments: Any, **options: Any) -> list[int]:
            assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == 200
            return await encode(*arguments, **options)

        monkeypatch.setattr(service.texts, "encode", encode_after_unload)
        for path, body in bodies.items():
            assert (await http.post(LOAD, json={"lora_name": "sql", "lora_path": "folder"})).status_code == 200
            refused = await http.post(path, json=body)
            assert refused.status_code == 404 and "unknown model 'sql'" in refused.text, (path, refused.text)


@pytest.mark.usefixtures("in_the_root")
async def test_client_gets_its_journaled_answer_after_the_adapter_is_unloaded(tmp_path: Path) -> None:
    service = scripted(journal=Journal(tmp_path / "journal"))
    async with running(service, admin=[]) as http:
        assert (await http.post(LOAD, json={"lora_name": "sql", "lora_path": "folder"})).status_code == 200
        short = {"input_ids": [5], "lora_path": "sql", "sampling_params": {"max_new_tokens": 9}}
        for path, body in (("/v1/completions", ASK | {"max_tokens": 9, "model": "sql"}), ("/generate", short)):
            headers = {"Idempotency-Key": path}
            first = asyncio.create_task(http.post(path, json=body, headers=headers))
            await begun(service)
            assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == 200
            while_it_runs = await http.post(path, json=body, headers=headers)
            assert (await first).status_code == 200 and while_it_runs.content == (await first).content
            while service.jobs._live:  # until the answer is written
                await asyncio.sleep(0.01)
            assert (await http.post(path, json=body, headers=headers)).content == while_it_runs.content
            assert (await http.post(path, json=body)).status_code in (400, 404)
            assert (await http.post(LOAD, json={"lora_name": "sql", "lora_path": "folder"})).status_code == 200


@pytest.mark.usefixtures("in_the_root")
async def test_adapter_replaced_while_a_record_is_resumed_does_not_answer_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter is replaced while the grammar of the journaled request is checked again."""
    body, headers = ASK | {"model": "sql", "max_tokens": 400, "guided_regex": "a+"}, {"Idempotency-Key": "a"}
    sql = {"lora_name": "sql", "lora_path": "folder"}

    async def accept(*_arguments: Any) -> None: ...

    monkeypatch.setattr(GrammarCheck, "require", accept)
    service = scripted(journal=Journal(tmp_path / "journal"))
    async with running(service, admin=[]) as http:
        assert (await http.post(LOAD, json=sql)).status_code == 200
        left = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        await begun(service)
    await asyncio.gather(left, return_exceptions=True)
    async with running(scripted(journal=Journal(tmp_path / "journal")), admin=[]) as http:
        assert (await http.post(LOAD, json=sql)).status_code == 200

        async def replace_adapter(*_arguments: Any) -> None:
            other = sql | {"lora_path": "other", "load_inplace": True}
            assert (await http.post(LOAD, json=other)).status_code == 200

        monkeypatch.setattr(GrammarCheck, "require", replace_adapter)
        refused = await http.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 409 and "they differ in adapter" in refused.text, refused.text


@pytest.mark.usefixtures("in_the_root")
@pytest.mark.parametrize("at_start", [True, False])
async def test_replacing_an_adapter_interrupts_no_request(at_start: bool) -> None:
    """A bad adapter keeps the earlier one. A good one replaces it without a gap, also in engines started later."""

    service = scripted(replicas=2, most_restarts=5)
    spec = replace(SPEC, adapters={"sql": AdapterFile("one"), "sql#0": AdapterFile("x")} if at_start else {})
    async with running(service, spec=spec, admin=[]) as http:
        if not at_start:
            assert (await http.post(LOAD, json={"lora_name": "sql", "lora_path": "one"})).status_code == 200
        statuses: list[int] = []
        fingerprints: list[str] = []
        stop = asyncio.Event()

        async def ask() -> None:
            while not stop.is_set():
                answer = await http.post("/v1/completions", json=ASK | {"model": "sql"})
                statuses.append(answer.status_code)
                fingerprints.append(answer.json()["system_fingerprint"])

        clients = [asyncio.create_task(ask()) for _ in range(4)]
        inplace = {"lora_name": "sql", "load_inplace": True}
        for path, status in (("bad", 400), ("two", 200), ("bad", 400), ("", 400), ("three", 200)):
            await asyncio.sleep(0.1)
            assert (await http.post(LOAD, json=inplace | {"lora_path": path})).status_code == status
        await asyncio.sleep(0.2)
        stop.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        wholes = [fingerprint(PARTS | {"adapter": digest_of(path)}) for path in ("one", "two", "three")]
        assert list(dict.fromkeys(fingerprints)) == wholes
        for link in list(service.fleet.links):
            link.kill()
        await asyncio.sleep(0.1)
        await service.fleet.all_ready()
        last = (await http.post("/v1/completions", json=ASK | {"model": "sql"})).json()
        assert last["system_fingerprint"] == wholes[-1]
        assert (await http.post(UNLOAD, json={"lora_name": "sql"})).status_code == 200
        assert service.fleet.num_restarts == 2


@pytest.mark.usefixtures("in_the_root")
async def test_sleeping_engines_take_no_adapter() -> None:
    service = scripted()
    async with running(service, admin=[]) as http:
        body = {"lora_name": "sql", "lora_path": "one"}
        assert (await http.post(LOAD, json=body)).status_code == 200
        assert (await http.post("/sleep")).status_code == 200
        for path in (LOAD, UNLOAD):
            refused = await http.post(path, json=body | {"load_inplace": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "sleeping")
        assert (await http.post("/wake_up")).status_code == 200
        assert (await http.post("/v1/completions", json=ASK | {"model": "sql"})).status_code == 200


def test_lora_modules_option_maps_names_to_folders() -> None:
    assert {name: file.path for name, file in _adapters(["a=x", "b=y=z"]).items()} == {"a": "x", "b": "y=z"}
    for wrong in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(InvalidInput, match="--lora-modules"):
            _adapters(wrong)


@EXHAUSTIVE
def test_server_has_bits_of_an_engine(tmp_path: Path) -> None:
    """Loaded at the start and by a route, before and after an engine is lost; receipts replay with the adapter."""
    peft = pytest.importorskip("peft", reason="PEFT comes with the extra lora")
    torch = pytest.importorskip("torch")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(detcompile.load_model("tiny"), config).save_pretrained(tmp_path / name)
    engine = detcompile.compile("tiny", max_lora_rank=8).engine(EngineConfig(num_blocks=32))
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=12, logprobs=0)
    server = started(
        tmp_path,
        *("--max-lora-rank", "8", "--lora-modules", f"one={tmp_path / 'one'}", "--admin-key", "none"),
        model=Path("tiny"),
    )
    try:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            assert http.post(LOAD, json={"lora_name": "two", "lora_path": str(tmp_path / "two")}).status_code == 200
            body = {"prompt": [5, 6, 7], "temperature": 1.0, "top_p": 1, "seed": 4, "max_tokens": 12, "logprobs": 0}
            body |= {"return_token_ids": True, "receipt": True}
            answers: dict[str | None, dict[str, Any]] = {}
            for name in ("one", "two", None):
                if name is not None:
                    engine.load_adapter(name, tmp_path / name)
                [expected] = engine.generate([[5, 6, 7]], params, progress=False, adapter=name)[0].outputs
                answer = http.post("/v1/completions", json=body if name is None else body | {"model": name}).json()
                [choice] = answer["choices"]
                assert choice["token_ids"] == expected.token_ids
                assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in expected.logprobs]
                verdict = http.post("/v1/verify", json=answer["receipt"]).json()
                assert (verdict.get("outcome"), verdict.get("num_tokens")) == ("equal", 12), verdict
                answers[name] = answer
            envelope = read_envelope(json.dumps(answers["one"]).encode())
            wrong = changed(envelope, TAMPERINGS["another token"].change, None)
            verdict = http.post("/v1/verify", json=msgspec.to_builtins(wrong)).json()
            assert (verdict["outcome"], verdict["field"], verdict["position"]) == ("differs", "token_ids", 5), verdict
            assert http.post(UNLOAD, json={"lora_name": "two"}).status_code == 200
            verdict = http.post("/v1/verify", json=answers["two"]["receipt"]).json()
            assert (verdict["outcome"], verdict["field"]) == ("incomparable", "fingerprint_parts.adapter")
            assert "LoRA adapter 'two' drew this answer, which is not here" in verdict["message"]
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answers["one"]))
    for model, adapter, rank, code, text in [
        (["tiny"], "one", "8", 0, "equal: all 12 tokens were reproduced"),
        (["tiny"], "two", "8", 2, "LoRA adapter 'one' drew this answer, which is not here: give its folder"),
        ([], "one", "8", 3, "the receipt is of LoRA adapter 'one': name the model under it as MODEL"),
        (["tiny"], "one", "16", 2, "LoRA adapter 'one' drew this answer, with another --max-lora-rank"),
    ]:
        options = ["--adapter", str(tmp_path / adapter), "--max-lora-rank", rank]
        command = [sys.executable, "-m", "detcompile", "replay", str(path), *model, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        printed = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == code and text in printed, printed
