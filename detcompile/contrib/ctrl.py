"""CTRL: sinusoids from a table, attention through our function."""

import math
from typing import Any

from torch import Tensor, nn

from detcompile.passes.adapters.forwards import Adapter, attend
from detcompile.step import StepInputs


def _ctrl(model: Any, input_ids: Tensor, position_ids: Tensor, step: StepInputs | None, keep: Any) -> Tensor:
    body = model.transformer
    hidden = body.w(input_ids) * math.sqrt(body.d_model_size) + body.pos_encoding[position_ids]
    for block in body.h:
        hidden = block(hidden, attention_mask=step)
    return model.lm_head(body.layernorm(hidden)[:, keep])


def _ctrl_attention(
    self: Any, v: Tensor, k: Tensor, q: Tensor, attention_mask: StepInputs | None = None, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = (
        project(states).unflatten(-1, (self.num_heads, self.head_dim))
        for project, states in ((self.Wq, q), (self.Wk, k), (self.Wv, v))
    )
    return self.dense(attend(self, query, key, value, attention_mask, scaling=self.scaling)), None


def _ctrl_positions(model: Any, attention: Any) -> None:
    """Make the sinusoids a buffer. Hugging Face moves them to the device in every forward."""
    body = model.transformer
    if not isinstance(body.pos_encoding, nn.Buffer):
        table = body.pos_encoding.to(body.w.weight)
        del body.pos_encoding
        body.pos_encoding = nn.Buffer(table, persistent=False)


ADAPTERS = {
    "ctrl.modeling_ctrl.CTRLLMHeadModel": Adapter(
        "multi_head_attention", _ctrl, _ctrl_attention, prepare=_ctrl_positions
    )
}
