"""Quantized experts, heads and embeddings: every value is that of the format's definition."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import detcompile
from detcompile import DetcompileError
from detcompile.passes.modules.experts import find_experts
from detcompile.passes.modules.quantized_linear import QuantizedLinear
from detcompile.templates.ops import ours
from detcompile.templates.quantized.weights import dequantized
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.model_cases import VOCAB_SIZE, certified
from tests.parallel.cases import answers
from tests.quantized_checkpoints import (
    CHECKPOINTS,
    ODD_CHECKPOINTS,
    config_without_name,
    write_checkpoint,
    write_gpt_oss,
    write_mixture,
)

QUICK = ("fp8", "awq", "gptq_v2, act order", "compressed int4, partial groups")


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in QUICK, [*CHECKPOINTS, *ODD_CHECKPOINTS]))
def test_experts_are_read_correctly(name: str, tmp_path: Path) -> None:
    plain = write_mixture(tmp_path, name, torch.float16)
    model = detcompile.load_model(tmp_path, device="cpu")
    weights = dict(model.named_parameters())
    linears = {f"{path}.weight": m for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(linears) == 4 and weights.keys() | linears.keys() == plain.keys()
    for key, expected in plain.items():
        actual = linears[key].dequantized(torch.float16) if key in linears else weights[key].detach()
        assert_bitwise_equal(actual, expected, key)


def test_mxfp4_experts_are_read_correctly(tmp_path: Path) -> None:
    plain = write_gpt_oss(tmp_path, torch.bfloat16)
    model = detcompile.load_model(tmp_path, device="cpu")
    assert model.state_dict().keys() == plain.keys()
    for key, expected in plain.items():
        assert_bitwise_equal(model.state_dict()[key], expected, key)


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "compressed int4 with zeros", "compressed int8"])
def test_heads_and_embeddings_are_read_correctly(name: str, tmp_path: Path) -> None:
    others = ("lm_head", "model.embed_tokens")
    exact = write_checkpoint(tmp_path, name, torch.float16, others=others)
    model = detcompile.load_model(tmp_path, device="cpu")
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
    for path in others:
        assert_bitwise_equal(model.get_submodule(path).weight.detach(), exact[path].float().half(), path)


def test_groups_of_a_config_are_of_a_class(tmp_path: Path) -> None:
    """Groups of 32 of linears, and of 16 of the embedding."""
    exact = write_checkpoint(tmp_path, "compressed int4", torch.float16, others=("model.embed_tokens",))
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    groups = settings["quantization_config"]["config_groups"]
    weights = groups["group_0"]["weights"]
    for kinds, refused in ((["Linear", "Embedding"], "embed_tokens"), (["Embedding", "Linear"], "q_proj")):
        for kind, size, group in zip(kinds, (32, 16), ("group_0", "group_1")):
            groups[group] = {"targets": [kind], "weights": weights | {"group_size": size}}
        file.write_text(json.dumps(settings))
        with pytest.raises(DetcompileError, match=f"{refused}: 2 groups of scales do not fit K=64 in groups of 16"):
            detcompile.load_model(tmp_path, device="cpu")
    assert exact["model.embed_tokens"].shape == (VOCAB_SIZE, 64)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    write_gpt_oss(tmp_path, torch.bfloat16)
    return tmp_path


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("gate_up_proj_scales", lambda t: t.fill_(255), "gate_up_proj: a scale of its blocks is NaN"),
        ("gate_up_proj_blocks", lambda t: t[..., :8], r"gate_up_proj: blocks \(6, 512, 2, 8\) torch.uint8 and scales"),
        ("down_proj_scales", lambda t: t[:, :, :1], r"down_proj: blocks \(6, 64, 8, 16\) torch.uint8 and scales"),
        ("down_proj_blocks", lambda t: t.to(torch.int32), "down_proj: blocks .* torch.int32 and scales"),
        ("down_proj_scales", None, "down_proj: the checkpoint has blocks and no scales"),
    ],
)
def test_other_mxfp4_is_refused_by_name(leaf: str, change: Callable | None, message: str, gpt_oss: Path) -> None:
    name = f"model.layers.0.mlp.experts.{leaf}"

    def changed(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor).contiguous()

    change_tensors(gpt_oss, changed)
    with pytest.raises(DetcompileError, match=f"experts.{message}"):
        detcompile.load_model(gpt_oss, device="cpu")


def test_missing_expert_is_rejected(tmp_path: Path) -> None:
    write_mixture(tmp_path, "fp8", torch.bfloat16)
    gone = "experts.3.up_proj"
    change_tensors(tmp_path, lambda tensors: [tensors.pop(key) for key in list(tensors) if gone in key])
    with pytest.raises(DetcompileError):
        detcompile.load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in QUICK, [*CHECKPOINTS, *ODD_CHECKPOINTS]))
def test_experts_stay_quantized_on_demand(name: str, tmp_path: Path) -> None:
    plain = write_mixture(tmp_path, name, torch.float16)
    if "act order" in name:
        with pytest.raises(DetcompileError, match="experts whose K is permuted by group cannot stay quantized"):
            detcompile.load_model(tmp_path, device="cpu", dequantize=False)
        return
    model = detcompile.load_model(tmp_path, device="cpu", dequantize=False)
    assert_stacks(model, plain, torch.float16)


def test_mxfp4_experts_stay_quantized_on_demand(tmp_path: Path) -> None:
    plain = write_gpt_oss(tmp_path, torch.bfloat16)
    assert_stacks(detcompile.load_model(tmp_path, device="cpu", dequantize=False), plain, torch.bfloat16)


def assert_stacks(model: PreTrainedModel, plain: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compare the values of stacks with those of plain weights, and products with theirs."""
    assert model.name_or_path not in config_without_name(model)
    ((path, experts),) = find_experts(model)
    ids = torch.tensor([[0, 5, 2], [5, 1, 6], [3, 3, 4]])
    for projection in ("gate_up_proj", "down_proj"):
        stack = getattr(experts, projection)
        expected = plain[f"{path}.{projection}"]
        expected = expected.transpose(1, 2) if experts.is_transposed else expected
        actual = dequantized(stack.quantized, dtype).view(expected.shape)
        assert torch.equal(actual, expected)
        x = torch.randn(3, stack.in_features, generator=torch.Generator().manual_seed(3)).to(dtype)
        bias = getattr(experts, f"{projection}_bias") if experts.has_bias else None
        weights = expected.contiguous()
        assert_bitwise_equal(stack(x, ids, bias, [2, 4]), ours.expert_matmul(x, ids, weights, bias, [2, 4]))
        assert_bitwise_equal(stack.partial(x, ids, [4], 2), ours.expert_matmul_partial(x, ids, weights, [4], 2))


