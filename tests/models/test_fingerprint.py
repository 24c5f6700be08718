"""The fingerprint changes with everything that changes a model's bits, and with nothing else."""

import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from detcompile import CompiledModel, EngineConfig, SamplingParams
from detcompile import digests as digests_module
from detcompile.executors.fingerprints import config_digest
from detcompile.passes import program_source
from detcompile.weights import tensor_digest
from tests.model_cases import certified, random_model


def made(change: Callable[[PreTrainedModel], object] = lambda model: None) -> CompiledModel:
    """Without the proof over a batch, which takes half the time and no part in a fingerprint."""
    model = random_model("llama", torch.float32, num_hidden_layers=1)
    change(model)
    with mock.patch.object(program_source, "certify_batches"):
        return certified(model)


@pytest.fixture(scope="module")
def plain() -> CompiledModel:
    return made()


def mlp_becomes(forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        mlp = model.model.layers[0].mlp
        mlp.forward = types.MethodType(forward, mlp)

    return change


def scaled_by_a_tensor(value: float) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        mlp = model.model.layers[0].mlp
        mlp.scale = torch.full((80,), value)  # neither a parameter nor a buffer
        mlp.register_forward_hook(lambda module, args, out: out * module.scale)

    return change


CHANGES = {
    "an attribute": lambda m: setattr(m.model.norm, "variance_epsilon", 1e-3),
    "the scale of attention": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.3),
    "the scale of rotations": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.1),
    "an activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()),
    "a hook": lambda m: m.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.25),
    "a constant": mlp_becomes(lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)) * s.up_proj(x)) * torch.tensor(1.5)),
    "another constant": mlp_becomes(
        lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x)) * s.up_proj(x)) * torch.tensor(1.25)
    ),
    "weights that change places": mlp_becomes(lambda s, x: s.down_proj(s.act_fn(s.up_proj(x)) * s.gate_proj(x))),
    "one order of two sums": mlp_becomes(lambda s, x: (s.down_proj(s.act_fn(s.gate_proj(x))) + x) + x * 0.1),
    "the other order": mlp_becomes(lambda s, x: s.down_proj(s.act_fn(s.gate_proj(x))) + (x + x * 0.1)),
    "a tensor": scaled_by_a_tensor(2.0),
    "another tensor": scaled_by_a_tensor(3.0),
}


@pytest.fixture(scope="module")
def changed() -> dict[str, CompiledModel]:
    return {name: made(change) for name, change in CHANGES.items()}


def test_every_change_of_the_program_is_another_fingerprint(plain, changed):
    prints = {name: model.fingerprint for name, model in {"plain": plain, **changed}.items()}
    assert len(set(prints.values())) == len(prints)


def test_patched_code_changes_fingerprint(plain, monkeypatch):
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", Norm.forward)
    assert made().fingerprint != plain.fingerprint


def test_the_same_model_has_the_same_fingerprint_whatever_was_compiled_before(plain, changed):
    again = made()
    assert again.fingerprint_parts == plain.fingerprint_parts
    assert again.program == made(lambda model: model.model.norm.weight.data.mul_(2)).program  # weights are not in it


def test_the_fingerprint_follows_weights_in_place_however_they_are_written(changed):
    model = changed["a tensor"]
    seen = [model.fingerprint]
    norm, mlp = model.model.model.norm, model.model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[3, 5] += 1e-3  # a view of joined weights by now
        seen.append(model.fingerprint)
    norm.weight.data.mul_(2)  # moves no version counter
    seen.append(model.fingerprint)
    model.model.model.rotary_emb.inv_freq.mul_(2)  # of no checkpoint
    seen.append(model.fingerprint)
    mlp.scale.mul_(2)
    seen.append(model.fingerprint)
    assert len(set(seen)) == len(seen)
    mlp.scale.div_(2)
    assert model.fingerprint == seen[-2]


def test_changing_config_after_compile_keeps_fingerprint(plain, monkeypatch):
    """As callers set a pad token; before the fingerprint was read as well as behind that."""
    later, known = made(), plain.fingerprint
    for model in (plain, later):
        monkeypatch.setattr(model.config, "pad_token_id", 3)
        assert model.fingerprint == known


