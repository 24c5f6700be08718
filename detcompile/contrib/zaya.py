"""ZAYA: queries and keys through convolutions, values half delayed."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from detcompile.passes.modules.recurrences import Recurrences


def _zaya(recurrences: Recurrences, self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Convolve queries and keys per channel, then per head. Half of each value comes from the token before.

    The first convolution's bias is added where its output is read, so that it also applies before the first token.
    """
    heads, groups, dim = self.num_key_value_heads, self.num_key_value_groups, self.head_dim
    queries, keys = self.q_proj(hidden_states), self.k_proj(hidden_states)
    depthwise, grouped = self.conv_qk_depthwise, self.conv_qk_grouped
    mixed = recurrences.convolve(torch.cat([queries, keys], -1), depthwise.weight.squeeze(1), None)
    late = [recurrences.delayed(mixed, delay) + depthwise.bias for delay in reversed(range(grouped.kernel_size[0]))]
    taps = torch.stack([states.unflatten(-1, (-1, dim)) for states in late], -1).flatten(-2)  # as the weights lie
    weights, biases = (part.unflatten(0, (-1, dim)) for part in (grouped.weight.flatten(1), grouped.bias))
    by_head = [F.linear(taps[:, :, head], weights[head], biases[head]) for head in range(len(weights))]
    shared = keys.unflatten(-1, (heads, 1, dim)).expand(-1, -1, -1, groups, -1).flatten(2, 3)
    residual = (queries.unflatten(-1, (-1, dim)) + shared) * 0.5
    query = torch.stack(by_head[: heads * groups], 2) + residual
    key = torch.stack(by_head[heads * groups :], 2) + residual.unflatten(2, (heads, groups)).mean(3)
    projection = self.v_proj_delayed
    delayed = recurrences.delayed(F.linear(hidden_states, projection.weight), 1)
    delayed = delayed if projection.bias is None else delayed + projection.bias
    value = torch.cat([self.v_proj_current(hidden_states), delayed], -1).unflatten(-1, (-1, dim))
    return query, key, value


MIXERS = {"zaya.modeling_zaya.ZayaCCAProjection": _zaya}
