"""What compile() would compute differently is rejected before the model is changed."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel

from detcompile import InvalidInput, Numerics, UnsupportedModel
from detcompile.passes.preparation import prepare
from tests.model_cases import certified, random_model


def split_head(model: PreTrainedModel) -> None:
    model.lm_head = nn.Sequential(nn.Linear(80, 20), nn.Linear(20, 160))


def wrapped_embedding(model: PreTrainedModel) -> None:
    model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, nn.LayerNorm(80))


@pytest.mark.parametrize(("change", "what"), [(split_head, "head"), (wrapped_embedding, "token embedding")])
def test_embedding_without_a_weight_table_is_rejected(change, what: str) -> None:
    model = random_model("llama", torch.float32, num_hidden_layers=1)
    change(model)
    with pytest.raises(UnsupportedModel, match=f"its {what} is a Sequential without one weight row"):
        certified(model)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
@pytest.mark.parametrize("arithmetic", ["float", "exact16"])
def test_hooks_of_all_modules_are_rejected(register, arithmetic: str) -> None:
    """A hook of all linears would miss those that are replaced."""
    model, numerics = random_model("llama", torch.float32, num_hidden_layers=1), Numerics(arithmetic=arithmetic)
    handle = register(lambda module, *given: given[-1] * 2 if isinstance(module, nn.Linear) else None)
    try:
        with pytest.raises(InvalidInput, match="hooks are registered for all modules"):
            prepare(model, numerics, 64)
    finally:
        handle.remove()
    prepare(model, numerics, 64)
