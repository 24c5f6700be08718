"""LoRA: PEFT's adapters train beside frozen weights with an engine's log-probabilities."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import detcompile
from detcompile import InvalidInput, SamplingParams, StorageError, Trainer, UnsupportedModel
from detcompile.passes.modules.low_rank import AdaptedLinear, take_adapters
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.model_cases import MAX_CONTEXT, random_model
from tests.training.cases import TARGETS, adapted, add_gradients, gradients, sequences

peft = pytest.importorskip("peft", reason="PEFT comes with the extra lora")
LENGTHS = [40, 7, 130, 2, 64, 15]


def a_trainer(name: str = "qwen3", **config: Any) -> Trainer:
    return detcompile.trainer(adapted(name, **config), max_context=MAX_CONTEXT)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return a_trainer()


def test_adapted_linear_has_bits_of_peft_layer():
    for name, targets in (("qwen3", TARGETS), ("gpt2", ["c_attn", "c_proj"])):
        for autocast in (False, True):
            theirs, given = (adapted(name, target_modules=targets, autocast=autocast) for _ in range(2))
            ours = take_adapters(given)
            ids = sequences([9])[0][None]
            assert torch.equal(ours(ids).logits, theirs(ids).logits)
            assert not torch.equal(ours(ids).logits, random_model(name, torch.bfloat16)(ids).logits)
            assert any(isinstance(module, AdaptedLinear) for module in ours.modules())


def test_adapters_added_by_transformers_are_accepted():
    model = random_model("qwen3", torch.bfloat16)
    with mock.patch("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21"):  # 5.24 asks for 0.22, not yet released
        model.add_adapter(peft.LoraConfig(r=6, target_modules=TARGETS, init_lora_weights=False))
    expected = model(sequences([9])[0][None]).logits
    assert take_adapters(model) is model
    assert isinstance(model.model.layers[1].mlp.down_proj, AdaptedLinear)
    assert torch.equal(model(sequences([9])[0][None]).logits, expected)


def test_only_adapters_have_gradients(trainer: Trainer):
    entries = trainer.certificate.backward.entries
    products = sum(entry.count for entry in entries if "token_" in entry.op)
    assert products == 2 * 2 * len(TARGETS)  # A and B, in two layers
    actual = gradients(trainer, sequences(LENGTHS), [range(6)])
    assert len(actual) == products and all("lora_" in name for name in actual)
    assert all(gradient.abs().max() > 0 for gradient in actual.values())
    frozen = trainer.get_parameter("model.layers.0.self_attn.q_proj.base_layer.weight")
    assert frozen.dtype is torch.bfloat16 and frozen.grad is None
    assert trainer.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight").dtype is torch.float32


@EXHAUSTIVE
def test_freezing_base_weights_keeps_adapter_gradients(trainer: Trainer):
    """Adapter gradients do not depend on whether the base weights are trained."""
    model = adapted()
    for parameter in model.parameters():
        parameter.requires_grad_()
    whole = gradients(detcompile.trainer(model, max_context=MAX_CONTEXT), sequences(LENGTHS), [range(6)])
    actual = gradients(trainer, sequences(LENGTHS), [range(6)])
    assert len(whole) > 2 * len(actual)
    assert not [name for name in actual if not torch.equal(actual[name], whole[name])]


def test_gradients_are_equal_for_any_micro_batches(trainer: Trainer):
    rows = sequences(LENGTHS)
    one = gradients(trainer, rows, [range(6)])
    for groups in ([[5, 2, 0, 3, 4, 1]], [[5, 1], [0], [2, 4, 3]], [[number] for number in (3, 0, 4, 1, 5, 2)]):
        other = gradients(trainer, rows, groups)
        assert not [name for name in one if not torch.equal(one[name], other[name])], groups


def test_gradients_are_as_accurate_as_torchs(trainer: Trainer):
    rows = sequences(LENGTHS)
    actual = gradients(trainer, rows, [range(6)])
    truth, plain = (by_torch(dtype) for dtype in (torch.float64, torch.bfloat16))
    for part in ("lora_A", "lora_B"):
        names = [name for name in actual if part in name]
        ours, torchs = (
            sum(float((values[name].double() - truth[name]).norm() ** 2) for name in names)
            for values in (actual, plain)
        )
        assert 0 < ours <= 1.05**2 * torchs


def by_torch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of PEFT's own model, with the weights in bfloat16."""
    model, rows = adapted().to(dtype), sequences(LENGTHS)
    for row in rows:
        logits = model(row[None]).logits[0, :-1]
        logprobs = (logits if dtype is torch.float64 else logits.float()).log_softmax(-1)
        weights = torch.linspace(0.5, 1.5, len(row) - 1)
        (-(logprobs.gather(1, row[1:, None]).squeeze(1) * weights).sum() / sum(map(len, rows))).backward()
    named = model.get_base_model().named_parameters()
    return {name: parameter.grad.double() for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize(
    ("name", "tp", "config"),
    exhaustive_unless(
        ("qwen3", 1, ()).__eq__,
        [
            ("qwen3", 1, ()),
            ("qwen3", 2, ()),
            ("olmo2", 2, (("target_modules", "all-linear"),)),
            ("phi3", 2, (("target_modules", "all-linear"),)),
            ("gpt2", 2, (("target_modules", "all-linear"),)),
            ("llama", 2, (("autocast", True), ("use_rslora", True), ("lora_bias", True))),
        ],
    ),
)
def test_engine_and_trainer_logprobs_agree_before_and_after_step(
    name: str, tp: int, config: tuple[tuple[str, Any], ...], trainer: Trainer, tmp_path: Path
):
    trainer = trainer if (name, config) == ("qwen3", ()) else a_trainer(name, **dict(config))
    kept = {name: held.detach().clone() for name, held in trainer.named_parameters()}
    model: Any = detcompile.compile(adapted(name, **dict(config)), tp=tp, max_context=MAX_CONTEXT)
    before = model.fingerprint
    trainer.check(model)
    optimizer = detcompile.AdamW([held for held in trainer.parameters() if held.requires_grad], lr=1e-2)
    optimizer.zero_grad()
    add_gradients(trainer, sequences(LENGTHS), [[0, 1], [2, 3], [4, 5]])
    optimizer.step()
    moved = [name for name, held in trainer.named_parameters() if not torch.equal(held, kept[name])]
    assert moved == [name for name in kept if "lora_" in name]
    with pytest.raises(detcompile.TrainerMismatch, match=r"lora_[AB]\.default"):
        trainer.check(model)
    model.update_weights(trainer)
    assert logprobs_of(model) == own_logprobs(trainer)
    trainer.check(model, seed=1)
    assert model.fingerprint != before
    if tp == 1 and "autocast" not in dict(config):
        trainer.save_adapters(tmp_path / "adapters")
        loaded = peft.PeftModel.from_pretrained(
            random_model(name, torch.bfloat16), tmp_path / "adapters", autocast_adapter_dtype=False
        )
        read, served = take_adapters(loaded).state_dict(), trainer.serving_weights()
        assert not [name for name in served if not torch.equal(read[name], served[name])]
    with torch.no_grad():
        for name, held in trainer.named_parameters():
            held.copy_(kept[name])


PROMPT = sequences([70], seed=3)[0]


def logprobs_of(model: Any) -> list[float]:
    (output,) = model.engine(detcompile.EngineConfig(num_blocks=60)).generate(
        [PROMPT.tolist()], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), progress=False
    )
    return [entry.logprob for entry in output.prompt_logprobs[1:]]


