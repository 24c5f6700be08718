"""Modules of experts that take their implementation from outside."""

from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

__all__ = ["ExpertsInterface", "gated", "set_experts_implementation", "takes_implementation"]

READ_IN = "5.17.0"
NAMES = {
    "ExpertsInterface": "The implementations of experts by name. Without it: experts are multiplied in an order that "
    "follows how many tokens each of them has.",
}

MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")


def takes_implementation(module: nn.Module) -> bool:
    """Return whether a module has what transformers' use_experts_implementation gives a class.

    Without it: modules of experts are not found.
    """
    return all(hasattr(module, mark) for mark in MARKS)


def set_experts_implementation(module: Any, name: str) -> bool:
    """Have a module's experts be computed by the implementation of this name; return whether the module does so.

    Without it: see ExpertsInterface.
    """
    module.config._experts_implementation_internal = name
    return bool(module.config._experts_implementation == name)


def gated(module: Any, inner: Tensor) -> Tensor:
    """Return what a module of experts makes of the products with its gates and up projections.

    Without it: an activation of a model's own, such as one with limits, is not applied.
    """
    result: Tensor = module._apply_gate(inner)
    return result
