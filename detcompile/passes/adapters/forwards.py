"""Forwards for models that ignore AttentionInterface, rewritten around calls of our attention.

bloom ignores an attention function, falcon and gptj know only their own, and none of them hands the model's keywords
down to its layers. An adapter replaces two methods: the causal LM's forward and the attention's. Embeddings, blocks,
norms and MLPs stay Hugging Face's, and so do the weights. The step reaches the attention through the blocks' argument
``attention_mask``, which nothing else reads.

Rotations are written here and not imported, so that importing this package imports no model's code.

Legend: B batch, T tokens, H heads, D head dim.
"""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import UnsupportedModel
from detcompile.passes.adapters.modules import entry_of
from detcompile.passes.modules.attention import IMPLEMENTATION, STEP_KWARG
from detcompile.step import StepInputs
from detcompile.transformers_internals.attention import takes_attention


def rotate_halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate element i with element i + D/2: query and key [B, T, H, D], cos and sin [B, T, D]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return query * cos + _half_turned(query) * sin, key * cos + _half_turned(key) * sin


def rotate_pairs(states: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotate element 2i with element 2i + 1: states [B, T, H, D], cos and sin [B, T, D/2]."""
    sin, cos = (torch.repeat_interleave(table[:, :, None, :], 2, 3) for table in (sin, cos))
    turned = torch.stack((-states[:, :, :, 1::2], states[:, :, :, ::2]), dim=-1).flatten(-2)
    return states * cos + turned * sin


def _half_turned(states: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    return torch.cat((-states[..., half:], states[..., :half]), dim=-1)


ATTENTION = AttentionInterface()  # of all registered functions


class Adapter(NamedTuple):
    """Changes that make one class of causal LM call our attention.

    Attributes:
        attention_name: attribute of a block with its attention; empty if the blocks are attentions.
        forward: of the causal LM: (model, input_ids, position_ids, step, keep) -> logits of the rows that keep indexes.
        attention: forward of the attention, with the keywords that its block passes.
        obstacle: returns the unsupported part of a configuration, or "".
        prepare: adds what an attention needs besides its weights.
        blocks: attribute of the model's body with its blocks.
        is_needed: False for a model whose class calls an attention function by itself, as later transformers do.
    """

    attention_name: str
    forward: Callable[[Any, Tensor, Tensor, StepInputs | None, Any], Tensor]
    attention: Callable[..., tuple[Tensor, None]]
    obstacle: Callable[[Any], str] = lambda config: ""
    prepare: Callable[[Any, Any], None] = lambda model, attention: None
    blocks: str = "h"
    is_needed: Callable[[Any], bool] = lambda model: True


def adapt(model: PreTrainedModel) -> bool:
    """Give the model its adapter, if its class of transformers has one. Return whether it has.

    Raises:
        UnsupportedModel: the adapter does not support this configuration.
    """
    adapter = entry_of(model, "ADAPTERS", ADAPTERS)
    if adapter is None or not adapter.is_needed(model):
        return False
    obstacle = adapter.obstacle(model.config)
    if obstacle:
        raise UnsupportedModel(f"{type(model).__name__} with {obstacle} has no adapter; load a model without it")

    def forward(
        self: Any, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Any = 0, **kwargs: Any
    ) -> CausalLMOutput:
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=adapter.forward(self, input_ids, position_ids, kwargs.get(STEP_KWARG), keep))

    _replace_forward(model, forward)
    for block in getattr(model.transformer, adapter.blocks):
        attention = getattr(block, adapter.attention_name) if adapter.attention_name else block
        adapter.prepare(model, attention)
        _replace_forward(attention, adapter.attention)
    return True


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = types.MethodType(forward, module)


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, step: StepInputs | None, **kwargs: Any) -> Tensor:
    """query [B, T, Hq, D], key and value [B, T, Hkv, D] -> [B, T, Hq * D], by the registered attention function."""
    heads = (states.transpose(1, 2) for states in (query, key, value))
    out, _ = ATTENTION[IMPLEMENTATION](module, *heads, None, **{STEP_KWARG: step}, **kwargs)
    return out.flatten(2)


def _bloom(model: Any, input_ids: Tensor, position_ids: Tensor, step: StepInputs | None, keep: Any) -> Tensor:
    """Positions only enter through ALiBi, which counts from the start of the token's sequence."""
    body = model.transformer
    hidden = body.word_embeddings_layernorm(body.word_embeddings(input_ids))
    for block in body.h:
        hidden = block(hidden, alibi=None, attention_mask=step)[0]
    return model.lm_head(body.ln_f(hidden)[:, keep])


def _bloom_attention(
    self: Any, hidden_states: Tensor, residual: Tensor, attention_mask: StepInputs | None, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
    given = {"scaling": self.inv_norm_factor, "alibi_slopes": self.alibi_slopes}
    out = attend(self, query, key, value, attention_mask, **given)
    return self.dense(out) + residual, None


def _bloom_slopes(model: Any, attention: Any) -> None:
    """Store the slopes: the bias of a key at position 1, by the model's formula."""
    two_positions = model.transformer.word_embeddings.weight.new_ones(1, 2).float()
    alibi = model.transformer.build_alibi_tensor(two_positions, attention.num_heads, two_positions.dtype)
    attention.register_buffer("alibi_slopes", alibi[:, 0, 1].contiguous(), persistent=False)


def _falcon(model: Any, input_ids: Tensor, position_ids: Tensor, step: StepInputs | None, keep: Any) -> Tensor:
    body = model.transformer
    hidden = body.word_embeddings(input_ids)
    rotary = body.rotary_emb(hidden, position_ids=position_ids)
    for block in body.h:
        hidden = block(hidden, alibi=None, attention_mask=step, position_embeddings=rotary)[0]
    return model.lm_head(body.ln_f(hidden)[:, keep])


def _falcon_attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: StepInputs | None,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """Share keys and values among query heads without the copies that Hugging Face makes."""
    groups = self.num_kv_heads  # fused rows: for each key head its query heads, its key and its value
    members = self.num_heads // groups
    fused = self.query_key_value(hidden_states).unflatten(-1, (groups, members + 2, self.head_dim))
    query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    query, key = rotate_halves(query, key, *position_embeddings)
    out = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor)
    return self.dense(out), None


def _gptj_is_needed(model: Any) -> bool:
    return not takes_attention(model)  # it does in transformers 5.24, where the model holds the one table


def _gptj(model: Any, input_ids: Tensor, position_ids: Tensor, step: StepInputs | None, keep: Any) -> Tensor:
    body = model.transformer
    hidden = body.wte(input_ids)
    for block in body.h:
        hidden = block(hidden, attention_mask=step, position_ids=position_ids)[0]
    return model.lm_head(body.ln_f(hidden)[:, keep])


def _gptj_attention(
    self: Any, hidden_states: Tensor, attention_mask: StepInputs | None, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = (
        project(hidden_states).unflatten(-1, (self.num_attention_heads, self.head_dim))
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    sin, cos = self.embed_positions[position_ids].to(key.dtype).chunk(2, -1)
    turned = self.rotary_dim
    query, key = (
        torch.cat([rotate_pairs(states[..., :turned], sin, cos), states[..., turned:]], -1) for states in (query, key)
    )
    return self.out_proj(attend(self, query, key, value, attention_mask)), None


def _mpt(model: Any, input_ids: Tensor, position_ids: Tensor, step: StepInputs | None, keep: Any) -> Tensor:
    """Positions only enter through ALiBi, as in bloom."""
    body = model.transformer
    hidden = body.wte(input_ids)
    for block in body.blocks:
        hidden = block(hidden, position_bias=None, attention_mask=step)[0]
    return model.lm_head(body.norm_f(hidden)[:, keep])


def _mpt_attention(
    self: Any, hidden_states: Tensor, attention_mask: StepInputs | None, **_: Any
) -> tuple[Tensor, None]:
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = fused.unflatten(-1, (3, self.n_heads, self.head_dim)).unbind(-3)
    given = {"scaling": self.softmax_scale, "alibi_slopes": self.alibi_slopes}
    return self.out_proj(attend(self, query, key, value, attention_mask, **given)), None


def _mpt_slopes(model: Any, attention: Any) -> None:
    """Store the slopes: the difference of two neighboring keys' biases, by the model's formula."""
    bias = model.transformer.build_mpt_alibi_tensor(attention.n_heads, 2, device=model.device)
    attention.register_buffer("alibi_slopes", (bias[:, 0, 1] - bias[:, 0, 0]).contiguous(), persistent=False)


def _bloom_obstacle(config: Any) -> str:
    sliced = config.slow_but_exact and config.pretraining_tp > 1
    return "slow_but_exact and pretraining_tp > 1 (linears summed in slices)" if sliced else ""


def _falcon_obstacle(config: Any) -> str:
    # transformers 5.17 and 5.24 round the bias to bfloat16 whatever the model's dtype, and the eager path adds it twice
    return "alibi=True (whose bias Hugging Face's own implementations disagree about)" if config.alibi else ""


ADAPTERS = {
    "bloom.modeling_bloom.BloomForCausalLM": Adapter(
        "self_attention", _bloom, _bloom_attention, _bloom_obstacle, _bloom_slopes
    ),
    "falcon.modeling_falcon.FalconForCausalLM": Adapter("self_attention", _falcon, _falcon_attention, _falcon_obstacle),
    "gptj.modeling_gptj.GPTJForCausalLM": Adapter("attn", _gptj, _gptj_attention, is_needed=_gptj_is_needed),
    "mpt.modeling_mpt.MptForCausalLM": Adapter("attn", _mpt, _mpt_attention, prepare=_mpt_slopes, blocks="blocks"),
}