def own_logprobs(trainer: Trainer) -> list[float]:
    with torch.no_grad():
        return trainer.logprobs(PROMPT[None])[0].tolist()


def test_peft_loads_saved_adapters(trainer: Trainer, tmp_path: Path):
    trainer.save_adapters(tmp_path / "new" / "folder")
    loaded = peft.PeftModel.from_pretrained(random_model("qwen3", torch.bfloat16), tmp_path / "new" / "folder").eval()
    ids = sequences([9])[0][None]
    assert torch.equal(loaded(ids).logits, adapted(autocast=True)(ids).logits)  # float32 that are bfloat16's values
    assert loaded.peft_config["default"].r == 6
    with pytest.raises(InvalidInput, match=r"folder holds PEFT adapters: .*from_pretrained"):
        detcompile.load_model(tmp_path / "new" / "folder", device="cpu")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="is a file"):
        trainer.save_adapters(tmp_path / "file")
    with pytest.raises(StorageError, match="Use another folder"):
        trainer.save_adapters(tmp_path / "file" / "below")


def merged() -> Any:
    model = adapted()
    model.merge_adapter()
    return model


def disabled() -> Any:
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


def two() -> Any:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def of_prompts() -> Any:
    model = random_model("qwen3", torch.bfloat16)
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def of_another_linear() -> Any:
    model = adapted()

    class Other(nn.Linear):
        pass

    model.get_base_model().model.layers[1].self_attn.q_proj.base_layer.__class__ = Other
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adapted(use_dora=True), r"layers\.0\.self_attn\.q_proj: a DoraLinearVariant"),
        (lambda: adapted(modules_to_save=["lm_head"]), r"lm_head: a peft.*ModulesToSaveWrapper"),
        (lambda: adapted(target_modules=["embed_tokens"]), r"embed_tokens: a peft\.tuners\.lora\.layer\.Embedding"),
        (lambda: adapted(target_modules=["lm_head"]), "language-model head: leave it out of target_modules"),
        (lambda: adapted(trainable_token_indices=[3]), "TrainableTokens"),
        (lambda: adapted(layer_replication=[(0, 2), (1, 2)]), "layer_replication"),
        (merged, "unmerge_adapter"),
        (disabled, "is not active: enable it"),
        (two, "default, other: one LoRA adapter"),
        (of_prompts, "PROMPT_TUNING"),
        (of_another_linear, r"layers\.1\.self_attn\.q_proj: an adapter of a Other"),
    ],
)
def test_unsupported_adapters_are_refused_by_name(make: Callable[[], Any], message: str):
    for call in (detcompile.trainer, detcompile.compile):
        with pytest.raises(UnsupportedModel, match=message):
            call(make())


def test_dropout_is_refused_in_training_only():
    with pytest.raises(UnsupportedModel, match=r"q_proj: lora_dropout=0\.1.*lora_dropout=0\.0"):
        detcompile.trainer(adapted(lora_dropout=0.1))
    assert isinstance(take_adapters(adapted(lora_dropout=0.1)), PreTrainedModel)


def test_saving_adapters_requires_adapters(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "_adapters", {})
    with pytest.raises(InvalidInput, match="has no PEFT adapters"):
        trainer.save_adapters(tmp_path)