def test_dequantize_is_rejected_for_linears_that_stay_quantized(tmp_path: Path) -> None:
    write_mixture(tmp_path, "fp8", torch.bfloat16)
    with pytest.raises(DetcompileError, match="linears of other quantized checkpoints always stay quantized"):
        detcompile.load_model(tmp_path, device="cpu", dequantize=True)
    change_tensors(tmp_path, lambda tensors: [tensors.pop(key) for key in list(tensors) if "experts.3.up" in key])
    with pytest.raises(DetcompileError, match=r"experts\.3: the checkpoint lacks a part of its gate_up_proj"):
        detcompile.load_model(tmp_path, device="cpu", dequantize=False)


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_models_with_kept_experts_serve_the_same_bits(name: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, torch.bfloat16) if name == "mxfp4" else write_mixture(tmp_path, name, torch.bfloat16)
    actual = []
    for dequantize in (None, False):
        model = certified(detcompile.load_model(tmp_path, device="cpu", dequantize=dequantize), max_context=256)
        kept = "detcompile.dequant_expert_matmul.default" in {entry.op for entry in model.certificate.entries}
        assert kept == (dequantize is False)
        actual.append((model.fingerprint, answers(model)))
    (plain, expected), (kept, given) = actual
    assert plain != kept
    for what, values in expected.items():
        assert_bitwise_equal(given[what], values, what)
