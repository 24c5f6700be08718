"""Which attention a model calls, and the masks that its code asks for."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["mask_functions", "set_attention_implementation", "takes_attention"]

READ_IN = "5.17.0, 5.24.0"


def set_attention_implementation(config: PretrainedConfig, name: str) -> None:
    """Have a model's code take an implementation of attention by its name, whatever its class supports.

    Without it: a class that computes its attention itself asks for a mask of another form than a packed step has.
    """
    config._attn_implementation_internal = name


def mask_functions(namespace: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions of transformers that make masks and that a module has imported, by the module's name of it.

    Without it: a model whose tokens see more or less than those before them is served as a causal one.
    """
    return {
        name: value
        for name, value in vars(namespace).items()
        if getattr(value, "__module__", "") == "transformers.masking_utils"
        and getattr(value, "__name__", "").startswith("create_")
    }


def takes_attention(model: PreTrainedModel) -> bool:
    """Return whether a model's class calls an attention function from outside by itself.

    Without it: a class that began to do so, as GPT-J's in transformers 5.24, is still given a forward that looks for
    attributes which it no longer has.
    """
    return bool(model._supports_attention_backend)
