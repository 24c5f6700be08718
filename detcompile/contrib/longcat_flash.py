"""LongCat-Flash: a mixture in which some experts return the token unchanged."""

from typing import Any

import torch
from torch import Tensor

from detcompile.passes.adapters.modules import expert_product
from detcompile.passes.modules.experts import mixed


def _longcat_flash(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the chosen experts. The router's last experts return the token unchanged."""
    routed = self.num_routed_experts
    ids = top_k_index.clamp(max=routed - 1)
    gate, up = expert_product(hidden_states, ids, self.gate_up_proj[:routed]).chunk(2, -1)
    outer = expert_product(self.act_fn(gate) * up, ids, self.down_proj)
    outer = torch.where((top_k_index < routed)[..., None], outer, hidden_states[:, None])
    return mixed(outer, top_k_weights)


EXPERTS = {"longcat_flash.modeling_longcat_flash.LongcatFlashExperts": {"forward": _longcat_flash}}
