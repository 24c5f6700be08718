"""RWKV-4: token shift and the WKV average."""

from typing import Any

import torch
from torch import Tensor

from detcompile.passes.modules.recurrences import Recurrences


def _rwkv_attention(recurrences: Recurrences, self: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    late = recurrences.delayed(hidden, 1)
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
    late = recurrences.delayed(hidden, 1)
    key, gate = (
        project(hidden * mix + late * (1 - mix))
        for project, mix in ((self.key, self.time_mix_key), (self.receptance, self.time_mix_receptance))
    )
    return torch.sigmoid(gate) * self.value(torch.square(torch.relu(key))), None


MIXERS = {
    "rwkv.modeling_rwkv.RwkvFeedForward": _rwkv_feed_forward,
    "rwkv.modeling_rwkv.RwkvSelfAttention": _rwkv_attention,
}
