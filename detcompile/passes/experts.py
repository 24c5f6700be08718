"""Mixtures of experts reach our template through transformers' ExpertsInterface.

A token's experts are multiplied one by one (detcompile.expert_matmul), weighted by the router, and added left to right
in the router's order, in float32: the order Experts of orders.py, written out as additions that the certificate reads.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

import detcompile.templates.ops  # noqa: F401 (registers torch.ops.detcompile)
from detcompile.errors import UnsupportedModel

__all__ = ["EXPERTS", "added", "experts", "mixed", "pin_experts"]

EXPERTS = "detcompile"  # the model's experts implementation
MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")  # set by use_experts_implementation


def pin_experts(model: PreTrainedModel) -> int:
    """Make the experts of ``model`` that take an implementation from outside call ours; says how many there are.

    Raises:
        UnsupportedModel: they are of a layout that is not known.
    """
    found = [(name, module) for name, module in model.named_modules() if all(hasattr(module, mark) for mark in MARKS)]
    for name, module in found:
        _require_known(name, module)
        module.config._experts_implementation_internal = EXPERTS
        if module.config._experts_implementation != EXPERTS:
            raise UnsupportedModel(f"{name}: {type(module).__name__} takes no experts implementation from outside")
    return len(found)


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [M, H], top_k_index [M, k] and top_k_weights [M, k], best expert first -> [M, H]."""
    inner = _product(module, hidden_states, top_k_index, "gate_up_proj" if module.has_gate else "up_proj")
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _product(module, inner, top_k_index, "down_proj")
    return mixed(outer, top_k_weights)


def mixed(outer: Tensor, top_k_weights: Tensor) -> Tensor:
    """What a token's experts say [M, k, H], weighted [M, k] and added in float32, best expert first -> [M, H]."""
    return added(outer * top_k_weights[..., None])


def added(outer: Tensor) -> Tensor:
    """What a token's experts say [M, k, H], added in float32, best expert first -> [M, H]."""
    single = outer.float()
    total = single[:, 0]
    for rank in range(1, outer.shape[1]):
        total = total + single[:, rank]
    return total.to(outer.dtype)


def _product(module: Any, x: Tensor, ids: Tensor, name: str) -> Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    w_ENK = weight.transpose(1, 2) if module.is_transposed else weight
    return torch.ops.detcompile.expert_matmul(x, ids, w_ENK, bias)


def _require_known(name: str, module: nn.Module) -> None:
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    given = {weight: getattr(module, weight, None) for weight in weights}
    for weight, value in given.items():
        if not isinstance(value, Tensor) or value.dim() != 3 or not value.is_floating_point():
            raise UnsupportedModel(f"{name}.{weight} is no stack of one matrix for each expert")


ExpertsInterface.register(EXPERTS, experts)
