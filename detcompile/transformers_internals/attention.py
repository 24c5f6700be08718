"""The attention that a model calls, and the masks that its code requests."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel


def set_attention_implementation(config: PretrainedConfig, name: str) -> None:
    """Make a model's code use an attention implementation by its name, whatever its class supports.

    Without it: a class that computes its attention itself requests a mask that a packed step does not have.
    """
    config._attn_implementation_internal = name


def mask_functions(namespace: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return transformers' mask functions that a module has imported, by their names there.

    Without it: a model whose tokens see more or less than those before them is served as a causal one.
    """
    return {
        name: value
        for name, value in vars(namespace).items()
        if getattr(value, "__module__", "") == "transformers.masking_utils"
        and getattr(value, "__name__", "").startswith("create_")
    }


def takes_attention(model: PreTrainedModel) -> bool:
    """Return whether a model's class calls the AttentionInterface.

    Without it: classes that do so since transformers 5.24, such as GPT-J's, still get a forward that looks for
    attributes that they no longer have.
    """
    return bool(model._supports_attention_backend)
