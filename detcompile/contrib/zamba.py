"""Zamba: Mamba's scan with separate projections per head."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from detcompile.passes.adapters.scans import selective
from detcompile.passes.modules.recurrences import Recurrences


def _zamba(recurrences: Recurrences, self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Channels alternate between x and gate. Each head has its own projections."""
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


MIXERS = {"zamba.modeling_zamba.ZambaMambaMixer": _zamba}
