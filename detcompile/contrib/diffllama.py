"""DiffLlama: the difference of two attentions."""

from typing import Any

import torch
from torch import Tensor

from detcompile.passes.adapters.forwards import attend, rotate_halves
from detcompile.passes.modules.attention import STEP_KWARG


def _diffllama(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
    """Run both attentions as one: they share queries and keys, and their values are joined side by side."""
    query, key, value = (
        project(hidden_states).unflatten(-1, (project.out_features // self.head_dim, self.head_dim))
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = rotate_halves(query, key, *position_embeddings)
    both = torch.cat(value.chunk(2, 2), -1)
    out = attend(self, query, key, torch.cat([both, both], 2), kwargs.get(STEP_KWARG), scaling=self.scaling)
    one, other = out.unflatten(-1, (query.shape[2], 2 * self.head_dim)).chunk(2, 2)
    first, second = (
        torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(query.dtype)
        for q, k in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
    )
    mixed = (one - (first - second + self.lambda_init) * other).float()
    mixed = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + self.groupnorm.eps)
    return self.o_proj(((1 - self.lambda_init) * mixed.to(query.dtype)).flatten(2)), None


ATTENTION = {"diffllama.modeling_diffllama.DiffLlamaAttention": _diffllama}
