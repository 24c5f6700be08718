"""RecurrentGemma: the recurrent block of Griffin."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from detcompile.passes.modules.recurrences import Recurrences


def _griffin(
    recurrences: Recurrences, self: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Run a convolution, then one decay per channel. Position 0 resets the state."""
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
    """Return the sigmoid of x [B, T, C] times each head's matrix plus its bias."""
    by_head = x.unflatten(-1, (unit.num_attention_heads, unit.block_width))
    gates = [F.linear(by_head[:, :, head], weight[head].t(), bias[head]) for head in range(unit.num_attention_heads)]
    return torch.sigmoid(torch.cat(gates, -1))


MIXERS = {"recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock": _griffin}
