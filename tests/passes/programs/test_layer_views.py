"""A view of some of a model's layers equals a model with only these layers, and shares its weights."""

import pytest
import torch
from torch import nn

import detcompile
from detcompile import CompiledModel
from tests.model_cases import MAX_CONTEXT, random_model, without_inductor

IDS = torch.arange(1, 101)[None] % 150  # longer than the windows


def with_only(name: str, layers: tuple[int, ...]):
    """The layers cut out of a fresh model by hand."""
    model = random_model(name, torch.float32)
    kept = [model.model.layers[index] for index in layers]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = nn.ModuleList(kept)
    model.config.layer_types = [model.config.layer_types[index] for index in layers]
    model.config.num_hidden_layers = len(layers)
    return model


@pytest.mark.parametrize(("name", "layers"), [("granite_swa", (1, 3))])
def test_a_view_gives_the_bits_of_a_model_with_these_layers_only(name, layers):
    with without_inductor():
        model = detcompile.compile(random_model(name, torch.float32), max_context=MAX_CONTEXT)
        before = model(IDS).logits
        part = CompiledModel(model.executor.drafting(layers))
        cut = detcompile.compile(with_only(name, layers), max_context=model.max_context)
    assert part(IDS).logits.numpy().tobytes() == cut(IDS).logits.numpy().tobytes()
    assert part.facts.kv_groups == cut.facts.kv_groups
    assert model(IDS).logits.numpy().tobytes() == before.numpy().tobytes()
    item = {parameter.data_ptr() for parameter in model.model.parameters()}
    assert {parameter.data_ptr() for parameter in part.model.parameters()} < item
    assert model.model.config.num_hidden_layers > len(layers) == part.model.config.num_hidden_layers
