"""Modules of transformers whose forward has complex numbers or looks at the batch, given one that does not.

The weights stay theirs, and what they compute: positions by tables and rotations, adapters of one language.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from detcompile.contrib import contributed

__all__ = ["Methods", "OWN_MODULES", "class_of", "entries_of", "entry_of", "give_methods", "replace_modules"]

Entry = TypeVar("Entry")
Methods = dict[str, Callable[..., Any]]


def replace_modules(model: PreTrainedModel) -> None:
    """Give the modules of OWN_MODULES in ``model`` their methods."""
    give_methods(model, "MODULES", OWN_MODULES)


def give_methods(model: PreTrainedModel, kind: str, table: Mapping[str, Methods]) -> int:
    """Give modules of ``model`` the methods that the table, or contrib's of that kind, has; return their number."""
    replaced = entries_of(model, kind, table)
    for module, methods in replaced:
        module.whole_config = model.config
        for method, function in methods.items():
            setattr(module, method, types.MethodType(function, module))
    return len(replaced)


def entries_of(model: PreTrainedModel, kind: str, table: Mapping[str, Entry]) -> list[tuple[Any, Entry]]:
    """Return the modules of ``model`` whose class has an entry in the table or in contrib's of that kind."""
    entries = ((module, entry_of(module, kind, table)) for module in model.modules())
    return [(module, entry) for module, entry in entries if entry is not None]


def entry_of(module: Any, kind: str, table: Mapping[str, Entry]) -> Entry | None:
    """Return the entry of a module's class in the table or in contrib's of that kind; None if neither has one."""
    name = class_of(module)
    return table[name] if name in table else contributed(kind, name)


def class_of(module: Any) -> str:
    """Return "folder.modeling_folder.Class" of a class of transformers.

    Empty for other classes: a checkpoint's code may use the same class name for something else.
    """
    prefix, _, place = type(module).__module__.partition("transformers.models.")
    return f"{place}.{type(module).__name__}" if place and not prefix else ""


def _cosines_and_sines(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """deepseek_v2, llama4: [B, T, D / 2, 2] float32, where Hugging Face has complex numbers."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    return torch.stack([angles.cos(), angles.sin()], -1) * self.attention_scaling


def _adapter_of_default_language(self: Any, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
    """xmod: every token's language is the configuration's, where Hugging Face picks the rows of each language."""
    residual = hidden_states
    if self.adapter_layer_norm is not None:
        hidden_states = self.adapter_layer_norm(hidden_states)
    elif self.adapter_reuse_layer_norm:
        hidden_states = self.LayerNorm(hidden_states)
    if self.ln_before_adapter:
        residual = hidden_states
    return self.adapter_modules[self.whole_config.default_language](hidden_states) + residual


OWN_MODULES: dict[str, Methods] = {
    "deepseek_v2.modeling_deepseek_v2.DeepseekV2RotaryEmbedding": {"forward": _cosines_and_sines},
    "llama4.modeling_llama4.Llama4TextRotaryEmbedding": {"forward": _cosines_and_sines},
    "xmod.modeling_xmod.XmodOutput": {"lang_adapter": _adapter_of_default_language},
}
