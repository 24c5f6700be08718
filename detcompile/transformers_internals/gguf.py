"""How transformers reads a GGUF file: names of metadata and tensors, and changes by llama.cpp's converter."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

NAMES: dict[str, str] = {}


def names_in_config(architecture: str, model_type: str) -> dict[str, str | None]:
    """Return the names of metadata, without the architecture, that become settings of a config, and those settings.

    Without it: metadata that transformers' reader drops, such as a scaling of rotary tables, are not noticed.
    """
    of_architectures = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    names = of_architectures.get(architecture) or of_architectures.get(model_type) or {}
    return {name: attribute for name, attribute in names.items() if attribute != -1}


def state_dict_of(
    model: Any, architecture: str, tensors: Iterable[tuple[str, np.ndarray]], dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the model's weights from dequantized tensors under their names in the file, and the unused names.

    Without it: transformers' loader reads the weights, which needs accelerate, and seconds for each module.

    Args:
        model: on any device, also "meta".
        tensors: float32, in the order of the file.
    """
    processor, places = _reader(model, architecture)
    parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
    weights, unused = parsed["tensors"], []
    for name, values in tensors:
        before = len(weights)
        result = processor.process(weights=values, name=name, tensor_key_mapping=places, parsed_parameters=parsed)
        if result.name is None:  # the processor has put it into the weights, perhaps beside another tensor
            continue
        if result.name in places:
            writable = np.require(result.weights, requirements=["C", "W"])  # torch warns at views of files
            weights[places[result.name]] = torch.from_numpy(writable).to(dtype)
        elif len(weights) == before:
            unused.append(name)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}, unused


def row_orders(model: Any, architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Tensor]]:
    """Return each weight's tensor and row order, for weights that only reorder rows.

    Without it: quantized blocks would have to be dequantized, because the reader changes floats only.

    Args:
        model: on any device, also "meta".
        shapes: of matrices, by their names in the file.
    """
    processor, places = _reader(model, architecture)
    orders = {}
    for name, shape in shapes.items():
        numbers = np.broadcast_to(np.arange(shape[0], dtype=np.float64)[:, None], shape)
        result = processor.process(
            weights=numbers, name=name, tensor_key_mapping=places, parsed_parameters={"tensors": {}}
        )
        if result.name in places and result.weights.shape == shape:
            rows = result.weights[:, 0]
            if (np.sort(rows) == numbers[:, 0]).all() and (result.weights == rows[:, None]).all():
                orders[places[result.name]] = name, torch.from_numpy(rows.astype(np.int64))
    return orders


def _reader(model: Any, architecture: str) -> tuple[TensorProcessor, dict[str, str]]:
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    return processor, get_gguf_hf_weights_map(_Names(model), processor)


class _Names:
    """A module with only one level of children: deeper names do not occur in GGUF files, and each costs 14 ms."""

    def __init__(self, module: nn.Module, config: Any = None, leaf: bool = False) -> None:
        self._module, self._leaf = module, leaf
        self.config = module.config if config is None else config

    def state_dict(self) -> dict[str, Tensor]:
        return self._module.state_dict()

    def named_children(self) -> list[tuple[str, "_Names"]]:
        children: Iterator[tuple[str, nn.Module]] = iter(()) if self._leaf else self._module.named_children()
        return [(name, _Names(child, self.config, leaf=True)) for name, child in children]
