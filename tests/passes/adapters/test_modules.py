"""Modules with a replaced forward compute the same: positions, adapters, experts, attention."""

import inspect

import pytest
import torch
from transformers.models.aria import modeling_aria

from detcompile.contrib import MODELS, table_of
from detcompile.passes.adapters.modules import EXPERT_METHODS, MODULE_METHODS, replace_experts
from detcompile.passes.capture import freeze_rope, probe_attention
from detcompile.passes.modules.positions import give_positions
from tools.model_checks import LENGTH, MEANING_LIMIT, relative_error
from tools.model_configs import MAX_CONTEXT, VOCAB_SIZE, tiny_model

IDS = torch.randint(3, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(5))
OWN = ("bigbird_pegasus", "ctrl", "deepseek_v2", "diffllama", "git", "hrm_text", "xglm", "xmod")
OF_EXPERTS = ("dbrx", "jetmoe", "longcat_flash")
# From 5.24 on, Aria's experts call the interface of transformers.
if "router_logits" in inspect.signature(modeling_aria.AriaExperts.forward).parameters:
    OF_EXPERTS += ("aria_text",)


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


def test_class_is_identified_by_its_module() -> None:
    assert all(name.count(".") == 2 and "modeling_" in name for name in EXPERT_METHODS | MODULE_METHODS)
    kinds = ("ADAPTERS", "ATTENTION", "EXPERTS", "MIXERS", "MODULES")
    for folder in MODELS:
        names = [name for kind in kinds for name in table_of(folder, kind)]
        assert names and all(name.startswith(f"{folder}.modeling_{folder}.") for name in names)
    model = tiny_model("jetmoe")
    for module in list(model.modules()):
        if type(module).__name__.startswith("JetMoeMo"):
            item = type(module)
            module.__class__ = type(item.__name__, (item,), {"__module__": __name__})
    assert replace_experts(model) == 0
