"""Quantised checkpoints, loaded by transformers without the packages that made them.

transformers builds the model and reads the files. Our quantizer, registered with transformers, puts `PackedLinear`
modules in place of quantised linears, and turns them into `QuantizedLinear` once they are filled.
"""

import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.quantized_layouts import LAYOUTS
from detcompile.passes.modules.quantized_linear import QuantizedLinear, replace_module
from detcompile.templates.quantized.weights import QuantizedWeight
from detcompile.weights import SAFETENSORS_DTYPES

METHOD = "detcompile"  # the name of our quantizer in transformers


def quantization_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """What the checkpoint's config says about its quantisation; None of a plain one.

    Raises:
        UnsupportedModel: a method, or a variant of one, that is not read; the message names it and what to do.
    """
    stored = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if stored is None:
        return None
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method not in LAYOUTS:
        raise UnsupportedModel(
            f"the checkpoint is quantised by {method!r}, which is not certified (read are {', '.join(LAYOUTS)}): load "
            "an unquantised checkpoint, or quantise it by one of these"
        )
    LAYOUTS[method].check(settings)
    return settings | {"quant_method": method}


def load_quantized(
    path: Path, config: PretrainedConfig, settings: dict[str, Any], **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The causal LM of a local folder, its quantised linears as QuantizedLinear, on the CPU; and what was not found.

    Args:
        options: keywords of from_pretrained, output_loading_info among them.

    Raises:
        UnsupportedModel: the checkpoint quantises something other than linears, or in a way that is not read.
    """
    config.quantization_config = {"quant_method": METHOD, "checkpoint": settings}
    model, loading_info = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    return model, loading_info


class PackedLinear(nn.Module):
    """The tensors that a checkpoint has in the place of a linear's weight, until all are read."""

    def __init__(self, linear: nn.Linear, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.has_bias = linear.bias is not None
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class _OfLinear(dict[str, torch.Tensor]):
    """A linear's tensors by their names in the checkpoint; one that is asked for in vain is an error that says so."""

    def __init__(self, linear: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.linear = linear

    def __missing__(self, name: str) -> torch.Tensor:
        raise UnsupportedModel(
            f"{self.linear}: the checkpoint has {', '.join(self)} and no {name}, which this quantisation needs: fetch"
            " it again, or load another checkpoint"
        )


@register_quantization_config(METHOD)
class CheckpointConfig(QuantizationConfigMixin):
    """Carries the checkpoint's quantization_config."""

    def __init__(self, checkpoint: dict[str, Any], **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.checkpoint = checkpoint


@register_quantizer(METHOD)
class CheckpointReader(HfQuantizer):
    """Makes room for quantised linears before transformers reads them, and QuantizedLinear of them afterwards."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str], **kwargs: Any
    ) -> None:
        layout = LAYOUTS[self.quantization_config.checkpoint["quant_method"]]
        packed: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in _tensors(checkpoint_files):
            module, _, leaf = name.rpartition(".")
            packed[module][leaf] = tensor
        quantized = {name: tensors for name, tensors in packed.items() if any(mark in tensors for mark in layout.marks)}
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if not quantized:
            raise UnsupportedModel(
                f"the checkpoint of {type(model).__name__} names a quantisation and holds no quantised linear (none has"
                f" {' or '.join(layout.marks)}): if it is a plain one, remove quantization_config from its config.json"
            )
        unknown = next((name for name in quantized if name not in linears), None)
        if unknown is not None:
            raise UnsupportedModel(
                f"{unknown}: quantised, and no linear of {type(model).__name__} (experts?); "
                "load a checkpoint in which nothing else is quantised"
            )
        for name, tensors in quantized.items():
            replace_module(model, name, PackedLinear(linears[name], tensors))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        settings = self.quantization_config.checkpoint
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                tensors = _OfLinear(name, {leaf: parameter.detach() for leaf, parameter in module.named_parameters()})
                weight, order = LAYOUTS[settings["quant_method"]].read(name, tensors, settings)
                bias = tensors["bias"].to(model.dtype) if module.has_bias or "bias" in tensors else None
                _require_sizes(name, module, weight, bias)
                replace_module(model, name, QuantizedLinear(weight, bias, order))

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _require_sizes(name: str, linear: PackedLinear, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    """Reject tensors that are not of the size that the model's config gives their linear.

    Raises:
        UnsupportedModel: naming the linear, the part and both sizes.
    """
    n, k = linear.out_features, linear.in_features
    groups = (-(-k // weight.group), -(-n // weight.rows))
    sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    sizes["weight"] = ((len(weight.w), weight.k), (n, k))
    sizes["scales"] = (tuple(weight.scales.shape), groups)
    if weight.zeros is not None:
        sizes["zeros"] = (tuple(weight.zeros.shape), groups)
    if weight.mins is not None:
        sizes["mins"] = (tuple(weight.mins.shape), groups)
    if bias is not None:
        sizes["bias"] = (tuple(bias.shape), (n,))
    for part, (size, expected) in sizes.items():
        if size != expected:
            raise UnsupportedModel(
                f"{name}: the checkpoint has {part} of {size}, and the model's linear needs {expected}: fetch the"
                " checkpoint again, or load another one"
            )


def _tensors(files: Iterable[str]) -> Iterable[tuple[str, torch.Tensor]]:
    """Names of a checkpoint's tensors, and tensors of their shapes and dtypes without memory.

    Raises:
        UnsupportedModel: a file of another format, or a dtype that no layout has.
    """
    for file in files:
        if not file.endswith(".safetensors"):
            raise UnsupportedModel(f"{file}: a quantised checkpoint is read from safetensors files: convert it to them")
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in SAFETENSORS_DTYPES:
                known = ", ".join(SAFETENSORS_DTYPES)
                raise UnsupportedModel(
                    f"{name} in {file} is {entry['dtype']}, which is not read (known: {known}): load an unquantised"
                    " checkpoint"
                )
            yield name, torch.empty(entry["shape"], dtype=SAFETENSORS_DTYPES[entry["dtype"]], device="meta")
