"""The classes of docs/guides/verl.md and openrlhf.md run, over stubs of what these packages give them."""

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import detcompile
from detcompile.models.hub import TINY_FOLDER
from tests.exhaustive import EXHAUSTIVE
from tests.test_docs_code import blocks

pytestmark = EXHAUSTIVE

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
MODEL = "tiny-draft"
EOS = 0


class DataProto:
    """verl's batch of tensors, as far as the adapters use it."""

    def __init__(self, batch: dict[str, Tensor], meta_info: dict[str, Any]) -> None:
        self.batch, self.meta_info = batch, meta_info

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor]) -> "DataProto":
        return cls(tensors, {})

    def split(self, size: int) -> list["DataProto"]:
        parts = {name: tensor.split(size) for name, tensor in self.batch.items()}
        count = len(next(iter(parts.values())))
        return [DataProto({name: part[i] for name, part in parts.items()}, self.meta_info) for i in range(count)]


class BaseRollout:
    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh


class BasePPOActor:
    def __init__(self, config: Any) -> None:
        self.config = config


STUBS: dict[str, dict[str, Any]] = {
    "verl": {"DataProto": DataProto},
    "verl.workers": {},
    "verl.workers.actor": {},
    "verl.workers.actor.base": {"BasePPOActor": BasePPOActor},
    "verl.workers.rollout": {},
    "verl.workers.rollout.base": {"BaseRollout": BaseRollout},
    "openrlhf": {},
    "openrlhf.utils": {},
    "openrlhf.utils.distributed_util": {"init_process_group": lambda **how: how},
}


def classes_of(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of a page defines, with the stubs in the places of the packages."""
    for name, contents in STUBS.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    (block,) = blocks((GUIDES / page).read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {}
    exec(compile(block.code, page, "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def trainer() -> detcompile.Trainer:
    return detcompile.trainer(MODEL, device="cpu")


def prompts_of(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids and mask, padded on the left."""
    rows = tokenized(texts)
    columns = max(map(len, rows))
    ids = torch.tensor([[EOS] * (columns - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])


def tokenized(texts: list[str]) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(TINY_FOLDER)(texts)["input_ids"]


def test_verl_is_on_policy_and_follows_no_micro_batch(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = classes_of("verl.md", monkeypatch)
    config = SimpleNamespace(response_length=6, temperature=1.0)
    rollout = found["DetcompileRollout"](config, SimpleNamespace(local_path=MODEL), None)
    ids, mask = prompts_of(["import json\n", "def mean(values):\n    return", "x = 1\n"])
    asked = DataProto({"input_ids": ids, "attention_mask": mask}, {"eos_token_id": EOS, "pad_token_id": EOS})
    drawn = rollout.generate_sequences(asked)
    drawn.meta_info["temperature"] = 1.0
    start = {name: weight.detach().clone() for name, weight in trainer.named_parameters()}
    ended = []
    for size in (3, 1):
        with torch.no_grad():
            for name, weight in trainer.named_parameters():
                weight.copy_(start[name])
        settings = SimpleNamespace(ppo_micro_batch_size_per_gpu=size, clip_ratio=0.2, grad_clip=1.0)
        optimizer = detcompile.AdamW(trainer.parameters(), lr=1e-3)
        actor = found["DetcompileActor"](settings, trainer, optimizer)
        drawn.batch["old_log_probs"] = actor.compute_log_prob(drawn)
        assert torch.equal(drawn.batch["old_log_probs"], drawn.batch["rollout_log_probs"])
        drawn.batch["advantages"] = torch.tensor([[1.0], [-0.5], [0.25]]).expand(3, 6)
        assert actor.update_policy(drawn)["actor/grad_norm"] > 0
        ended.append(trainer.serving_weights())
    assert not [name for name in ended[0] if not torch.equal(ended[0][name], ended[1][name])]
    assert [name for name in start if not torch.equal(start[name].bfloat16(), ended[0][name].bfloat16())]

    asyncio.run(rollout.update_weights(iter(ended[0].items())))
    again = rollout.generate_sequences(asked)
    again.meta_info["temperature"] = 1.0
    assert torch.equal(actor.compute_log_prob(again), again.batch["rollout_log_probs"])
    with pytest.raises(ValueError, match="delta_flush"):
        asyncio.run(rollout.update_weights(iter(()), wire_format="delta_flush"))


def test_openrlhf_serves_actors_together_with_the_weights_sent(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = classes_of("openrlhf.md", monkeypatch)
    monkeypatch.setattr(detcompile, "trainer", lambda name: trainer)
    actor = found["DetcompileActor"](MODEL)
    engine = found["DetcompileEngine"](MODEL, num_actors=2, dtype="bfloat16")
    engine.init_process_group("host", 1, 1, 2, "group", "gloo", False)
    assert engine.group["init_method"] == "tcp://host:1" and engine.group["rank"] == 1
    with torch.no_grad():
        trainer.get_parameter("model.norm.weight").mul_(1.5)
    sent = trainer.serving_weights()
    for name, weight in sent.items():
        monkeypatch.setattr(torch.distributed, "broadcast", lambda into, source, group, w=weight: into.copy_(w))
        engine.update_weight(name, weight.dtype, weight.shape)
    asked = SimpleNamespace(max_tokens=5, temperature=1.0)
    first, second = tokenized(["import json\n"]), tokenized(["x = 1\n", "class Point:\n"])
    engine.add_requests(1, sampling_params=asked, prompt_token_ids=second)
    assert engine.responses == {}
    engine.add_requests(0, sampling_params=asked, prompt_token_ids=first)
    answers = engine.get_responses(0) + engine.get_responses(1)
    assert [answer.prompt_token_ids for answer in answers] == first + second
    for answer in answers:
        (one,) = answer.outputs
        sequence = torch.tensor([answer.prompt_token_ids + one.token_ids])
        logprobs = actor(sequence, len(one.token_ids), torch.ones_like(sequence)).detach()
        assert logprobs[0].tolist() == [entry.logprob for entry in one.logprobs]
