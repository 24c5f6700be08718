"""Replacements for attention classes of transformers that compute their softmax inline.

Unlike in passes.adapters.forwards, only the attention's forward is replaced. The step, and positions that scale
queries, reach it through passes.modules.attention, and learned positions through passes.modules.positions. The mask
that the model makes for its attention is ignored.
"""

import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.passes.adapters.forwards import attend, rotate_halves, rotate_pairs
from detcompile.passes.adapters.modules import class_of, entries_of
from detcompile.passes.modules.attention import IMPLEMENTATION, STEP_KWARG, carry_positions
from detcompile.transformers_internals.attention import set_attention_implementation, takes_attention

CODEGEN = "codegen.modeling_codegen.CodeGenAttention"
CODEGEN_PARTS = 4  # the fused weight holds four parts, each with its queries, values and keys


def replace_attention(model: PreTrainedModel) -> bool:
    """Replace the forward of attention classes in ATTENTION_FORWARDS. Return whether ``model`` has any."""
    table = ATTENTION_FORWARDS.copy()
    if takes_attention(model):  # CodeGen's classes call the interface from transformers 5.24 on
        del table[CODEGEN]
    replaced = entries_of(model, "ATTENTION", table)
    for layer, (attention, forward) in enumerate(replaced):
        if getattr(attention, "layer_idx", None) is None:
            attention.layer_idx = layer
        attention.is_causal = True  # bigbird_pegasus sets False and makes a causal mask instead
        attention.forward = types.MethodType(forward, attention)
    scaled = [attention for attention, _ in replaced if class_of(attention) in SCALED_BY_POSITION]
    if scaled:
        carry_positions(model, scaled)
    if replaced:
        set_attention_implementation(model.config, IMPLEMENTATION)  # with this name, transformers makes no mask
    return bool(replaced)


