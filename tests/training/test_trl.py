"""TRL's GRPOTrainer over our engine and trainer is on policy to the bit, in any micro-batches."""

import json
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import detcompile
from detcompile import InvalidInput
from detcompile.weights import weight_digests

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft", reason="PEFT comes with the extra lora")
from datasets import Dataset  # noqa: E402 - comes with trl

from detcompile.trl import GRPOTrainer  # noqa: E402
from detcompile.trl.grpo import _divergence  # noqa: E402
from tests.exhaustive import EXHAUSTIVE  # noqa: E402

pytestmark = EXHAUSTIVE  # the extra `trl` comes with make test-all

ROOT = Path(__file__).parents[2]
PROMPTS = ["def add(first, second):\n    return", "import json\n", "class Point:\n", "x = 1\n"]
LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


def spaces(completions: list[str], **others: Any) -> list[float]:
    """A reward: the share of blanks."""
    return [text.count(" ") / max(1, len(text)) for text in completions]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="module")
def sampler() -> detcompile.CompiledModel:
    return detcompile.compile("tiny-draft", device="cpu")


def config(folder: Path, **changed: Any) -> Any:
    given = {
        "output_dir": str(folder), "max_steps": 3, "num_generations": 4, "max_completion_length": 8,
        "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "seed": 3, "disable_tqdm": True,
    }  # fmt: skip
    return trl.GRPOConfig(**given | changed)


def trained(
    folder: Path, sampler: detcompile.CompiledModel | None, adapter: bool = False, **changed: Any
) -> GRPOTrainer:
    model = detcompile.load_model("tiny-draft", device="cpu")
    keywords: dict[str, Any] = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS}), "sampler": sampler}
    if adapter:
        keywords |= {"peft_config": LORA, "sampler": None}
    elif sampler is not None:
        sampler.update_weights(model)
    made = GRPOTrainer(model, spaces, config(folder, **changed), **keywords)
    made.train()
    return made


def logged(made: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "cispo"])
def test_training_is_on_policy_and_equal_for_any_micro_batches(loss: str, sampler: Any, tmp_path: Path) -> None:
    start = {n: p.detach().float() for n, p in detcompile.load_model("tiny-draft", device="cpu").named_parameters()}
    whole = trained(tmp_path, sampler, loss_type=loss)
    parts = trained(
        tmp_path, sampler, loss_type=loss, per_device_train_batch_size=2, gradient_accumulation_steps=4,
        gradient_checkpointing=False,
    )  # fmt: skip
    for made in (whole, parts):
        assert logged(made, "sampling/kl") == [0.0] * 3
        assert logged(made, "sampling/sampling_logp_difference/max") == [0.0] * 3
        assert len(set(logged(made, "reward"))) > 1 and min(logged(made, "grad_norm")) > 0
    other = dict(parts.model.named_parameters())
    assert not [name for name, weight in whole.model.named_parameters() if not torch.equal(weight, other[name])]
    assert [name for name, weight in whole.model.named_parameters() if not torch.equal(weight, start[name])]
    assert all(weight is whole.policy.get_parameter(name) for name, weight in whole.model.named_parameters())


def test_kl_divergence_is_equal_for_any_split(sampler: Any, tmp_path: Path) -> None:
    whole, parts = (
        trained(tmp_path, sampler, beta=0.1, **split)
        for split in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    )
    for made in (whole, parts):
        divergence = logged(made, "kl")
        assert divergence[0] == 0.0 and min(divergence[1:]) > 0
        assert logged(made, "sampling/kl") == [0.0] * 3
    other = dict(parts.model.named_parameters())
    assert not [name for name, weight in whole.model.named_parameters() if not torch.equal(weight, other[name])]


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.7}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"loss_type": "cispo", "top_p": 0.8}]
)
def test_trainer_and_sampler_agree_with_filters(changed: dict[str, Any], sampler: Any, tmp_path: Path) -> None:
    """Log-probabilities are those of the filtered distribution."""
    whole, parts = (
        trained(tmp_path, sampler, **changed, **split)
        for split in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    )
    for made in (whole, parts):
        assert logged(made, "sampling/kl") == logged(made, "sampling/sampling_logp_difference/max") == [0.0] * 3
        assert len(set(logged(made, "reward"))) > 1 and min(logged(made, "grad_norm")) > 0
    other = dict(parts.model.named_parameters())
    assert not [name for name, weight in whole.model.named_parameters() if not torch.equal(weight, other[name])]


