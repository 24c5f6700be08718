"""Low-rank adapters (LoRA) in training: checks, and saving in PEFT's format."""

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

PARTS = (".lora_A.", ".lora_B.")  # in names of parameters


def require_no_dropout(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, naming the linear, for adapters with dropout."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear) and module.dropout:
            raise UnsupportedModel(
                f"{name}: lora_dropout={module.dropout}, but a trainer's forward equals serving's, without dropout:"
                " create the adapters with LoraConfig(lora_dropout=0.0)"
            )


def of_adapters(name: str) -> bool:
    """Return True if a parameter of this name belongs to an adapter."""
    return any(part in name for part in PARTS)


def save_adapters(folder: Path, configs: Mapping[str, Any], parameters: Mapping[str, Tensor], base: str) -> None:
    """Write adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``, float32.

    Args:
        configs: PEFT's config by adapter name; exactly one.
        parameters: whole tensors by name: the adapter's and others that were trained.
        base: name or folder of the base model.

    Raises:
        InvalidInput: ``folder`` is a file.
        StorageError: the folder cannot be written.
    """
    ((adapter, config),) = configs.items()
    if folder.is_file():
        raise InvalidInput(f"{folder} is a file: pass a folder for the adapters; it is created")
    config = copy.copy(config)
    config.base_model_name_or_path = config.base_model_name_or_path or base
    config.inference_mode = True
    tensors = {
        f"base_model.model.{_unnamed(name, adapter)}": tensor.detach().to("cpu", torch.float32).contiguous()
        for name, tensor in parameters.items()
    }
    with naming(folder, "Use another folder"):
        config.save_pretrained(str(folder))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _unnamed(name: str, adapter: str) -> str:
    """Return a parameter's name without the adapter's name, as in PEFT's files."""
    for part in PARTS:
        name = name.replace(f"{part}{adapter}.", part)
    return name
