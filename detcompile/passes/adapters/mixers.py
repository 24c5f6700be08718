"""Layers of transformers that compute their recurrence in place, written anew around calls of ours.

Each takes the layer after the recurrences of its model, and then what the layer's own forward takes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.recurrences import Recurrences

__all__ = ["OWN_MIXERS", "selective"]

MOST_EXPONENT = 30.0  # e^30 leaves room for sums over any context in float32


def selective(
    recurrences: Recurrences, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> Tensor:
    """Mamba's scan, each channel with decays of its own.

    x and dt [B, T, H, P], B and C [B, T, H, K], A [H, P, K], D [H, P] -> [B, T, H, P] in x.dtype, D's product beside.
    """
    out = recurrences.recur(C, B, dt.float() * x.float(), dt, rates=A.transpose(1, 2)).to(x.dtype)
    return out if D is None else out + x * D


def _zamba(recurrences: Recurrences, self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Channels are x and gate in turn; each head has projections of its own."""
    heads, ranks = self.n_mamba_heads, [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    x, gate = self.in_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
    x = self.act(recurrences.convolve(x, self.conv1d.weight.squeeze(1), self.conv1d.bias))
    x, gate = (states.unflatten(-1, (heads, self.mamba_head_dim)) for states in (x, gate))
    parts = []
    for head in range(heads):
        step, B, C = F.linear(x[:, :, head], self.x_proj_weight[head]).split(ranks, -1)
        parts.append((F.linear(step, self.dt_proj_weight[head]), B, C))
    dt, B, C = (torch.stack(of_heads, 2) for of_heads in zip(*parts, strict=True))
    dt = F.softplus(dt + self.dt_proj_bias.to(dt.dtype))
    out = selective(recurrences, x, dt, -torch.exp(self.A_log.float()), B, C, self.D.float())
    return self.out_proj((out * F.silu(gate)).flatten(2).to(hidden_states.dtype))


def _lightning(recurrences: Recurrences, self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """minimax: linear attention with one decay a head."""
    heads = self.num_attention_heads
    fused = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * self.head_dim))
    q, k, v = fused.split(self.head_dim, -1)
    decay = (-self.slope_rate.flatten()).expand(*hidden_states.shape[:2], heads)
    out = self.norm(recurrences.recur(q, k, v, decay).to(hidden_states.dtype).flatten(2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


def _griffin(
    recurrences: Recurrences, self: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """recurrent_gemma: a convolution, then one decay a channel; position 0 starts from nothing."""
    x = recurrences.convolve(self.linear_x(input_states), self.conv_1d.weight.squeeze(1), self.conv_1d.bias)
    unit = self.rg_lru
    kept = _block_gate(unit, x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_decay = -8.0 * kept * F.softplus(unit.recurrent_param)
    first = (position_ids == 0)[:, :, None]
    scale = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    update = x * _block_gate(unit, x, unit.input_gate_weight, unit.input_gate_bias) * scale.to(x.dtype)
    ones = torch.ones_like(update[:, :, :1, None])
    decay = torch.where(first, -torch.inf, log_decay.float())[:, :, None]
    rates = torch.ones_like(unit.recurrent_param, dtype=torch.float32)[None, None]
    states = recurrences.recur(ones, ones, update[:, :, None], decay, rates=rates).squeeze(2).to(x.dtype)
    return self.linear_out(states * self.act_fn(self.linear_y(input_states))), None


def _block_gate(unit: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """sigmoid of x [B, T, C] times a matrix for each head, and its bias."""
    by_head = x.unflatten(-1, (unit.num_attention_heads, unit.block_width))
    gates = [F.linear(by_head[:, :, head], weight[head].t(), bias[head]) for head in range(unit.num_attention_heads)]
    return torch.sigmoid(torch.cat(gates, -1))


def _zaya(recurrences: Recurrences, self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Queries and keys through a convolution of each channel, then one of each head; half of a value is a token late.

    What is before the first token is the first convolution's bias, so the bias is added where its output is read.
    """
    heads, groups, dim = self.num_key_value_heads, self.num_key_value_groups, self.head_dim
    queries, keys = self.q_proj(hidden_states), self.k_proj(hidden_states)
    depthwise, grouped = self.conv_qk_depthwise, self.conv_qk_grouped
    mixed = recurrences.convolve(torch.cat([queries, keys], -1), depthwise.weight.squeeze(1), None)
    late = [_late(recurrences, mixed, delay) + depthwise.bias for delay in reversed(range(grouped.kernel_size[0]))]
    taps = torch.stack([states.unflatten(-1, (-1, dim)) for states in late], -1).flatten(-2)  # as the weights lie
    weights, biases = (part.unflatten(0, (-1, dim)) for part in (grouped.weight.flatten(1), grouped.bias))
    by_head = [F.linear(taps[:, :, head], weights[head], biases[head]) for head in range(len(weights))]
    shared = keys.unflatten(-1, (heads, 1, dim)).expand(-1, -1, -1, groups, -1).flatten(2, 3)
    residual = (queries.unflatten(-1, (-1, dim)) + shared) * 0.5
    query = torch.stack(by_head[: heads * groups], 2) + residual
    key = torch.stack(by_head[heads * groups :], 2) + residual.unflatten(2, (heads, groups)).mean(3)
    projection = self.v_proj_delayed
    delayed = _late(recurrences, F.linear(hidden_states, projection.weight), 1)
    delayed = delayed if projection.bias is None else delayed + projection.bias
    value = torch.cat([self.v_proj_current(hidden_states), delayed], -1).unflatten(-1, (-1, dim))
    return query, key, value


def _rwkv_attention(recurrences: Recurrences, self: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    late = _late(recurrences, hidden, 1)
    key, value, gate = (
        project(hidden * mix + late * (1 - mix))
        for project, mix in (
            (self.key, self.time_mix_key),
            (self.value, self.time_mix_value),
            (self.receptance, self.time_mix_receptance),
        )
    )
    out = recurrences.average(key, value, -torch.exp(self.time_decay.float()), self.time_first)
    return self.output(torch.sigmoid(gate) * out.to(key.dtype)), None


def _rwkv_feed_forward(recurrences: Recurrences, self: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    late = _late(recurrences, hidden, 1)
    key, gate = (
        project(hidden * mix + late * (1 - mix))
        for project, mix in ((self.key, self.time_mix_key), (self.receptance, self.time_mix_receptance))
    )
    return torch.sigmoid(gate) * self.value(torch.square(torch.relu(key))), None


def _mlstm(
    recurrences: Recurrences,
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """xlstm: a value of one beside the others makes the denominator; [B, H, T, ...], as Hugging Face has them.

    Hugging Face divides the state by e^m, the greatest weight in it; its gates are capped, so that it need not be.
    """
    cap = self.config.gate_soft_cap
    if not 0 < cap <= MOST_EXPONENT:
        raise UnsupportedModel(f"xlstm with gate_soft_cap={cap}: exponentials of its gates could overflow")
    q, k, v, gain, keep = (x.transpose(1, 2).float() for x in (query, key, value, igate, fgate))
    decay = F.logsigmoid(keep)
    both = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    both = recurrences.recur(q * q.shape[-1] ** -0.5, k * torch.exp(gain)[..., None], both, decay)
    total, weight = both.split([v.shape[-1], 1], -1)
    most = torch.exp(recurrences.greatest(gain, decay))[..., None]
    out = total / (weight.abs().clamp(min=1.0) + self.config.eps * most)
    return out.to(query.dtype).transpose(1, 2), None


def _late(recurrences: Recurrences, x: Tensor, delay: int) -> Tensor:
    """x [B, T, C] of ``delay`` tokens before, zeros before the first."""
    if not delay:
        return x
    ones = x.new_ones(x.shape[2])
    return recurrences.convolve(x, torch.stack([ones, *[torch.zeros_like(ones)] * delay], -1), None)


OWN_MIXERS: dict[str, Callable[..., Any]] = {
    "minimax.modeling_minimax.MiniMaxLightningAttention": _lightning,
    "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock": _griffin,
    "rwkv.modeling_rwkv.RwkvFeedForward": _rwkv_feed_forward,
    "rwkv.modeling_rwkv.RwkvSelfAttention": _rwkv_attention,
    "xlstm.modeling_xlstm.xLSTMBackend": _mlstm,
    "zamba.modeling_zamba.ZambaMambaMixer": _zamba,
    "zaya.modeling_zaya.ZayaCCAProjection": _zaya,
}
