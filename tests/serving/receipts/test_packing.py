"""Receipts that are replayed in shared steps get the verdicts that they get alone."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.digests import fingerprint
from detcompile.errors import DetcompileError
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.sampling.sampler import SamplingParams
from detcompile.runtime.step.builder import StepArrays
from detcompile.runtime.step.runner import Runner
from detcompile.serving.engines.engine_verifications import Verifications
from detcompile.serving.engines.protocol import Tokens, Verified, Verify
from detcompile.serving.plain_tokenizer import plain_tokenizer, tokenizer_digest
from detcompile.serving.receipts.decoding import recorded_prompt
from detcompile.serving.receipts.envelope import Envelope, payload_of, seal
from detcompile.serving.receipts.receipt import Receipt, Served, decode_receipt, encode_receipt, written_params
from detcompile.serving.receipts.replay import Replayer
from detcompile.serving.receipts.teacher_forcing import ForcedAnswers
from detcompile.serving.receipts.verdict import Verdict
from tests.model_cases import compiled
from tests.serving.receipts.receipt_cases import TAMPERINGS, changed

LONG = [5 + 7 * at % 900 for at in range(130)]  # two blocks of the replay's cache, and a bit
MARK = 4001  # in one prompt alone
PROMPTS = [LONG, [322, 1248, 925], LONG, [9, 8, 7, MARK, 30], LONG[:64], [*LONG[:100], 3]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.1, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "max_tokens": 40},
    {"temperature": 0.7, "min_p": 0.05, "bad_words_ids": [[13, 310], [274]]},
    {"temperature": 1.3, "n": 3, "presence_penalty": -0.3, "top_p": 0.8},
    {"temperature": 0.9, "logit_bias": {13: -2.0}, "min_tokens": 4},
]
CHANGES = [None, None, *TAMPERINGS, "a prompt of no token of the model"]


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return compiled("tiny", torch.bfloat16)


@pytest.fixture(scope="module")
def envelopes(model: CompiledModel) -> list[Envelope]:
    """Receipts with two or more samples, their log-probabilities and those of their prompts."""
    engine = model.engine(EngineConfig(num_blocks=64, max_num_seqs=8))
    common = {"n": 2, "seed": 3, "max_tokens": 20, "logprobs": 1, "prompt_logprobs": 0, "ignore_eos": True}
    params = [SamplingParams(**(common | given)) for given in PARAMS]
    outputs = engine.generate(PROMPTS, params, progress=False)
    parts = {name: str(part) for name, part in model.fingerprint_parts.items()}
    tokenizer = tokenizer_digest(plain_tokenizer(model.tokenizer))
    return [
        seal(
            encode_receipt(
                Receipt(
                    id="x", created=0, model="tiny", level="tokens", fingerprint=fingerprint(parts),
                    fingerprint_parts=parts, served=Served(detcompile="x", tokenizer=tokenizer, chat_template=None),
                    params=written_params(given), seed="3",
                    prompts=[recorded_prompt(output, output.prompt_token_ids, None, has_text=True)],
                )
            ),
            None,
        )
        for given, output in zip(params, outputs)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, str | None], Any]:
    """Return the verdict of each receipt replayed alone."""
    return {}


def receipt_of(envelope: Envelope, change: str | None) -> Receipt:
    def unknown_token(payload: dict[str, Any]) -> None:
        payload["prompts"][0]["token_ids"] = [1 << 30]

    if change is not None:
        apply = unknown_token if change == "a prompt of no token of the model" else TAMPERINGS[change].change
        envelope = changed(envelope, apply, None)
    return decode_receipt(payload_of(envelope))


def shown(result: Verdict | DetcompileError) -> Any:
    return msgspec.to_builtins(result) if isinstance(result, Verdict) else repr(result)


@given(
    picks=st.lists(st.tuples(st.integers(0, len(PARAMS) - 1), st.sampled_from(CHANGES)), min_size=1, max_size=9),
    chunk=st.sampled_from([13, 100, 2048]),
    most_in_flight=st.sampled_from([0, 1]),
)
def test_packing_keeps_verdicts(
    picks: list[tuple[int, str | None]],
    chunk: int,
    most_in_flight: int,
    model: CompiledModel,
    envelopes: list[Envelope],
    alone: dict[tuple[int, str | None], Any],
) -> None:
    """Genuine, forged and refused receipts, in any order and number. The KV cache is empty afterwards."""
    receipts = [receipt_of(envelopes[number], change) for number, change in picks]
    replayer = Replayer(model, chunk=chunk)
    replayer.forcing._most_in_flight = most_in_flight  # 1: as on a GPU
    actual = dict(replayer.check_all(receipts))
    for pick, receipt in zip(picks, receipts):
        if pick not in alone:
            ((_, result),) = Replayer(model, chunk=512).check_all([receipt])
            alone[pick] = shown(result)
    assert [shown(actual[number]) for number in range(len(picks))] == [alone[pick] for pick in picks]
    for pick in picks:
        if pick[1] is None:
            assert alone[pick]["outcome"] == "equal", pick
        elif pick[1] in TAMPERINGS:
            assert (alone[pick]["outcome"], alone[pick]["field"])[0] == TAMPERINGS[pick[1]].outcome, pick
    if replayer.forcing._cache is not None:
        replayer.forcing._blocks.check([])
    replayer.forcing.free()


def test_receipts_share_steps_and_prompts_share_blocks(
    model: CompiledModel, envelopes: list[Envelope], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepArrays] = []
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, arrays: (steps.append(arrays), run(self, arrays))[1])
    receipts = [receipt_of(envelope, None) for envelope in envelopes]
    assert all(result.outcome == "equal" for _, result in Replayer(model, chunk=4096).check_all(receipts))
    assert [len(step.seq_lens) for step in steps] == [10, 3]  # samples of a long prompt wait for its blocks
    drawn = [len(sample.token_ids) for receipt in receipts for sample in receipt.prompts[0].samples]
    assert sum(len(step.logits_to_keep) for step in steps) == sum(drawn) + sum(len(prompt) - 1 for prompt in PROMPTS)
    firsts = [len(receipt.prompts[0].token_ids) for receipt in receipts]
    again = [(len(receipt.prompts[0].samples) - 1) * len(receipt.prompts[0].token_ids) for receipt in receipts]
    without = sum(firsts) + sum(again) + sum(drawn) - len(drawn)
    assert sum(len(step.input_ids) for step in steps) == without - 64 * (2 + 2 + 1)


@pytest.mark.parametrize("most_in_flight", [0, 1])
def test_failed_step_fails_one_receipt(
    most_in_flight: int, model: CompiledModel, envelopes: list[Envelope], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other receipts of the same step still get their verdicts."""
    run = Runner.run

    def out_of_memory(self: Runner, arrays: StepArrays) -> torch.Tensor:
        if MARK in arrays.input_ids:
            raise RuntimeError("out of memory")
        return run(self, arrays)

    monkeypatch.setattr(Runner, "run", out_of_memory)
    sent: list[Any] = []
    parts = {name: str(part) for name, part in model.fingerprint_parts.items()}
    verifications = Verifications(model, parts, sent.append)
    for number, envelope in enumerate([*envelopes, changed(envelopes[0], TAMPERINGS["another token"].change, None)]):
        verifications.add(Verify(str(number), payload_of(envelope)))
    verifications.cancel("2")
    while verifications.step():
        if verifications._replayer is not None:
            verifications._replayer.forcing._most_in_flight = most_in_flight
    equal = {report.request_id for report in sent if isinstance(report, Verified) and report.verdict.outcome == "equal"}
    (failed,) = [report.deltas[0] for report in sent if isinstance(report, Tokens)]
    assert equal == {"0", "1", "4", "5"} and failed.request_id == "3" and "out of memory" in failed.error
    assert len(sent) == 6  # 2 was canceled, 6 differs


def test_failed_grammar_fails_only_its_receipt(
    model: CompiledModel, envelopes: list[Envelope], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ForcedAnswers.part

    def too_large(self: ForcedAnswers, *given: Any) -> Any:
        if MARK in self.prompt:
            raise DetcompileError("the grammar is too large")
        return part(self, *given)

    monkeypatch.setattr(ForcedAnswers, "part", too_large)
    replayer = Replayer(model)
    results = dict(replayer.check_all(receipt_of(envelope, None) for envelope in envelopes))
    assert isinstance(results.pop(3), DetcompileError)
    assert all(result.outcome == "equal" for result in results.values()) and len(results) == len(envelopes) - 1
    replayer.forcing._blocks.check([])
