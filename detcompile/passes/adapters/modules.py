"""Replacement methods for modules of transformers that use complex numbers, look at the batch or hold experts.

The weights stay Hugging Face's, and so does what the modules compute. Experts are written as in passes.modules.experts:
products of a token with each of its experts, added in the router's order.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from detcompile.contrib import contributed
from detcompile.passes.modules.experts import added, mixed
from detcompile.templates.ops import ours
from detcompile.transformers_internals.experts import takes_implementation

Entry = TypeVar("Entry")
Methods = dict[str, Callable[..., Any]]


def replace_modules(model: PreTrainedModel) -> None:
    """Replace methods of the modules in MODULE_METHODS."""
    give_methods(model, "MODULES", MODULE_METHODS)


def give_methods(model: PreTrainedModel, kind: str, table: Mapping[str, Methods]) -> int:
    """Replace methods of modules in the table or in contrib's table of that kind. Return how many modules."""
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
    """deepseek_v2, llama4: [B, T, D / 2, 2] float32; Hugging Face uses complex numbers."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    return torch.stack([angles.cos(), angles.sin()], -1) * self.attention_scaling


def _adapter_of_default_language(self: Any, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
    """xmod: every token has the configured language; Hugging Face selects the rows of each language."""
    residual = hidden_states
    if self.adapter_layer_norm is not None:
        hidden_states = self.adapter_layer_norm(hidden_states)
    elif self.adapter_reuse_layer_norm:
        hidden_states = self.LayerNorm(hidden_states)
    if self.ln_before_adapter:
        residual = hidden_states
    return self.adapter_modules[self.whole_config.default_language](hidden_states) + residual


MODULE_METHODS: dict[str, Methods] = {
    "deepseek_v2.modeling_deepseek_v2.DeepseekV2RotaryEmbedding": {"forward": _cosines_and_sines},
    "llama4.modeling_llama4.Llama4TextRotaryEmbedding": {"forward": _cosines_and_sines},
    "xmod.modeling_xmod.XmodOutput": {"lang_adapter": _adapter_of_default_language},
}


def replace_experts(model: PreTrainedModel) -> int:
    """Replace methods of the experts in EXPERT_METHODS. Return how many modules."""
    taking = {class_of(module) for module in model.modules() if takes_implementation(module)}  # Aria's from 5.24 on
    return give_methods(model, "EXPERTS", {name: EXPERT_METHODS[name] for name in EXPERT_METHODS.keys() - taking})


def expert_product(x: Tensor, ids: Tensor, w_ENK: Tensor) -> Tensor:
    """Multiply x with the weights of each token's experts: ids [T, k], w [E, N, K] -> [T, k, N]."""
    return ours.expert_matmul(x, ids, w_ENK, None)


def _aria(self: Any, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
    ids, weights = self.route_tokens_to_experts(router_logits)
    projection, gate = expert_product(hidden_states, ids, self.fc1.weight.transpose(1, 2)).chunk(2, -1)
    return mixed(expert_product(F.silu(projection) * gate, ids, self.fc2.weight.transpose(1, 2)), weights)


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    x = hidden_states.reshape(-1, self.hidden_size)
    stacked = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    w1, v1, w2 = (weight.view(stacked) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    inner = self.mlp.activation_fn(expert_product(x, top_k_index, w1)) * expert_product(x, top_k_index, v1)
    return mixed(expert_product(inner, top_k_index, w2.transpose(1, 2)), top_k_weights).view_as(hidden_states)


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """A token is weighted before its experts, not after."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    logits = F.linear(x, self.router.weight)
    best, ids = logits.topk(self.top_k, 1)
    weighted = x[:, None] * best.float().sigmoid().to(x.dtype)[..., None]
    gate, up = expert_product(weighted, ids, self.experts.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    inner = up * self.experts.act_fn(gate)
    outer = expert_product(inner, ids, self.experts.down_proj.transpose(1, 2))
    return self.shared_expert(x) + added(outer), logits


def _jetmoe_route(router: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = router.layer(x).float().topk(router.top_k, -1)
    return ids, best.softmax(-1).to(x.dtype)


def _jetmoe(self: Any, layer_input: Tensor) -> Tensor:
    x = layer_input.flatten(0, 1)
    ids, weights = _jetmoe_route(self.router, x)
    gate, up = expert_product(x, ids, self.input_linear.weight).chunk(2, -1)
    outer = expert_product(self.activation(gate) * up, ids, self.output_linear.weight)
    return mixed(outer, weights).view_as(layer_input) + self.bias


def _jetmoe_queries(self: Any, layer_input: Tensor) -> tuple[Tensor, None, Any]:
    """Return a token's queries by each of its experts [B, T, k, H], and the arguments of `_jetmoe_outputs`."""
    x = layer_input.flatten(0, 1)
    ids, weights = _jetmoe_route(self.router, x)
    return expert_product(x, ids, self.input_linear.weight).unflatten(0, layer_input.shape[:2]), None, (ids, weights)


def _jetmoe_outputs(self: Any, layer_input: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
    outer = expert_product(layer_input.flatten(0, 1), chosen[0], self.output_linear.weight)
    return mixed(outer, chosen[1]).unflatten(0, layer_input.shape[:2]) + self.bias


EXPERT_METHODS: dict[str, Methods] = {
    "aria.modeling_aria.AriaExperts": {"forward": _aria},
    "dbrx.modeling_dbrx.DbrxExperts": {"forward": _dbrx},
    "jetmoe.modeling_jetmoe.JetMoeMoA": {"map": _jetmoe_queries, "reduce": _jetmoe_outputs},
    "jetmoe.modeling_jetmoe.JetMoeMoE": {"forward": _jetmoe},
    "llama4.modeling_llama4.Llama4TextMoe": {"forward": _llama4},
}