def test_tokens_that_end_an_answer_are_another_fingerprint_as_long_as_they_are_set(plain, monkeypatch):
    """Before ``min_tokens`` they are not drawn, so that other ones make other tokens of equal logits."""

    def drawn() -> tuple[int, ...]:
        engine = plain.engine(EngineConfig(num_blocks=4))
        (output,) = engine.generate([[3, 5, 7]], SamplingParams(min_tokens=5, temperature=0), progress=False)
        return tuple(output.outputs[0].token_ids)

    before, without = drawn(), plain.fingerprint
    actual = {}
    for ends in (before[2], [before[2], before[0]], {before[0], before[2]}, None):
        with monkeypatch.context() as patch:
            patch.setattr(plain.generation_config, "eos_token_id", ends)
            actual.setdefault(plain.fingerprint, set()).add(drawn())
    assert [len(answers) for answers in actual.values()] == [1, 1, 1] and actual[without] == {before}
    assert plain.fingerprint == without


WIDE = torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.5, 1.0]], dtype=torch.float64)
ALIKE = {
    "elements change places": WIDE[:, [1, 0, 2]],
    "rows change places": WIDE[[1, 0]],
    "one sign": WIDE * torch.tensor([[-1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64),
    "two signs": WIDE * torch.tensor([[-1.0, -1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64),
    "all signs": -WIDE,
    "a zero below zero": WIDE.clone(),
    "another shape": WIDE.reshape(3, 2),
    "transposed": WIDE.t().contiguous(),
    "zeros behind": torch.cat([WIDE, torch.zeros(1, 3, dtype=torch.float64)]),
}
ALIKE["a zero below zero"][0, 2] = -0.0
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def test_nested_names_and_set_order_move_no_digest() -> None:
    def config(name: str, *languages: str) -> dict[str, object]:
        inner = {"_name_or_path": name, "transformers_version": name, "hidden_size": 8}
        return {"text_config": inner, "layers": [inner], "languages": set(languages)}

    names = [f"language {number}" for number in range(20)]
    digest = config_digest(config("a", *names))
    assert digest == config_digest(config("b", *reversed(names)))
    assert digest != config_digest(config("a", *names[1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_the_same_elements_have_digests_of_their_own(dtype):
    tensors = [WIDE, *ALIKE.values()]
    assert len({tensor_digest(tensor.to(dtype)) for tensor in tensors}) == len(tensors)


def test_a_digest_is_of_elements_and_not_of_memory():
    base = torch.arange(9 << 16, dtype=torch.float32).view(768, 768)  # several blocks
    for dtype in (*DTYPES, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64):
        tensor = base.remainder(200).to(dtype)
        for view in (tensor, tensor.t(), tensor[3:, 5:], tensor[:, 7], tensor[1], tensor[::2, ::3], tensor[4, 4]):
            assert tensor_digest(view) == tensor_digest(view.clone(memory_format=torch.contiguous_format))
    assert tensor_digest(torch.zeros(0, 3)) != tensor_digest(torch.zeros(3, 0))


def test_a_digest_sees_every_word_of_a_large_tensor():
    words = torch.zeros(3 << 20, dtype=torch.int32)
    digests = {tensor_digest(words)}
    places = [0, 1, (1 << 14) - 1, 1 << 14, (1 << 18) - 1, 1 << 18, (2 << 18) + 77, len(words) - 1]
    for place in places:
        words[place] = 1
        digests.add(tensor_digest(words))
        words[place] = 0
    assert len(digests) == 1 + len(places)


def test_sources_of_kernels_count_and_those_of_commands_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "__file__", str(tmp_path / "digests.py"))

    def digest_with(name: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one more")
        return digests_module.source_digest.__wrapped__()

    digests = [digest_with(name) for name in ("a.py", "cpu/a.cpp", "cpu/a.h", "cpu/direct/a.cpp")]
    assert len(set(digests)) == len(digests)
    assert {digest_with(name) for name in ("commands/a.py", "serving/tools/a.py", "a.txt")} == {digests[-1]}
