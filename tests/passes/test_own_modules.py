"""Modules that are given another forward compute what theirs did: positions, adapters, experts, attention."""

import pytest
import torch

from detcompile.passes.capture import freeze_rope, probe_attention
from detcompile.passes.own_experts import OWN_EXPERTS, replace_experts
from detcompile.passes.own_modules import OWN_MODULES
from detcompile.passes.positions import give_positions
from detcompile.passes.small_products import pin_small_products
from docs.model_checks import LENGTH, MEANING_LIMIT, relative_error
from docs.model_configs import MAX_CONTEXT, VOCAB_SIZE, tiny_model
from tests.bits import assert_bitwise_equal

IDS = torch.randint(3, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(5))
OWN = ("bigbird_pegasus", "ctrl", "deepseek_v2", "diffllama", "git", "hrm_text", "xglm", "xmod")
OF_EXPERTS = ("aria_text", "dbrx", "jetmoe", "longcat_flash")


@pytest.mark.parametrize("name", OWN + OF_EXPERTS)
def test_logits_are_the_models_own(name: str) -> None:
    with torch.no_grad():
        expected = tiny_model(name, "eager")(input_ids=IDS, use_cache=False).logits
        model = tiny_model(name)
        give_positions(model)
        freeze_rope(model, MAX_CONTEXT)
        assert bool(replace_experts(model)) == (name in OF_EXPERTS)
        probe_attention(model, 64)
        positions = torch.arange(LENGTH).repeat(2, 1)
        logits = model(input_ids=IDS, position_ids=positions, use_cache=False).logits
    assert relative_error(logits, expected) < MEANING_LIMIT


def test_a_class_is_known_by_where_transformers_defines_it() -> None:
    assert all(name.count(".") == 2 and "modeling_" in name for name in OWN_EXPERTS | OWN_MODULES)
    model = tiny_model("jetmoe")
    for module in list(model.modules()):
        if type(module).__name__.startswith("JetMoeMo"):
            own = type(module)
            module.__class__ = type(own.__name__, (own,), {"__module__": __name__})
    assert replace_experts(model) == 0


def traced(a: torch.Tensor, b: torch.Tensor) -> torch.fx.GraphModule:
    return torch.fx.experimental.proxy_tensor.make_fx(torch.bmm, tracing_mode="fake")(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_product_is_a_sum_over_features(dtype: torch.dtype) -> None:
    a, b = torch.randn(5, 16, 4).to(dtype), torch.randn(5, 4, 3).to(dtype)
    gm = pin_small_products(traced(a, b))
    gm.recompile()
    exact = torch.bmm(a.double(), b.double())
    tolerance = 4 * torch.finfo(dtype).eps * torch.bmm(a.double().abs(), b.double().abs())
    assert bool(((gm(a, b).double() - exact).abs() <= tolerance).all())
    assert_bitwise_equal(gm(a[1:3], b[1:3]), gm(a, b)[1:3])


def test_a_long_product_is_left_to_the_certificate() -> None:
    gm = pin_small_products(traced(torch.randn(5, 16, 9), torch.randn(5, 9, 3)))
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
