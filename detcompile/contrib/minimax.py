"""MiniMax: linear attention with one decay per head."""

from typing import Any

import torch
from torch import Tensor

from detcompile.passes.modules.recurrences import Recurrences


def _lightning(recurrences: Recurrences, self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    heads = self.num_attention_heads
    fused = self.act_fn(self.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * self.head_dim))
    q, k, v = fused.split(self.head_dim, -1)
    decay = (-self.slope_rate.flatten()).expand(*hidden_states.shape[:2], heads)
    out = self.norm(recurrences.recur(q, k, v, decay).to(hidden_states.dtype).flatten(2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


MIXERS = {"minimax.modeling_minimax.MiniMaxLightningAttention": _lightning}
