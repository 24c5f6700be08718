"""Low-rank adapters (LoRA) of a model that is trained: what is refused of them, and PEFT's files of them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.passes.modules.low_rank import AdaptedLinear
from detcompile.storage import naming

__all__ = ["of_adapters", "require_no_dropout", "save_adapters"]

PARTS = (".lora_A.", ".lora_B.")  # in names of parameters


def require_no_dropout(model: PreTrainedModel) -> None:
    """Fail if adapters of a model are to be trained with dropout.

    Raises:
        UnsupportedModel: naming the linear.
    """
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear) and module.dropout:
            raise UnsupportedModel(
                f"{name}: lora_dropout={module.dropout}, and a trainer's forward is serving's, without dropout: make"
                " the adapters with LoraConfig(lora_dropout=0.0)"
            )


def of_adapters(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter."""
    return any(part in name for part in PARTS)


def save_adapters(folder: Path, configs: Mapping[str, Any], parameters: Mapping[str, Tensor], base: str) -> None:
    """Write adapters as PEFT reads them: ``adapter_config.json`` and ``adapter_model.safetensors``, float32.

    Args:
        configs: PEFT's config by the name of the adapter, of which there is one.
        parameters: whole tensors by name, those of the adapter and others that were trained.
        base: name or folder of the model that the adapters are of.

    Raises:
        InvalidInput: ``folder`` is a file.
        StorageError: the folder cannot be written.
    """
    ((adapter, config),) = configs.items()
    if folder.is_file():
        raise InvalidInput(f"{folder} is a file: give a folder, which is made, for the adapters")
    config = copy.copy(config)
    config.base_model_name_or_path = config.base_model_name_or_path or base
    config.inference_mode = True
    tensors = {
        f"base_model.model.{_unnamed(name, adapter)}": held.detach().to("cpu", torch.float32).contiguous()
        for name, held in parameters.items()
    }
    with naming(folder, "Give another folder"):
        config.save_pretrained(str(folder))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _unnamed(name: str, adapter: str) -> str:
    """A parameter's name without that of its adapter, as PEFT's files have it."""
    for part in PARTS:
        name = name.replace(f"{part}{adapter}.", part)
    return name