def test_grpo_trains_only_adapters(tmp_path: Path) -> None:
    """The engine draws with the adapter, whether the trainer created it or received it."""
    whole = trained(tmp_path, None, adapter=True, beta=0.1)
    trl.trainer.grpo_trainer.set_seed(3)
    model = peft.get_peft_model(detcompile.load_model("tiny-draft", device="cpu"), LORA, autocast_adapter_dtype=False)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    keywords = {"sampler": whole.sampler, "train_dataset": Dataset.from_dict({"prompt": PROMPTS})}
    parts = GRPOTrainer(model.eval(), spaces, config(tmp_path, beta=0.1, **split), **keywords)
    start = {name: weight.detach().clone() for name, weight in parts.policy.named_parameters()}
    parts.train()
    for made in (whole, parts):
        assert logged(made, "sampling/kl") == logged(made, "sampling/sampling_logp_difference/max") == [0.0] * 3
        assert logged(made, "kl")[0] == 0.0 < min(logged(made, "kl")[1:]) and min(logged(made, "grad_norm")) > 0
    other = dict(parts.policy.named_parameters())
    assert not [name for name, weight in whole.policy.named_parameters() if not torch.equal(weight, other[name])]
    changed = {name for name, weight in other.items() if not torch.equal(weight, start[name])}
    assert changed == {name for name in other if ".lora_" in name} and len(changed) == 8
    whole.save_model(str(tmp_path / "saved"))
    base = detcompile.load_model("tiny-draft", device="cpu")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "saved").get_base_model().get_parameter
    assert all(torch.equal(read(name), other[name]) for name in changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"loss_type": "dapo", "beta": 0.1}, {"loss_type": "dr_grpo", "gradient_accumulation_steps": 2},
        {"adapter": True},
    ],
)  # fmt: skip
def test_two_processes_train_same_weights_as_one(changed: dict[str, Any], sampler: Any, tmp_path: Path) -> None:
    """Two processes with half of each batch end with the same weights; sampler and trainer agree."""
    whole = trained(tmp_path, sampler, **changed)
    split = json.dumps(changed | {"per_device_train_batch_size": 4})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.training.grpo_processes", str(tmp_path), split]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert finished.returncode == 0, finished.stderr[-5000:]
    actual = json.loads((tmp_path / "run.json").read_text())
    assert actual["digests"] == weight_digests(dict(whole.policy.named_parameters()))
    for name in ("sampling/kl", "sampling/sampling_logp_difference/max"):
        assert [entry[name] for entry in actual["logs"] if name in entry] == [0.0] * 3
    for name in ("reward", "grad_norm"):
        assert [entry[name] for entry in actual["logs"] if name in entry] == logged(whole, name), name


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("is_old", [True, False])
def test_kl_divergence_gradient_matches_formula(is_weighted: bool, is_old: bool) -> None:
    draw = torch.Generator().manual_seed(5)
    logprobs, reference, drawn = -3 * torch.rand(3, 300, generator=draw)
    old = drawn if is_old else None
    logprobs.requires_grad_()
    terms = _divergence(logprobs, reference, old, is_weighted)
    terms.sum().backward()
    exact = logprobs.detach().double().requires_grad_()
    apart = reference.double() - exact
    expected = apart.exp() - apart - 1
    if is_weighted:
        expected = expected * (exact - (exact.detach() if old is None else old.double())).exp()
    expected.sum().backward()
    torch.testing.assert_close(terms.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]


