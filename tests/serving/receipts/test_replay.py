"""Receipts of every kind of answer replay, and every change of one is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

import detcompile
from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.request import Request
from detcompile.runtime.sampling.sampler import SamplingParams
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.serving.engines.engine_process import hello_of
from detcompile.serving.plain_tokenizer import plain_tokenizer, tokenizer_digest
from detcompile.serving.receipts.decoding import Opening, recorded_prompt
from detcompile.serving.receipts.envelope import Envelope, payload_digest, payload_of, read_envelope, seal
from detcompile.serving.receipts.keys import SigningKey, read_signing_key, read_verify_key, write_key_pair
from detcompile.serving.receipts.receipt import Receipt, Served, decode_receipt, encode_receipt, written_params
from detcompile.serving.receipts.replay import Replayer, replay
from detcompile.serving.tokenizer_pool import TokenizerPool
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import MAX_CONTEXT, compiled, random_model
from tests.serving.conftest import Server, started
from tests.serving.receipts.receipt_cases import PROMPT, REQUESTS, TAMPERINGS, changed, comparison, with_part
from tests.training.cases import adapted

BASE = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "seed": 5, "receipt": True}
JSON = {"Content-Type": "application/json"}
DOUBTED = {"n": 2, "temperature": 0.9, "logprobs": 1, "echo": True}


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return compiled("tiny", torch.bfloat16)


def receipt_of(http: httpx.Client, **requested) -> tuple[Envelope, httpx.Response]:
    answer = http.post("/v1/completions", json=BASE | requested)
    assert answer.status_code == 200, answer.text
    return read_envelope(answer.content), answer


@pytest.fixture(scope="module")
def doubted(server: Server) -> Envelope:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        return receipt_of(http, **DOUBTED)[0]


@pytest.fixture(scope="module")
def key(server: Server, folder: Path) -> SigningKey:
    return read_signing_key(folder / "key")


@pytest.mark.parametrize("kind", REQUESTS)
def test_genuine_receipt_replays(kind: str, http: httpx.Client, model: CompiledModel, key: SigningKey) -> None:
    envelope, answer = receipt_of(http, **REQUESTS[kind])
    receipt = decode_receipt(payload_of(envelope))
    assert answer.headers["x-detcompile-receipt"] == payload_digest(envelope)
    assert receipt.id == answer.json()["id"] and receipt.fingerprint == answer.json()["system_fingerprint"]
    choices = [choice for prompt in receipt.prompts for choice in prompt.samples]
    assert [choice.finish_reason for choice in choices] == [c["finish_reason"] for c in answer.json()["choices"]]
    verdict = replay(model, envelope, key=key.public)
    assert verdict.outcome == "equal" and verdict.signature == "valid", verdict
    assert verdict.num_tokens == sum(len(choice.token_ids) for choice in choices) > 0
    served = http.post("/v1/verify", content=json.dumps(answer.json()["receipt"]), headers=JSON).json()
    assert served["outcome"] == "equal" and served["num_tokens"] == verdict.num_tokens, served


@pytest.mark.parametrize("chunk", [1, 3, 64, 4096])
def test_verdict_is_equal_for_any_chunk_size(chunk: int, doubted: Envelope, model: CompiledModel) -> None:
    assert replay(model, doubted, chunk=chunk) == replay(model, doubted)
    for kind in ("another token", "other logprobs"):
        wrong = changed(doubted, TAMPERINGS[kind].change, None)
        assert replay(model, wrong, chunk=chunk) == replay(model, wrong)


@pytest.mark.parametrize("kind", TAMPERINGS)
def test_tampering_is_named_even_with_valid_signature(
    kind: str, http: httpx.Client, doubted: Envelope, model: CompiledModel, key: SigningKey
) -> None:
    """Signed with the server's own key, so only a replay finds the change. Also sent to the server that issued it."""
    wrong = changed(doubted, TAMPERINGS[kind].change, key)
    verdict = replay(model, wrong, key=key.public)
    assert (verdict.outcome, verdict.field) == (TAMPERINGS[kind].outcome, TAMPERINGS[kind].field), verdict
    assert verdict.exit_code == (1 if verdict.outcome == "differs" else 2) and verdict.message
    served = http.post("/v1/verify", content=msgspec.json.encode(wrong), headers=JSON)
    assert (served.json()["outcome"], served.json()["field"]) == (verdict.outcome, verdict.field)


