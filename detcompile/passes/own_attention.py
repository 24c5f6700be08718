"""Attention classes of transformers that compute their own softmax, replaced one by one: the rest of the model stays.

Unlike passes.adapters, only the attention's forward is replaced; the step reaches it through passes.step_carrier, and
learned positions through passes.positions. The mask that the model makes for its own attention is read by nobody.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.passes.adapters import attend
from detcompile.passes.attention import IMPLEMENTATION, STEP_KWARG
from detcompile.passes.rotations import rotate_halves, rotate_pairs

__all__ = ["OWN_ATTENTION", "replace_attention"]

CODEGEN_PARTS = 4  # the fused weight holds four parts, each with its queries, values and keys


def replace_attention(model: PreTrainedModel) -> bool:
    """Give the attention classes of OWN_ATTENTION in ``model`` their forward; says whether there are any."""
    found = [module for module in model.modules() if _name(module) in OWN_ATTENTION]
    for layer, attention in enumerate(found):
        if getattr(attention, "layer_idx", None) is None:
            attention.layer_idx = layer
        attention.forward = types.MethodType(OWN_ATTENTION[_name(attention)], attention)
    if found:
        model.config._attn_implementation_internal = IMPLEMENTATION  # under this name transformers makes no mask
    return bool(found)


def _name(module: nn.Module) -> str:
    """Where transformers defines the class: a checkpoint's own code may call its class the same."""
    return f"{type(module).__module__.removeprefix('transformers.models.')}.{type(module).__name__}"


def _projected(self: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any) -> Any:
    """mvp, trocr: three projections; the same class attends to an encoder, which there is none of."""
    if key_value_states is not None or kwargs.get("attn_prompt") is not None:
        raise UnsupportedModel(
            f"{type(self).__name__}: keys of an encoder or of a prompt; only its own tokens' are known"
        )
    query, key, value = (
        project(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    return self.out_proj(attend(self, query, key, value, kwargs.get(STEP_KWARG))), None


def _gpt_neo(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Scores are not scaled; a local layer sees a window of tokens, its own among them."""
    query, key, value = (
        project(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    window = self.config.window_size if self.attention_type == "local" else None
    out = attend(self, query, key, value, kwargs.get(STEP_KWARG), scaling=1.0, sliding_window=window)
    return self.out_proj(out), None


def _codegen(self: Any, hidden_states: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
    heads = self.num_attention_heads // CODEGEN_PARTS
    fused = self.qkv_proj(hidden_states).unflatten(-1, (CODEGEN_PARTS, 3, heads, self.head_dim))
    query, value, key = (fused[..., part, :, :].flatten(-3, -2) for part in range(3))
    sin, cos = self.embed_positions[position_ids].chunk(2, -1)
    turned = self.rotary_dim
    query, key = (
        torch.cat([rotate_pairs(states[..., :turned], sin, cos), states[..., turned:]], -1) for states in (query, key)
    )
    return self.out_proj(attend(self, query, key, value, kwargs.get(STEP_KWARG))), None


def _gpt_neox_japanese(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
) -> Any:
    fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_attention_heads, 3 * self.head_size))
    query, key, value = fused.split(self.head_size, -1)
    turned = self.rotary_ndims
    turned_query, turned_key = rotate_halves(query[..., :turned], key[..., :turned], *position_embeddings)
    query = torch.cat([turned_query, query[..., turned:]], -1)
    key = torch.cat([turned_key, key[..., turned:]], -1)
    return self.dense(attend(self, query, key, value, kwargs.get(STEP_KWARG))), None, self.dense_bias


def _openai_gpt(self: Any, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    query, key, value = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).unbind(-3)
    scale = query.shape[-1] ** -0.5 if self.scale else 1.0
    return [self.c_proj(attend(self, query, key, value, kwargs.get(STEP_KWARG), scaling=scale))]


OWN_ATTENTION: dict[str, Callable[..., Any]] = {
    "codegen.modeling_codegen.CodeGenAttention": _codegen,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _gpt_neox_japanese,
    "mvp.modeling_mvp.MvpAttention": _projected,
    "openai.modeling_openai.Attention": _openai_gpt,
    "trocr.modeling_trocr.TrOCRAttention": _projected,
}
