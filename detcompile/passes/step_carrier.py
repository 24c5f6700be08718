"""The step reaches attention past modules that hand no keywords down (stablelm, nemotron, moshi)."""

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from detcompile.passes.attention import STEP_KWARG
from detcompile.step import StepInputs

__all__ = ["carry_step"]


class Carrier:
    """Holds the step between the model's entry and its attention, within one forward."""

    step: StepInputs | None = None


def carry_step(model: PreTrainedModel) -> None:
    """Give every attention of ``model`` that takes keywords the step that the model was called with."""
    carrier = Carrier()

    def take(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        carrier.step = kwargs.get(STEP_KWARG)

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {STEP_KWARG: carrier.step, **kwargs}

    def forget(*_: Any) -> None:
        carrier.step = None

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(forget)
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters.values()
        takes_keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        if isinstance(getattr(module, "layer_idx", None), int) and takes_keywords:
            module.register_forward_pre_hook(give, with_kwargs=True)
