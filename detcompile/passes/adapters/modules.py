"""Modules of transformers whose forward has complex numbers or looks at the batch, given one that does not.

The weights stay theirs, and what they compute: positions by tables and rotations, adapters of one language.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

__all__ = ["Methods", "OWN_MODULES", "class_of", "give_methods", "replace_modules"]


Methods = dict[str, Callable[..., Any]]


def replace_modules(model: PreTrainedModel) -> None:
    """Give the modules of OWN_MODULES in ``model`` their methods."""
    give_methods(model, OWN_MODULES)


def give_methods(model: PreTrainedModel, table: Mapping[str, Methods]) -> int:
    """Give each module of ``model`` the methods that the table has for its class; says how many there are."""
    found = [module for module in model.modules() if class_of(module) in table]
    for module in found:
        module.whole_config = model.config
        for method, function in table[class_of(module)].items():
            setattr(module, method, types.MethodType(function, module))
    return len(found)


def class_of(module: Any) -> str:
    """Where transformers defines the class: a checkpoint's own code may call its class the same."""
    return f"{type(module).__module__.removeprefix('transformers.models.')}.{type(module).__name__}"


def _cosines_and_sines(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """deepseek_v2, llama4: [B, T, D / 2, 2] float32, where Hugging Face has complex numbers."""
    angles = position_ids[..., None].float() * self.inv_freq.float()
    return torch.stack([angles.cos(), angles.sin()], -1) * self.attention_scaling


def _sinusoids(self: Any, position_ids: Tensor, past_key_values_length: int = 0) -> Tensor:
    """xglm: rows of the table it has; Hugging Face makes a larger one when a batch has more columns."""
    return torch.nn.functional.embedding(position_ids + self.offset, self.weights)


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


def _xlstm(self: Any, input_ids: Tensor, logits_to_keep: Any = 0, **_: Any) -> CausalLMOutput:
    """Hugging Face takes long prompts in pieces, which its states make one; ours do it by themselves."""
    keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    hidden = self.backbone.embeddings(input_ids)
    for block in self.backbone.blocks:
        hidden, _ = block(hidden)
    kept = self.backbone.out_norm(hidden)[:, keep]
    logits = self.lm_head(kept.to(self.lm_head.weight.dtype)).float()
    cap = self.config.output_logit_soft_cap
    return CausalLMOutput(logits=logits if cap is None else cap * torch.tanh(logits / cap))


OWN_MODULES: dict[str, Methods] = {
    "deepseek_v2.modeling_deepseek_v2.DeepseekV2RotaryEmbedding": {"forward": _cosines_and_sines},
    "llama4.modeling_llama4.Llama4TextRotaryEmbedding": {"forward": _cosines_and_sines},
    "xglm.modeling_xglm.XGLMSinusoidalPositionalEmbedding": {"forward": _sinusoids},
    "xlstm.modeling_xlstm.xLSTMForCausalLM": {"forward": _xlstm},
    "xmod.modeling_xmod.XmodOutput": {"lang_adapter": _adapter_of_default_language},
}