def test_receipt_from_other_source_version_replays(http: httpx.Client, doubted: Envelope, model: CompiledModel) -> None:
    other = changed(doubted, lambda payload: payload["fingerprint_parts"].update(source="0" * 64), None)
    verdict = replay(model, other)
    assert verdict.outcome == "equal" and verdict.message.endswith("; sources differ, bits version equal (1)")
    assert replay(model, other, decode=True).message.endswith("; sources differ, bits version equal (1)")
    before = changed(doubted, lambda payload: payload["fingerprint_parts"].pop("bits_version"), None)
    assert replay(model, before).field == "fingerprint"


@pytest.mark.parametrize("decode", [False, True])
def test_receipt_of_renamed_weights_replays(decode: bool, doubted: Envelope, model: CompiledModel) -> None:
    def rename(payload: dict[str, Any]) -> None:
        weights = payload["fingerprint_parts"]["weights"]
        spans = [{"start": start, "version": version, "weights": weights} for start, version in ((0, "0"), (3, "a"))]
        payload["prompts"][0]["samples"][0]["drawn_by"] = spans

    assert replay(model, changed(doubted, rename, None), decode=decode).outcome == "equal"


@pytest.mark.parametrize("decode", [False, True])
def test_missing_adapters_are_refused_by_name(decode: bool, doubted: Envelope, model: CompiledModel) -> None:
    verdict = replay(model, changed(doubted, with_part("adapter"), None), decode=decode)
    assert (verdict.outcome, verdict.field) == ("incomparable", "fingerprint_parts.adapter")
    assert "LoRA adapter 'tiny' drew this answer, which is not here" in verdict.message


def test_receipts_of_adapters_replay(tmp_path: Path) -> None:
    """They replay with the adapter that the receipt names. Another token or another adapter is detected."""
    pytest.importorskip("peft", reason="PEFT comes with the extra lora")
    given = random_model("qwen3", torch.bfloat16)
    model = detcompile.compile(given, max_context=MAX_CONTEXT, max_lora_rank=16)
    for name, config in (("one", {}), ("two", {"r": 3, "lora_alpha": 5})):
        adapted(**config).save_pretrained(tmp_path / name)
    engine = model.engine(EngineConfig(num_blocks=16))
    digests = {name: engine.load_adapter(name, tmp_path / name) for name in ("one", "two")}
    params = SamplingParams(n=2, seed=3, temperature=0.9, max_tokens=12, logprobs=1, prompt_logprobs=0)

    def receipt(adapter: str | None) -> Envelope:
        [output] = engine.generate([[5, 6, 7]], params, progress=False, adapter=adapter)
        parts = parts_of(model) | ({} if adapter is None else {"adapter": digests[adapter]})
        return seal(
            encode_receipt(
                Receipt(
                    id="x", created=0, model=adapter or "tiny", level="tokens", fingerprint=fingerprint(parts),
                    fingerprint_parts=parts, served=Served(detcompile="x", tokenizer=None, chat_template=None),
                    params=written_params(params), seed="3",
                    prompts=[recorded_prompt(output, output.prompt_token_ids, None, has_text=False)],
                )
            ),
            None,
        )  # fmt: skip

    def named(digest: str | None) -> Callable[[dict[str, Any]], None]:
        def change(payload: dict[str, Any]) -> None:
            payload["fingerprint_parts"] = parts_of(model) | ({} if digest is None else {"adapter": digest})
            payload["fingerprint"] = fingerprint(payload["fingerprint_parts"])

        return change

    of_all = {adapter: receipt(adapter) for adapter in ("one", None, "two")}
    for decode in (False, True):
        for adapter, envelope in of_all.items():
            assert replay(model, envelope, decode=decode).outcome == "equal", adapter
        wrong = replay(model, changed(of_all["one"], TAMPERINGS["another token"].change, None), decode=decode)
        assert (wrong.outcome, wrong.field, wrong.sample) == ("differs", "token_ids", 0)
        for digest in (digests["two"], None):
            verdict = replay(model, changed(of_all["one"], named(digest), None), decode=decode)
            field = "prompt_logprobs" if decode else "token_ids"
            assert (verdict.outcome, verdict.field) == ("differs", field), verdict
        engine.unload_adapter("one")
        missing = replay(model, of_all["one"], decode=decode)
        assert (missing.outcome, missing.field) == ("incomparable", "fingerprint_parts.adapter")
        assert "LoRA adapter 'one' drew this answer, which is not here" in missing.message
        engine.load_adapter("one", tmp_path / "one")


