"""A model's layers, some of them: a module of its own that shares every weight with the model it was taken from."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from detcompile.errors import InvalidInput, UnsupportedModel

__all__ = ["layer_list", "layers_of", "view_of"]


def view_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model once more, of modules of its own, which share every weight with it."""
    shared = itertools.chain(model.parameters(), model.buffers())
    view: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    return view


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """The one list of a model's layers, if it keeps them in one."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    return lists[0] if len(lists) == 1 else None


def layers_of(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The model as if it had only these layers, between its embedding and its final norm and head.

    Args:
        layers: indices, each at most once, in the order of the model.

    Raises:
        InvalidInput: not such indices. UnsupportedModel: the model keeps its layers in no single list.
    """
    count = model.config.get_text_config().num_hidden_layers
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < count:
        raise InvalidInput(f"layers {tuple(layers)}: give some of 0 to {count - 1}, each once, in their order")
    view = view_of(model)
    all_layers = layer_list(view)
    if all_layers is None:
        raise UnsupportedModel(f"{type(model).__name__} keeps its {count} layers in no single list")
    for index in reversed(range(count)):
        if index not in layers:
            del all_layers[index]
    for index, layer in enumerate(all_layers):
        attention: Any
        for attention in layer.modules():
            if isinstance(getattr(attention, "layer_idx", None), int):
                attention.layer_idx = index
    config = view.config.get_text_config()
    config.num_hidden_layers = len(all_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in layers]
    return view
