"""RoFormer as a causal language model: neighboring features of queries and keys are turned by the position."""

from typing import Any

from torch import Tensor

from detcompile.errors import UnsupportedModel
from detcompile.passes.adapters.forwards import attend, rotate_pairs
from detcompile.passes.modules.attention import STEP_KWARG


def _roformer(
    self: Any, hidden_states: Tensor, sinusoidal_pos: Tensor, encoder_hidden_states: Tensor | None = None, **kwargs: Any
) -> Any:
    """Rows of the table, sines then cosines, come with leading dimensions of 1. Attention to an encoder is refused."""
    if encoder_hidden_states is not None:
        raise UnsupportedModel(f"{type(self).__name__}: attention to an encoder is not supported")
    query, key, value = (
        project(hidden_states).unflatten(-1, (self.num_attention_heads, self.attention_head_size))
        for project in (self.query, self.key, self.value)
    )
    sin, cos = sinusoidal_pos.flatten(0, -3).chunk(2, -1)
    query, key = (rotate_pairs(states, sin, cos) for states in (query, key))
    if self.rotary_value:
        value = rotate_pairs(value, sin, cos)
    return attend(self, query, key, value, kwargs.get(STEP_KWARG)), None


ATTENTION = {"roformer.modeling_roformer.RoFormerSelfAttention": _roformer}
