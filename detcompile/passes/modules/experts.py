"""Route mixtures of experts to our template through transformers' ExpertsInterface.

A token's experts are computed one by one (detcompile.expert_matmul), weighted by the router, and added left to right in
the router's order, in float32: orders.token_orders.Experts, written as additions that the certificate sees. If ranks
share the experts (passes.sharding.experts), each product is added over the ranks and rounded first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.exact import ExactStack
from detcompile.passes.modules.quantized_linear import QuantizedStack
from detcompile.templates.ops import ours
from detcompile.transformers_internals.experts import (
    ExpertsInterface,
    gated,
    normalized,
    set_experts_implementation,
    takes_implementation,
    unknown_settings,
)

EXPERTS = "detcompile"  # the model's experts implementation


class ExpertTree(NamedTuple):
    """The sum tree of the down products: ``radices`` within this rank's share, ``above`` over the ranks."""

    radices: tuple[int, ...] = ()
    above: tuple[int, ...] = ()
    size: int = 1
    group: str = ""


def find_experts(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the modules of ``model`` that hold experts and take an experts implementation, by name."""
    return [(name, module) for name, module in model.named_modules() if takes_implementation(module)]


def pin_experts(model: PreTrainedModel) -> int:
    """Make the experts of ``model`` that take an implementation use ours. Return how many there are.

    Raises:
        UnsupportedModel: their layout is unknown.
    """
    modules = find_experts(model)
    for name, module in modules:
        _require_known(name, module)
        if not set_experts_implementation(module, EXPERTS):
            raise UnsupportedModel(f"{name}: {type(module).__name__} takes no experts implementation from outside")
    return len(modules)


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [M, H], top_k_index [M, k] and top_k_weights [M, k], best expert first -> [M, H]."""
    inner = _product(module, hidden_states, top_k_index, "gate_up_proj" if module.has_gate else "up_proj")
    inner = gated(module, inner) if module.has_gate else module.act_fn(inner)
    return mixed(normalized(module, _down(module, inner, top_k_index)), top_k_weights)


def mixed(outer: Tensor, top_k_weights: Tensor) -> Tensor:
    """Add the outputs of a token's experts [M, k, H], weighted [M, k], in float32, best expert first -> [M, H].

    Float32 weights, as in Mixtral with any dtype, are multiplied unrounded.
    """
    return added(outer * top_k_weights[..., None]).to(outer.dtype)


def added(outer: Tensor) -> Tensor:
    """Add the outputs of a token's experts [M, k, H] in float32, best expert first -> [M, H]."""
    single = outer.float()
    total = single[:, 0]
    for rank in range(1, outer.shape[1]):
        total = total + single[:, rank]
    return total.to(outer.dtype)


def _product(module: Any, x: Tensor, ids: Tensor, name: str, radices: tuple[int, ...] = ()) -> Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    stack = getattr(module, name)
    if isinstance(stack, ExactStack):
        return stack(x, ids, bias)
    if isinstance(stack, QuantizedStack):
        return stack(x, ids, bias, list(radices))
    return ours.expert_matmul(x, ids, _weight(module, name), bias, list(radices))


def _down(module: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Multiply by the down projection, with one rounding after the bias, as in expert_matmul."""
    tree = getattr(module, "tree", ExpertTree())
    if tree.size == 1:
        return _product(module, x, ids, "down_proj", tree.radices)
    if isinstance(module.down_proj, ExactStack):
        return module.down_proj.all_reduced(x, ids, module.down_proj_bias if module.has_bias else None, tree.group)
    if isinstance(module.down_proj, QuantizedStack):
        partial = module.down_proj.partial(x, ids, list(tree.radices), tree.size)
    else:
        partial = ours.expert_matmul_partial(x, ids, _weight(module, "down_proj"), list(tree.radices), tree.size)
    if not module.has_bias:
        return ours.tree_all_reduce(partial, None, None, list(tree.above), tree.group, x.dtype)
    total = ours.tree_all_reduce(partial, None, None, list(tree.above), tree.group, torch.float32)
    return (total + F.embedding(ids, module.down_proj_bias).float()).to(x.dtype)


def _weight(module: Any, name: str) -> Tensor:
    weight = getattr(module, name)
    return weight.transpose(1, 2) if module.is_transposed else weight


def _require_known(name: str, module: nn.Module) -> None:
    unknown = unknown_settings(module)
    if unknown:
        raise UnsupportedModel(f"{name}: experts with {' and '.join(unknown)} are not supported")
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    given = {weight: getattr(module, weight, None) for weight in weights}
    for weight, value in given.items():
        stacked = isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()
        if not stacked and not isinstance(value, (QuantizedStack, ExactStack)):
            raise UnsupportedModel(f"{name}.{weight} is not a stack of one matrix per expert")


ExpertsInterface.register(EXPERTS, experts)
