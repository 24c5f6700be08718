"""Layers count as equal only if neither a run nor their modules tell them apart."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from detcompile import Numerics
from detcompile.passes import preparation
from detcompile.passes.capture import probe_attention
from detcompile.passes.tracing import find_repeats
from tests.model_cases import random_model

SIX = {"num_hidden_layers": 6}
FIRST = {
    "llama": (0, 0, 0, 0, 0, 0),
    "gemma2": (0, 1, 0, 1, 0, 1),
    "smollm3": (0, 0, 0, 3, 0, 0),
    "deepseek_v3": (0, 0, 0, 3, 3, 3),
    "granite_swa": (0, 1, 1, 1, 0, 1),
    "qwen2_moe": (0, 0, 0, 0, 0, 0),
}


def first_repeat(model: PreTrainedModel) -> tuple[int, ...] | None:
    assert preparation.change_modules(model, shared=False) is None
    probe_attention(model, Numerics().kv_chunk)
    repeats = find_repeats(model)
    return None if repeats is None else repeats.first


@pytest.mark.parametrize("name", FIRST)
def test_layers_are_distinguished_by_structure(name: str):
    assert first_repeat(random_model(name, torch.float32, **SIX)) == FIRST[name]


def test_a_model_whose_last_layer_is_like_no_other_is_taken_whole():
    assert first_repeat(random_model("gemma3_text", torch.float32, **SIX)) is None


def _scaled(model: Any, layer: int) -> None:
    """A constant in the code of one layer's products."""
    original = model.model.layers[layer].mlp.forward
    model.model.layers[layer].mlp.forward = lambda x: original(x) * 2.0


def _by_index(model: Any, layer: int) -> None:
    """Code that all layers share looks at the layer's index."""

    class ByIndex(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if self.place == layer else 1.0)

    for index, one in enumerate(model.model.layers):
        one.mlp.__class__ = ByIndex
        one.mlp.place = index


def _attribute(model: Any, layer: int) -> None:
    """A number that the run on two tokens does not show."""
    for index, one in enumerate(model.model.layers):
        one.threshold = 7 if index == layer else 9


def _hook(model: Any, layer: int) -> None:
    model.model.layers[layer].register_forward_hook(lambda module, args, output: output)


def _epsilon(model: Any, layer: int) -> None:
    model.model.layers[layer].input_layernorm.variance_epsilon = 1e-3


def _layout(model: Any, layer: int) -> None:
    weight = model.model.layers[layer].mlp.up_proj.weight
    model.model.layers[layer].mlp.up_proj.weight = nn.Parameter(weight.detach().t().contiguous().t())


def _dtype(model: Any, layer: int) -> None:
    model.model.layers[layer].input_layernorm.to(torch.bfloat16)


def _constant(model: Any, layer: int) -> None:
    """A tensor that is neither a parameter nor a buffer."""
    for index, one in enumerate(model.model.layers):
        one.table = torch.full((3,), float(index == layer))


def _configs(model: Any, layer: int | None) -> None:
    """Every layer has a config of its own, as ranks that share heads give it, with another number in one."""
    for index, one in enumerate(model.model.layers):
        one.self_attn.config = copy.copy(one.self_attn.config)
        one.self_attn.config.rms_norm_eps = 1e-5 if index == layer else 1e-6


PLANTED = [_scaled, _by_index, _attribute, _hook, _epsilon, _layout, _dtype, _constant]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_layer_that_differs_in_anything_has_a_structure_of_its_own(plant: Any):
    model = random_model("llama", torch.float32, **SIX)
    plant(model, 2)
    assert first_repeat(model) == (0, 0, 2, 0, 0, 0)


@pytest.mark.parametrize(("layer", "first"), [(None, (0, 0, 0, 0, 0, 0)), (2, (0, 0, 2, 0, 0, 0))])
def test_configs_are_compared_by_value(layer: int | None, first: tuple[int, ...]):
    model = random_model("llama", torch.float32, **SIX)
    assert first_repeat(model) == (0, 0, 0, 0, 0, 0)
    _configs(model, layer)
    repeats = find_repeats(model)
    assert repeats is not None and repeats.first == first


def test_the_bare_model_has_one_structure():
    """Else the tests of planted differences could not fail."""
    model = random_model("llama", torch.float32, **SIX)
    _constant(model, 9)
    _attribute(model, 9)
    assert first_repeat(model) == (0, 0, 0, 0, 0, 0)


class _Loop(nn.Module):
    """Around one of a model's layers: keeps what the layer before last gave."""

    def __init__(self, layer: nn.Module, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.kept = kept

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        self.kept.append(hidden_states)
        return self.layer(hidden_states, **kwargs) + self.kept[0]


def test_layers_that_read_more_of_each_other_than_their_rows_are_not_repeated():
    model: Any = random_model("llama", torch.float32, **SIX)
    kept: list[torch.Tensor] = []
    model.model.layers = nn.ModuleList(_Loop(layer, kept) for layer in model.model.layers)
    model.register_forward_pre_hook(lambda module, args: kept.clear())
    repeats = first_repeat(model)
    assert repeats is None or repeats[:2] == (0, 1)


def test_a_model_that_looks_at_its_number_of_layers_is_taken_whole():
    model: Any = random_model("llama", torch.float32, **SIX)

    class ByCount(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / self.config.num_hidden_layers

    model.model.norm.__class__ = ByCount
    model.model.norm.config = model.config
    assert first_repeat(model) is None