def test_batch_without_tokens_logs_zeros() -> None:
    """As of completions that mask_truncated_completions leaves out."""
    made = SimpleNamespace(accelerator=SimpleNamespace(gather=lambda values: values), model=torch.nn.Linear(1, 1))
    made._metrics, made._log_mean = {"train": defaultdict(list)}, partial(GRPOTrainer._log_mean, made)
    nothing = torch.zeros(2, 3)
    GRPOTrainer._show(made, nothing, nothing, nothing.bool(), nothing)
    assert made._metrics["train"].pop("sampling/sampling_logp_difference/max") == [0.0]
    assert list(made._metrics["train"].values()) == [[0.0]] * 3


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_later_iterations_over_one_batch_are_off_policy(loss: str, sampler: Any, tmp_path: Path) -> None:
    """The ratio is to the sampling policy, so it differs from 1 once a step has changed the weights."""
    whole, parts = (
        trained(tmp_path, sampler, loss_type=loss, num_iterations=2, max_steps=4, **split)
        for split in ({}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    )
    drift = logged(whole, "sampling/kl")
    assert drift[0] == drift[2] == 0.0 and min(drift[1], drift[3]) > 0
    other = dict(parts.model.named_parameters())
    assert not [name for name, weight in whole.model.named_parameters() if not torch.equal(weight, other[name])]


@pytest.mark.parametrize(("adapter", "step"), [(False, 3), (True, 2)])  # in an epoch, and at its end
def test_resumed_run_gives_same_weights(adapter: bool, step: int, tmp_path: Path) -> None:
    kept = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path, None, adapter=adapter, **kept)
    data = Dataset.from_dict({"prompt": PROMPTS})
    keywords = {"train_dataset": data, "sampler": whole.sampler, "peft_config": LORA if adapter else None}
    resumed = GRPOTrainer("tiny-draft", spaces, config(tmp_path, **kept), **keywords)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert logged(resumed, "reward") == logged(whole, "reward") and logged(resumed, "sampling/kl") == [0.0] * 4
    other = dict(resumed.policy.named_parameters())
    assert not [name for name, weight in whole.policy.named_parameters() if not torch.equal(weight, other[name])]


def test_second_train_call_draws_with_current_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second ``train`` counts steps from 0 again, but its first draws use the trained weights."""
    made: Any = object.__new__(GRPOTrainer)
    policy, updates = torch.nn.Linear(2, 2), []
    made.__dict__.update(
        state=SimpleNamespace(global_step=0), args=SimpleNamespace(seed=0), policy=policy, _served=None, _num_drawn=0,
        sampler=SimpleNamespace(update_weights=updates.append),
        _engine=SimpleNamespace(generate=lambda prompts, params, progress: []),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
    )  # fmt: skip

    def num_updates() -> int:
        made._generate_single_turn([], None, None)
        return len(updates)

    assert [num_updates(), num_updates()] == [1, 1]
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    detcompile.AdamW(policy.parameters()).step()
    assert [num_updates(), num_updates()] == [2, 2]
    with torch.no_grad():
        policy.bias.mul_(2)
    assert [num_updates(), num_updates()] == [3, 3]
    monkeypatch.setattr(trl.GRPOTrainer, "train", lambda self: num_updates())
    assert made.train() == 4  # the sampler may have got others since


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_type": "grpo"}, "loss_type='grpo'"),
        ({"loss_type": "bnpo"}, "one of cispo, dapo, dr_grpo"),
        ({"sync_ref_model": True, "beta": 0.04}, "sync_ref_model=True is not supported"),
        ({"repetition_penalty": 1.1}, "another distribution"),
        ({"top_p": 0.9, "beta": 0.1}, "their divergence is not defined"),
        ({"top_k": 5, "num_iterations": 2}, "Train each batch in one step"),
        ({"min_p": 0.1, "steps_per_generation": 2}, "steps_per_generation=1"),
        ({"top_entropy_quantile": 0.2}, "micro-batches"),
        ({"optim": "sgd"}, "optim='sgd'"),
        ({"neftune_noise_alpha": 5.0}, "no noise"),
    ],
)
def test_off_policy_or_split_dependent_options_are_refused(changed: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        GRPOTrainer("tiny-draft", spaces, config(tmp_path, **changed))


def test_a_rollout_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="rollout_func is not supported"):
        GRPOTrainer("tiny-draft", spaces, config(tmp_path), rollout_func=lambda prompts, trainer: {})
