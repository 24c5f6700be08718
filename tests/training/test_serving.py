"""A trainer's weights are served in place, rounded, with the trainer's log-probabilities."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import detcompile
from detcompile import EngineConfig, InvalidInput, Numerics, SamplingParams, Trainer, TrainerMismatch
from detcompile.training import loading
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import MAX_CONTEXT, compiled, random_model
from tests.training.cases import add_gradients, gradients, sequences

LENGTHS = [40, 7, 130, 64]


@pytest.fixture(scope="module", params=["qwen3", pytest.param("gemma2", marks=EXHAUSTIVE)])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    """A trainer that was checked against an engine when created; qwen3's uses gradient checkpointing."""
    name = request.param
    model = random_model(name, torch.bfloat16)
    return detcompile.trainer(
        model, max_context=MAX_CONTEXT, check=compiled(name, torch.bfloat16), checkpoint=name == "qwen3"
    )


def test_engine_serves_trainer_logprobs_after_a_step(trainer: Trainer):
    """The engine has served before, so its prefix cache has keys of the old weights."""
    name = trainer.config.model_type
    model = detcompile.compile(random_model(name, torch.bfloat16), max_context=MAX_CONTEXT)
    engine = model.engine(EngineConfig(num_blocks=60))
    requests = SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    prompt = sequences([70])[0].tolist()

    def answered() -> tuple[list[int], list[float]]:
        (output,) = engine.generate([prompt], requests, progress=False)
        entries = output.outputs[0].logprobs
        return [entry.token_id for entry in entries], [entry.logprob for entry in entries]

    before, _ = model.fingerprint, answered()
    optimizer = detcompile.AdamW(trainer.parameters(), lr=1e-2)
    optimizer.zero_grad()
    add_gradients(trainer, sequences(LENGTHS), [[0, 1], [2, 3]])
    optimizer.step()
    with pytest.raises(TrainerMismatch, match=r"token 1 of a sequence of 2, .*differ, .*update_weights") as actual:
        trainer.check(model)
    assert len(actual.value.weights) > 10
    assert model.update_weights(trainer) == model.weights_version
    trainer.check(model, seed=1)
    tokens, served = answered()
    with torch.no_grad():
        item = trainer.logprobs(torch.tensor([prompt + tokens]))[0, -8:]
    assert torch.equal(item, torch.tensor(served))
    assert model.fingerprint != before
    fresh = random_model(name, torch.bfloat16)
    fresh.load_state_dict(trainer.serving_weights())
    assert model.fingerprint == detcompile.compile(fresh, max_context=MAX_CONTEXT).fingerprint


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 1, "head_dim": 32}], ids=["of keys", "of all"])
def test_a_single_head_is_trained(changes: dict[str, int]):
    """torch 2.13 takes the layout of its rows for channels_last."""
    model = random_model("llama", torch.bfloat16, num_key_value_heads=1, **changes)
    trainer = detcompile.trainer(model, max_context=MAX_CONTEXT)
    rows = sequences(LENGTHS)
    together, apart = (gradients(trainer, rows, parts) for parts in ([range(4)], [[3], [1, 2, 0]]))
    assert not [name for name in together if not torch.equal(together[name], apart[name])]


def test_checkpointing_keeps_gradients(trainer: Trainer):
    rows = sequences(LENGTHS)
    kept = trainer.blocks[0].recompute
    assert kept == (trainer.config.model_type == "qwen3")
    actual = gradients(trainer, rows, [range(4)])
    for block in trainer.blocks:
        block.recompute = not kept
    other = gradients(trainer, rows, [[3], [1, 2, 0]])
    for block in trainer.blocks:
        block.recompute = kept
    assert not [name for name in actual if not torch.equal(actual[name], other[name])]


def test_model_with_other_sum_orders_is_refused(trainer: Trainer):
    other = compiled(trainer.config.model_type, torch.bfloat16)
    for changed in ({"numerics": replace(Numerics(), kv_chunk=256)}, {"max_context": 5}):
        model = type("Other", (), {"numerics": other.numerics, "max_context": other.max_context, **changed})()
        with pytest.raises(InvalidInput, match=f"pass {next(iter(changed))}="):
            trainer.check(model)
    for given in (None, True, "tiny", random_model("qwen3", torch.bfloat16)):
        with pytest.raises(InvalidInput, match=r"against the result of compile\(\), not against"):
            trainer.check(given)


@pytest.mark.parametrize("given", ["tiny", True, type("Other", (), {"numerics": Numerics(), "max_context": 5})()])
def test_uncheckable_model_is_refused_before_compiling(given: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "Trainer", None)
    with pytest.raises(InvalidInput, match=r"result of compile\(\)|pass max_context="):
        detcompile.trainer(random_model("qwen3", torch.bfloat16), max_context=MAX_CONTEXT, check=given)
