"""Decompose calls that torch would compute with unpinned kernels: attention, encoder layers, circular padding.

Runs on Dynamo's graph, before torch chooses a kernel.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from detcompile.templates.ops import ours
from detcompile.torch_internals.native import encoder_layer_forward
from detcompile.torch_internals.native import pad as plain_pad

# The mask_type of encoder_layer_forward for a mask [B, L]; others are [L, L] or [B, H, L, L].
OF_KEYS = 1


def take_apart(gm: fx.GraphModule, kv_chunk: int) -> fx.GraphModule:
    """scaled_dot_product_attention(q, k, v, is_causal=True)  ->  dense_attention(q, k, v, scale, 0, kv_chunk)
    scaled_dot_product_attention(q, k, v, mask)  ->  batched_matmul(softmax(batched_matmul(q, k) + mask), v)
    multi_head_attention_forward, _transformer_encoder_layer_fwd, pad(mode="circular")  ->  their parts
    """
    attend = _attention(kv_chunk)
    parts: dict[Any, Callable[..., Any]] = {
        F.scaled_dot_product_attention: attend,
        F.multi_head_attention_forward: _calling(F.multi_head_attention_forward, scaled_dot_product_attention=attend),
        encoder_layer_forward: _encoder_layer(attend),
        plain_pad: _pad,
    }
    for whole, apart in parts.items():
        for node in gm.graph.find_nodes(op="call_function", target=whole):
            node.target = apart
    gm.recompile()
    return gm


def _calling(function: Any, **replaced: Any) -> Callable[..., Any]:
    """Return a copy of ``function`` in whose globals these names are replaced."""
    names = function.__globals__ | replaced
    copy = types.FunctionType(function.__code__, names, argdefs=function.__defaults__)
    names[function.__name__] = copy  # which it hands to modes that see every function of torch
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = __name__  # a graph's code would call the original by the name of torch's module
    return copy


def _attention(kv_chunk: int) -> Callable[..., Tensor]:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Replace scaled_dot_product_attention. With dropout, leave the call for the certificate to refuse."""
        if dropout_p or query.dim() < 3:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        factor = float(query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal and attn_mask is None:
            if query.dim() == key.dim() == value.dim() == 4:
                return ours.dense_attention(query, key, value, factor, 0, kv_chunk)
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if enable_gqa:
            key, value = (_for_each_head(x, query.shape[-3]) for x in (key, value))
        return _attend(query, key, value, attn_mask, factor)

    return attend


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend with float32 scores and weights, rounded once. A query that sees no key gets zeros, as in torch."""
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    scores = ours.batched_matmul(q, k, torch.float32) * scale
    if mask is None:
        weights = scores.softmax(-1)
    else:
        hidden = scores.new_full((), -torch.inf)
        scores = torch.where(mask, scores, hidden) if mask.dtype is torch.bool else scores + mask.float()
        blind = scores.amax(-1, keepdim=True) == -torch.inf
        weights = torch.where(blind, scores.new_zeros(()), scores.softmax(-1))
    return ours.batched_matmul(weights.to(v.dtype), v.transpose(-1, -2))


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """[..., G, S, D] -> [..., heads, S, D]: heads / G consecutive heads share one."""
    groups = x.shape[-3]
    return x.unsqueeze(-3).expand(*x.shape[:-2], heads // groups, *x.shape[-2:]).flatten(-4, -3)


def _encoder_layer(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def encoder_layer(
        src: Tensor, embed_dim: int, num_heads: int,
        qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
        use_gelu: bool, norm_first: bool, eps: float,
        norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
        ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
        mask: Tensor | None = None, mask_type: int | None = None,
    ) -> Tensor:  # fmt: skip
        """torch.nn.TransformerEncoderLayer in eval mode, src [B, L, E]; its masks hide where they are True."""
        seen = None if mask is None else _seen(mask, mask_type)

        def attended(x: Tensor) -> Tensor:
            parts = F.linear(x, qkv_weight, qkv_bias).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)
            return F.linear(attend(q, k, v, seen).transpose(1, 2).flatten(2), proj_weight, proj_bias)

        def fed(x: Tensor) -> Tensor:
            inner = F.linear(x, ffn_weight_1, ffn_bias_1)
            return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

        def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(x, (embed_dim,), weight, bias, eps)

        if norm_first:
            x = src + attended(normed(src, norm_weight_1, norm_bias_1))
            return x + fed(normed(x, norm_weight_2, norm_bias_2))
        x = normed(src + attended(src), norm_weight_1, norm_bias_1)
        return normed(x + fed(x), norm_weight_2, norm_bias_2)

    return encoder_layer


def _seen(mask: Tensor, mask_type: int | None) -> Tensor:
    """Return an encoder layer's mask for attention: True for visible keys, or a bias of the scores."""
    given = ~mask if mask.dtype is torch.bool else mask
    return given[:, None, None, :] if mask_type == OF_KEYS else given


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Write circular padding as a concatenation. Leave other modes to torch."""
    if mode != "circular" or min(pad) < 0:
        return plain_pad(input, pad, mode, value)
    for i in range(len(pad) // 2):
        dim, before, after = input.dim() - 1 - i, pad[2 * i], pad[2 * i + 1]
        length = input.shape[dim]
        ends = input.narrow(dim, length - before, before), input.narrow(dim, 0, after)
        input = torch.cat([ends[0], input, ends[1]], dim)
    return input