def test_changed_token_is_reported_at_its_position(doubted: Envelope, model: CompiledModel) -> None:
    given = decode_receipt(payload_of(doubted)).prompts[0].samples[0].token_ids
    verdict = replay(model, changed(doubted, TAMPERINGS["another token"].change, None))
    assert (verdict.prompt, verdict.sample, verdict.position) == (0, 0, 5)
    assert (verdict.expected, verdict.found) == (given[5] ^ 1, given[5])


def test_signature_covers_every_byte(doubted: Envelope, model: CompiledModel, key: SigningKey, tmp_path: Path) -> None:
    other = write_key_pair(tmp_path / "other")
    assert replay(model, doubted, key=other.public).field == "signatures"
    forged = changed(doubted, lambda payload: payload.update(created=1), other)
    assert "signed it, not key" in replay(model, forged, key=key.public).message
    forged.signatures = doubted.signatures  # of another payload
    verdict = replay(model, forged, key=key.public)
    assert verdict.signature == "invalid" and "was changed after" in verdict.message
    unsigned = changed(doubted, lambda payload: None, None)
    assert "it is not signed" in replay(model, unsigned, key=key.public).message
    assert replay(model, unsigned).outcome == "equal"


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(extra=1),
        lambda p: p["prompts"][0].update(extra=1),
        lambda p: p["prompts"][0]["samples"][0].update(extra=1),
        lambda p: p["served"].update(extra=1),
        lambda p: p["params"].update(extra=1),
        lambda p: p["params"].update(temperature=-1),
        lambda p: p.update(version=2),
        lambda p: p.update(seed="-1"),
        lambda p: p.update(seed=5),
        lambda p: p.pop("fingerprint"),
        lambda p: p.update(prompts=[]),
        lambda p: p["prompts"][0].update(token_ids=[]),
        lambda p: p["prompts"][0].update(token_ids=[1 << 30]),
    ],
)
def test_impossible_receipts_are_refused(
    change, http: httpx.Client, doubted: Envelope, model: CompiledModel, key: SigningKey
) -> None:
    wrong = changed(doubted, change, key)
    with pytest.raises(InvalidInput):
        replay(model, wrong)
    body = msgspec.to_builtins(wrong)
    assert http.post("/v1/verify", json=body).status_code == 400
    assert http.post("/v1/verify", json=body | {"extra": 1}).status_code == 400


def test_a_stream_ends_with_its_receipt(http: httpx.Client, model: CompiledModel) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        with http.stream("POST", "/v1/completions", json=BASE | {"stream": True, **options}) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        (last,) = [chunk for chunk in chunks if "receipt" in chunk]
        assert last["choices"] == [] and all(("usage" in chunk) == bool(options) for chunk in chunks)
        assert replay(model, read_envelope(json.dumps(last).encode())).outcome == "equal"
        actual = http.get(f"/v1/receipts/{last['id']}")
        assert actual.json() == last["receipt"]
    assert http.get("/v1/receipts/cmpl-none").status_code == 404


def test_receipt_can_be_fetched_after_answer(http: httpx.Client, model: CompiledModel) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3}
    answer = http.post("/v1/chat/completions", json=chat)
    assert "receipt" not in answer.json()
    envelope = read_envelope(http.get(f"/v1/receipts/{answer.json()['id']}").content)
    assert payload_digest(envelope) == answer.headers["x-detcompile-receipt"]
    assert decode_receipt(payload_of(envelope)).served.chat_template is not None
    assert replay(model, envelope).outcome == "equal"


