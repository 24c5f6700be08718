"""Mixtures of experts: the router's ties, the order of the experts' sum, the meaning, and the axes."""

import functools
import types
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import detcompile
from detcompile import CompiledModel, Numerics, UncertifiedOp, UnsupportedModel
from detcompile.commands.axes import Configuration, score
from detcompile.orders import Experts
from detcompile.passes import pipeline
from detcompile.passes.backend import Backend
from detcompile.passes.modules.experts import experts, mixed, pin_experts
from detcompile.passes.rewrites.sorts import pin_topk
from detcompile.passes.tracing import cause
from tests.bits import assert_bitwise_equal
from tests.invariance.axis import configuration_for
from tests.model_cases import VOCAB_SIZE, random_model

MIXTURE = {
    "num_hidden_layers": 1,
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def mixture(device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_model("qwen3_moe", dtype, device, **MIXTURE)


@functools.cache
def compiled_mixture(device: str) -> CompiledModel:
    model = mixture(device, torch.float32 if device == "cpu" else torch.bfloat16)
    return detcompile.compile(model, numerics=Numerics(tp_sizes=(1, 2)), max_context=256)


def test_mixture_equals_hugging_face() -> None:
    ids = torch.randint(0, VOCAB_SIZE, (2, 130), generator=torch.Generator().manual_seed(5))
    plain = mixture()
    plain.set_experts_implementation("eager")
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
    model = compiled_mixture("cpu")
    assert (model(ids).logits - expected).norm() < 1e-5 * expected.norm()
    products = [entry for entry in model.certificate.entries if entry.op == "detcompile.expert_matmul.default"]
    assert len(products) == 2
    assert {entry.order for entry in products} == {
        "Blocked(80, block=128)",
        "Tree(48, 2, Blocked(24, block=128))",
    }


@pytest.mark.parametrize("axis", ["batch", "composition", "padding", "chunking", "decode"])
def test_every_axis_holds(axis: str, device: str) -> None:
    configuration = configuration_for(axis, 67, 3)
    alone = score(compiled_mixture(device), Configuration((configuration.rows[configuration.target],)))
    assert_bitwise_equal(score(compiled_mixture(device), configuration), alone, configuration.describe())


def test_norm_of_an_experts_output_is_applied() -> None:
    spark = pytest.importorskip(
        "transformers.models.muse_spark.modeling_muse_spark",
        reason="checks the experts of Muse Spark, which transformers has from 5.24 on",
    )
    sizes = {"num_local_experts": 6, "moe_hidden_size": 32, "moe_intermediate_size": 48}
    stack = spark.MuseSparkExperts(spark.MuseSparkTextConfig(num_hidden_layers=1, **sizes))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in stack.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        rows, ids = torch.randn(9, 32, generator=generator), torch.randint(0, 6, (9, 1), generator=generator)
        ids = torch.cat([ids, (ids + 1) % 6], 1)
        shares = torch.rand(9, 2, generator=generator)
        expected = type(stack).forward.__wrapped__(stack, rows, ids, shares)
        assert (experts(stack, rows, ids, shares) - expected).norm() < 1e-5 * expected.norm()


def test_experts_with_an_unknown_setting_are_refused() -> None:
    model = mixture()
    model.model.layers[0].mlp.experts.has_pre_expert_norm = True
    with pytest.raises(UnsupportedModel, match="experts with has_pre_expert_norm are not supported"):
        pin_experts(model)


def stack_of_experts(dtype: torch.dtype) -> nn.Module:
    """What experts() reads of a module, with eight experts."""
    generator = torch.Generator().manual_seed(2)
    marks = {"has_gate": False, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    weights = {
        "up_proj": torch.randn(8, 24, 16, generator=generator).to(dtype),
        "down_proj": torch.randn(8, 16, 24, generator=generator).to(dtype),
    }
    return types.SimpleNamespace(act_fn=torch.relu, _apply_gate=None, **marks, **weights)  # type: ignore[return-value]


def test_experts_are_added_in_the_routers_order() -> None:
    module = stack_of_experts(torch.float32)
    x, weights = torch.randn(11, 16), torch.rand(11, 5)
    ids = torch.stack([torch.randperm(8)[:5] for _ in range(11)])
    parts = torch.stack([experts(module, x, ids[:, rank : rank + 1], weights[:, rank : rank + 1]) for rank in range(5)])
    expected = torch.from_numpy(np.asarray(Experts(5).evaluate(parts.numpy())))
    assert_bitwise_equal(experts(module, x, ids, weights), expected)
    assert not torch.equal(experts(module, x, ids.flip(1), weights.flip(1)), expected)


def test_weights_of_float32_multiply_rows_of_bfloat16_unrounded() -> None:
    """As Mixtral's router has them: one rounding, after the sum."""
    generator = torch.Generator().manual_seed(3)
    outer = torch.randn(11, 3, 16, generator=generator).bfloat16()
    weights = torch.rand(11, 3, generator=generator)
    products = (outer.float() * weights[..., None]).unbind(1)
    expected = ((products[0] + products[1]) + products[2]).bfloat16()
    actual = mixed(outer, weights)
    assert actual.dtype == torch.bfloat16
    assert_bitwise_equal(actual, expected)


def ranked(x: torch.Tensor) -> torch.Tensor:
    """The best three of each row as values and as places, then the worst two in no order."""
    values, places = x.topk(3, -1)
    worst = x.topk(2, -1, largest=False, sorted=False)
    return torch.cat([values, places.float(), worst.values, worst.indices.float()], -1)


def test_of_equal_elements_the_first_are_found() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 0.0], [2.0] * 6, [0.0, -0.0, 5.0, 5.0, -1.0, -1.0]])
    run = torch.compile(ranked, backend=Backend(Numerics()), fullgraph=True)
    torch._dynamo.mark_dynamic(x, 0)
    expected = [[3, 3, 3, 1, 2, 4, 0, 1, 5, 0], [2, 2, 2, 0, 1, 2, 2, 2, 0, 1], [5, 5, 0, 2, 3, 0, -1, -1, 4, 5]]
    assert run(x).tolist() == expected
    assert run(x.repeat(30, 1))[-3:].tolist() == expected


@pytest.mark.parametrize("ordered", [True, False])
def test_a_ranking_that_was_not_pinned_is_refused(ordered: bool) -> None:
    passes = tuple(apply for apply in pipeline.PASSES if apply is not pin_topk)
    run = torch.compile(lambda x: x.topk(2, -1, sorted=ordered).indices, backend=Backend(Numerics()))
    with mock.patch.object(pipeline, "PASSES", passes), pytest.raises(Exception) as refused:
        run(torch.randn(6, 16))
    assert "equal elements" in str(cause(refused.value))


def test_experts_of_an_unknown_layout_are_refused_by_name() -> None:
    model = mixture()
    experts_of = model.model.layers[0].mlp.experts
    experts_of.down_proj = nn.Parameter(experts_of.down_proj.flatten(0, 1))
    with pytest.raises(UnsupportedModel, match=r"model.layers.0.mlp.experts.down_proj is not a stack"):
        pin_experts(model)


def test_experts_chosen_by_another_row_are_refused() -> None:
    w = torch.randn(4, 16, 16)

    def crossed(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.detcompile.expert_matmul(x, x.argmax(-1, keepdim=True).flip(0) % 4, w, None)

    run = torch.compile(crossed, backend=Backend(Numerics()), fullgraph=True)
    with pytest.raises(Exception) as refused:
        run(torch.randn(6, 16))
    actual = cause(refused.value)
    assert isinstance(actual, UncertifiedOp) and "flip" in str(actual)