def projected_attention(self: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any) -> Any:
    """Project three times and attend: bigbird_pegasus, mvp, trocr, xglm. Attention to an encoder is refused."""
    if key_value_states is not None or kwargs.get("attn_prompt") is not None:
        raise UnsupportedModel(f"{type(self).__name__}: attention to an encoder or a prompt is not supported")
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
    parts = math.gcd(CODEGEN_PARTS, self.num_attention_heads)  # four in a whole model, fewer for a rank's heads
    heads = self.num_attention_heads // parts
    fused = self.qkv_proj(hidden_states).unflatten(-1, (parts, 3, heads, self.head_dim))
    query, value, key = (fused[..., part, :, :].flatten(-3, -2) for part in range(3))
    sin, cos = self.embed_positions[position_ids].chunk(2, -1)  # float32 beside a checkpoint's weights of any dtype
    turned = self.rotary_dim
    query, key = (
        torch.cat([rotate_pairs(states[..., :turned], sin, cos), states[..., turned:]], -1).to(states.dtype)
        for states in (query, key)
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


def _bert(self: Any, hidden_states: Tensor, *_: Any, encoder_hidden_states: Tensor | None = None, **kwargs: Any) -> Any:
    """Attention of big_bird with attention_type="original_full", git, megatron_bert and rembert."""
    if encoder_hidden_states is not None:
        raise UnsupportedModel(f"{type(self).__name__}: attention to an encoder is not supported")
    query, key, value = (
        project(hidden_states).unflatten(-1, (self.num_attention_heads, self.attention_head_size))
        for project in (self.query, self.key, self.value)
    )
    return attend(self, query, key, value, kwargs.get(STEP_KWARG)), None


class CycleLayer(NamedTuple):
    """Attributes that attention reads from a module: a layer that runs in several cycles has separate keys in each."""

    layer_idx: int


def _hrm_text(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cycle_offset: int = 0, **kwargs: Any
) -> Any:
    query, key, value, gate = (
        project(hidden_states).unflatten(-1, (project.out_features // self.head_dim, self.head_dim))
        for project in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj)
    )
    query, key = rotate_halves(query, key, *position_embeddings)
    layer = CycleLayer(self.layer_idx + cycle_offset)
    out = attend(layer, query, key, value, kwargs.get(STEP_KWARG), scaling=self.scaling)
    return self.o_proj(torch.sigmoid(gate).flatten(2) * out), None


def _deepseek_v2(self: Any, hidden_states: Tensor, position_embeddings: Tensor, **kwargs: Any) -> Any:
    """Compute keys and values from a latent. position_embeddings holds cosines and sines, not complex numbers."""
    if self.q_proj is not None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    query = query.unflatten(-1, (self.num_heads, self.qk_head_dim))
    latent, turned_key = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
    key, value = both.split([self.qk_nope_head_dim, self.v_head_dim], -1)
    query, turned_query = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    turned_key = _turned(turned_key.unsqueeze(2), position_embeddings).expand(-1, -1, self.num_heads, -1)
    query = torch.cat([query, _turned(turned_query, position_embeddings)], -1)
    key = torch.cat([key, turned_key], -1)
    return self.o_proj(attend(self, query, key, value, kwargs.get(STEP_KWARG), scaling=self.scaling)), None


def _inkling(
    self: Any, hidden_states: Tensor, position_ids: Tensor, conv_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """Mix profiles of distance biases for each token; full layers may scale queries and biases by position."""
    query, relative = (
        project(hidden_states).unflatten(-1, (self.num_heads, -1)) for project in (self.q_proj, self.r_proj)
    )
    key, value = (
        convolve(project(hidden_states), conv_mask=conv_mask).unflatten(-1, (self.num_key_value_heads, self.head_dim))
        for project, convolve in ((self.k_proj, self.k_sconv), (self.v_proj, self.v_sconv))
    )
    query, key, relative = self.q_norm(query), self.k_norm(key), relative @ self.rel_logits_proj.proj
    if not self.is_sliding and self.config.log_scaling_n_floor is not None:
        lengths = ((position_ids + 1).float() / self.config.log_scaling_n_floor).clamp(min=1.0)
        scales = (1.0 + self.config.log_scaling_alpha * torch.log(lengths))[..., None, None]
        query, relative = ((states.float() * scales).to(states.dtype) for states in (query, relative))
    known = {"scaling": self.scaling, "sliding_window": self.sliding_window}
    step = kwargs.get(STEP_KWARG)
    return self.o_proj(attend(self, query, key, value, step, **known, relative_bias=relative.transpose(1, 2))), None


def _llama4(self: Any, hidden_states: Tensor, position_embeddings: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
    """Attend within chunks in chunked layers. Layers without rotation may scale queries by position."""
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if self.use_rope:
        query, key = (_turned(states, position_embeddings) for states in (query, key))
    if hasattr(self, "qk_norm"):
        query, key = self.qk_norm(query), self.qk_norm(key)
    if self.attn_temperature_tuning and not self.use_rope:
        steps = torch.floor((position_ids.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        query = (query * scales[..., None, None]).to(query.dtype)
    chunked = self.config.layer_types[self.layer_idx] == "chunked_attention"
    chunk = self.config.attention_chunk_size if chunked else None
    step = kwargs.get(STEP_KWARG)
    return self.o_proj(attend(self, query, key, value, step, scaling=self.scaling, attention_chunk=chunk)), None


def _turned(states: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs of features [B, T, H, D], as complex numbers, by [B, T, D / 2, 2] in float32."""
    cos, sin = table.unsqueeze(2).unbind(-1)
    real, imaginary = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    product = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return product.flatten(-2).to(states.dtype)


# These scale queries by their positions, which the model does not pass to its attention.
SCALED_BY_POSITION = ("inkling.modeling_inkling.InklingAttention", "llama4.modeling_llama4.Llama4TextAttention")
ATTENTION_FORWARDS: dict[str, Callable[..., Any]] = {
    "big_bird.modeling_big_bird.BigBirdSelfAttention": _bert,
    "bigbird_pegasus.modeling_bigbird_pegasus.BigBirdPegasusDecoderAttention": projected_attention,
    CODEGEN: _codegen,
    "deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention": _deepseek_v2,
    "git.modeling_git.GitSelfAttention": _bert,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _gpt_neox_japanese,
    "hrm_text.modeling_hrm_text.HrmTextAttention": _hrm_text,
    "inkling.modeling_inkling.InklingAttention": _inkling,
    "llama4.modeling_llama4.Llama4TextAttention": _llama4,
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": _bert,
    "mvp.modeling_mvp.MvpAttention": projected_attention,
    "openai.modeling_openai.Attention": _openai_gpt,
    "rembert.modeling_rembert.RemBertSelfAttention": _bert,
    "trocr.modeling_trocr.TrOCRAttention": projected_attention,
}