@pytest.mark.parametrize("how", ["speculation", "small blocks", "small budget", "prefill first", "no prefix cache"])
def test_receipt_is_equal_for_any_engine_setting(how: str, model: CompiledModel) -> None:
    """Answers of engines with drafts or another scheduler give the receipt of the plain server."""
    configs = {
        "small blocks": {"block_size": 16},
        "small budget": {"max_num_batched_tokens": 7},
        "prefill first": {"scheduler": "prefill_first"},
        "no prefix cache": {"prefix_caching": False},
    }
    drafts = SpeculationConfig(switch="always") if how == "speculation" else None
    engine = model.engine(EngineConfig(num_blocks=64, max_num_seqs=8, **configs.get(how, {})), speculation=drafts)
    params = [
        SamplingParams(n=2, seed=3, temperature=0.8, max_tokens=40, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=60, repetition_penalty=1.1, seed=0),
        SamplingParams(temperature=0.0, max_tokens=60, stop=["\n"], seed=0),
    ]
    prompts = [[322, 1248, 925, 13, 310, 1013]] * 3
    if how == "speculation":
        assert engine.speculator is not None
    for item, output in zip(params, engine.generate(prompts, params, progress=False)):
        tokenizer = tokenizer_digest(plain_tokenizer(model.tokenizer))
        served = Served(detcompile="x", tokenizer=tokenizer, chat_template=None)
        receipt = Receipt(
            id="x", created=0, model="tiny", level="tokens", fingerprint=model.fingerprint,
            fingerprint_parts=parts_of(model), served=served, params=written_params(item), seed=str(item.seed),
            prompts=[recorded_prompt(output, output.prompt_token_ids, None, has_text=True)],
        )  # fmt: skip
        verdict = replay(model, seal(encode_receipt(receipt), None))
        assert verdict.outcome == "equal", verdict
    if how == "speculation":
        assert engine.speculator.num_accepted > 0


def test_changed_weights_are_found_at_first_changed_token(doubted: Envelope, model: CompiledModel) -> None:
    """If a server rounded its weights but kept its fingerprint, the first changed token is reported."""
    saved = {name: tensor.clone() for name, tensor in model.model.named_parameters()}
    receipt = decode_receipt(payload_of(doubted))
    try:
        model.update_weights({name: _rounded(tensor) for name, tensor in saved.items()})
        receipt.fingerprint_parts, receipt.fingerprint = parts_of(model), model.fingerprint
        verdict = replay(model, seal(encode_receipt(receipt), None))
        assert verdict.outcome == "differs" and verdict.field in ("token_ids", "prompt_logprobs"), verdict
    finally:
        model.update_weights(saved)
    assert replay(model, doubted).outcome == "equal"


def parts_of(model: CompiledModel) -> dict[str, str]:
    return {name: str(part) for name, part in model.fingerprint_parts.items()}


