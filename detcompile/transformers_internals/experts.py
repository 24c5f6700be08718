"""Modules of experts that take their implementation from outside."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

NAMES = {
    "ExpertsInterface": "The implementations of experts by name. Without it: experts are summed in an order that "
    "depends on how many tokens each of them has.",
}

MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
NORM = "has_post_expert_norm"  # from 5.24 on


def takes_implementation(module: nn.Module) -> bool:
    """Return whether a module's class was decorated with transformers' use_experts_implementation.

    Without it: modules of experts are not found.
    """
    return all(hasattr(module, mark) for mark in MARKS)


def set_experts_implementation(module: Any, name: str) -> bool:
    """Make a module compute its experts by the implementation of this name; return whether it does.

    Without it: see ExpertsInterface.
    """
    module.config._experts_implementation_internal = name
    return bool(module.config._experts_implementation == name)


def gated(module: Any, inner: Tensor) -> Tensor:
    """Apply a module's activation to the products with its gates and up projections.

    Without it: a custom activation, such as one with limits, is not applied.
    """
    result: Tensor = module._apply_gate(inner)
    return result


def normalized(module: Any, outer: Tensor) -> Tensor:
    """Apply a module's norm, if it has one, to the products with its down projections.

    Without it: a norm of each expert's output, such as Muse Spark's, is not applied.
    """
    result: Tensor = module.post_expert_norm(outer) if getattr(module, NORM, False) else outer
    return result


def leave_out(module: Any, parameters: Iterable[str]) -> None:
    """Load a module without some of its parameters.

    Without it: experts that stay quantized would take the memory of dequantized ones during loading.
    """
    for name in parameters:
        setattr(module, name, None)
    module._is_hf_initialized = True  # nothing of it is initialized


def unknown_settings(module: nn.Module) -> list[str]:
    """Return the settings of use_experts_implementation that are on in a module and that this package does not know.

    Without it: features of newer releases of transformers would be ignored.
    """
    known = (*MARKS, NORM)
    on = [name for name, value in vars(module).items() if name.startswith(("has_", "is_")) and value is True]
    return [name for name in on if name not in known]
