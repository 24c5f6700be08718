"""xLSTM: the matrix memory (mLSTM) as one recurrence."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.recurrences import Recurrences

MOST_EXPONENT = 30.0  # e^30 leaves room for sums over any context in float32


def _xlstm(self: Any, input_ids: Tensor, logits_to_keep: Any = 0, **_: Any) -> CausalLMOutput:
    """Run a prompt in one piece. Hugging Face splits long prompts and carries states between the pieces."""
    keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    hidden = self.backbone.embeddings(input_ids)
    for block in self.backbone.blocks:
        hidden, _ = block(hidden)
    kept = self.backbone.out_norm(hidden)[:, keep]
    logits = self.lm_head(kept.to(self.lm_head.weight.dtype)).float()
    cap = self.config.output_logit_soft_cap
    return CausalLMOutput(logits=logits if cap is None else cap * torch.tanh(logits / cap))


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
    """Compute the matrix memory; inputs are [B, H, T, ...].

    A constant value of 1 beside the others accumulates the denominator.
    Hugging Face divides the state by e^m, its greatest weight. The gates are capped, so this is not needed here.
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


MODULES = {"xlstm.modeling_xlstm.xLSTMForCausalLM": {"forward": _xlstm}}
MIXERS = {"xlstm.modeling_xlstm.xLSTMBackend": _mlstm}