def test_verification_steps_stay_within_a_chunk(
    doubted: Envelope, model: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, real = [0], Request.add_token

    def add_token(self: Request, *arguments) -> None:
        counts[-1] += 1
        real(self, *arguments)

    monkeypatch.setattr(Request, "add_token", add_token)
    replayer = Replayer(model, chunk=16)
    for _ in replayer.steps(decode_receipt(payload_of(doubted))):
        replayer.forcing.step()
        counts.append(0)
    assert sum(counts) == 40 and max(counts) == 16  # of two samples


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    scale = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
    return ((tensor / scale).round() * scale).to(tensor.dtype)


@EXHAUSTIVE
def test_receipts_replay_across_one_and_two_ranks(
    http: httpx.Client, model: CompiledModel, key: SigningKey, folder: Path, tmp_path: Path
) -> None:
    """Answers of two ranks replay on one, and answers of one replay on two."""
    item = {kind: receipt_of(http, **requested) for kind, requested in REQUESTS.items()}
    pair = started(tmp_path, "--tp", "2", "--sign", str(folder / "key"), model=folder / "model")
    try:
        with httpx.Client(base_url=pair.url, timeout=120) as ranks:
            for kind, requested in REQUESTS.items():
                (envelope, answer), (_, one) = receipt_of(ranks, **requested), item[kind]
                assert answer.json()["choices"] == one.json()["choices"], kind
                assert replay(model, envelope).outcome == "equal", kind
                assert http.post("/v1/verify", json=answer.json()["receipt"]).json()["outcome"] == "equal", kind
                verdict = ranks.post("/v1/verify", json=one.json()["receipt"]).json()
                assert verdict["outcome"] == "equal" and verdict["num_tokens"] > 0, kind
            wrong = msgspec.json.encode(changed(item["sampled"][0], TAMPERINGS["another token"].change, key))
            verdict = ranks.post("/v1/verify", content=wrong, headers=JSON).json()
            assert verdict["outcome"] == "differs" and verdict["field"] == TAMPERINGS["another token"].field
    finally:
        assert pair.stop() == 0


def test_hashed_receipt_hides_text_and_verifies_with_it(folder: Path, model: CompiledModel) -> None:
    hidden = started(folder, "--receipts", "hashes")
    try:
        with httpx.Client(base_url=hidden.url, timeout=120) as http:
            envelope, answer = receipt_of(http, n=2, logprobs=1, prompt=[322, 1248, 925])
            same, _ = receipt_of(http, n=2, logprobs=1, prompt=[322, 1248, 925])
            matched, guided = receipt_of(http, prompt=[322, 1248], guided_regex="(ab)+")
            body = json.dumps(answer.json()["receipt"])
            refused = http.post("/v1/verify", content=body, headers=JSON)
            assert refused.status_code == 400 and "--opening" in refused.json()["error"]["message"]
    finally:
        assert hidden.stop() == 0
    receipts = [decode_receipt(payload_of(one)) for one in (envelope, same)]
    for one, other in zip(*(receipt.prompts for receipt in receipts)):  # a salt an answer: equal ones look different
        assert isinstance(one.token_ids, str) and one.token_ids != other.token_ids
        assert all(isinstance(sample.token_ids, str) for sample in one.samples)
        assert {s.text for s in one.samples}.isdisjoint(s.text for s in other.samples)
    salt = answer.headers["x-detcompile-receipt-salt"]
    opening = Opening(salt=salt, prompts=[[322, 1248, 925]])
    assert replay(model, envelope, opening=opening).outcome == "equal"
    texts = TokenizerPool(hello_of(model, EngineConfig(), 0, "", {}))
    fields, compare = comparison(answer.content, model, texts, opening)
    assert compare(fields) is None
    fields["choices"][1]["logprobs"]["token_logprobs"][7] -= 1e-6
    assert compare(fields).field == "answer.choices[1].logprobs.token_logprobs[7]"
    assert replay(model, same, opening=opening).field == "prompts"
    assert replay(model, envelope, opening=Opening(salt=salt, prompts=[[322, 1248, 926]])).field == "prompts"
    salt = guided.headers["x-detcompile-receipt-salt"]
    grammar = decode_receipt(payload_of(matched)).grammar
    assert grammar.hashed and len(grammar.source) == 64
    opens = Opening(salt=salt, prompts=[[322, 1248]], grammar="(ab)+")
    assert replay(model, matched, opening=opens).outcome == "equal"
    opens.grammar = "(ab)*"
    assert replay(model, matched, opening=opens).field == "grammar"
    opens.grammar = None
    with pytest.raises(InvalidInput, match="hash of its grammar"):
        replay(model, matched, opening=opens)
    wrong = changed(envelope, lambda p: p.update(seed="6"), None)
    assert replay(model, wrong, opening=opening).field == "token_ids"
    with pytest.raises(InvalidInput, match="--opening"):
        replay(model, envelope)


def test_replay_decodes_text_again(doubted: Envelope, model: CompiledModel) -> None:
    assert replay(model, doubted, decode=True).outcome == "equal"
    for kind in ("another token", "another text", "other logprobs", "other logprobs of the prompt", "other weights"):
        tampering = TAMPERINGS[kind]
        verdict = replay(model, changed(doubted, tampering.change, None), decode=True)
        assert (verdict.outcome, verdict.field) == (tampering.outcome, tampering.field), kind


def test_receipts_can_be_disabled(folder: Path) -> None:
    without = started(folder, "--receipts", "off")
    try:
        with httpx.Client(base_url=without.url, timeout=120) as http:
            answer = http.post("/v1/completions", json=BASE | {"receipt": None})
            assert answer.status_code == 200 and "x-detcompile-receipt" not in answer.headers
            assert http.post("/v1/completions", json=BASE).json()["error"]["param"] == "receipt"
    finally:
        assert without.stop() == 0


def test_server_publishes_public_key(http: httpx.Client, key: SigningKey, folder: Path, tmp_path: Path) -> None:
    calls = http.get("/v1/fingerprint").json()["receipts"]
    (tmp_path / "told").write_text(calls["public_key"])
    assert read_verify_key(tmp_path / "told").key_id == read_verify_key(folder / "key.pub").key_id == key.key_id
    assert calls["level"] == "tokens"
