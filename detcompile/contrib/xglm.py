"""XGLM: sinusoids from a table of fixed size."""

from typing import Any

import torch
from torch import Tensor

from detcompile.passes.adapters.attention_classes import projected_attention


def _sinusoids(self: Any, position_ids: Tensor, past_key_values_length: int = 0) -> Tensor:
    """Look rows up in the existing table. Hugging Face grows the table when a batch has more columns."""
    return torch.nn.functional.embedding(position_ids + self.offset, self.weights)


MODULES = {"xglm.modeling_xglm.XGLMSinusoidalPositionalEmbedding": {"forward": _sinusoids}}
ATTENTION = {"xglm.modeling_xglm.XGLMAttention": projected_attention}
