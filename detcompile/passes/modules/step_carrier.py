"""What a model is called with reaches attention past modules that do not hand it down: the step, and the positions."""

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from detcompile.passes.modules.attention import STEP_KWARG

__all__ = ["carry_positions", "carry_step"]


class Carrier:
    """Holds one of the model's keyword arguments between its entry and its attention, within one forward."""

    carried: Any = None


def carry_step(model: PreTrainedModel) -> None:
    """Give every attention of ``model`` that takes keywords the step that the model was called with."""
    taking = []
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters.values()
        takes_keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        if isinstance(getattr(module, "layer_idx", None), int) and takes_keywords:
            taking.append(module)
    _carry(model, STEP_KWARG, taking)


def carry_positions(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Give ``modules`` the ``position_ids`` that the model was called with."""
    _carry(model, "position_ids", modules)


def _carry(model: PreTrainedModel, name: str, modules: Iterable[nn.Module]) -> None:
    carrier = Carrier()

    def take(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        carrier.carried = kwargs.get(name)

    def give(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: carrier.carried, **kwargs}

    def forget(*_: Any) -> None:
        carrier.carried = None

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(forget)
    for module in modules:
        module.register_forward_pre_hook(give, with_kwargs=True)
