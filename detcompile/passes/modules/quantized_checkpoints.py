"""Quantized checkpoints, loaded by transformers without the packages that made them.

transformers builds the model and takes the tensors. Our quantizer, registered with transformers, puts `PackedLinear`
modules in place of quantized linears, and turns them into `QuantizedLinear` once they are filled. Everything else that
is quantized (experts, embeddings, the head) reaches transformers dequantized, under the name that an unquantized
checkpoint gives it. Experts may stay quantized instead (quantized_experts.py).
"""

import contextlib
import copy
import json
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.quantized_experts import stack_of, stacks_of
from detcompile.passes.modules.quantized_layouts import LAYOUTS, MODULE_CLASS, mxfp4_values
from detcompile.passes.modules.quantized_linear import QuantizedLinear, replace_module
from detcompile.templates.quantized.weights import QuantizedWeight
from detcompile.transformers_internals.experts import leave_out
from detcompile.weights import SAFETENSORS_DTYPES

METHOD = "detcompile"  # the name of our quantizer in transformers
STACK = re.compile(r"(.*_proj)_(blocks|scales)")  # mxfp4: tensors of a stack of experts


def quantization_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization settings in a checkpoint's config; None for an unquantized checkpoint.

    Raises:
        UnsupportedModel: the method or its variant is not supported.
    """
    stored = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if stored is None:
        return None
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method not in LAYOUTS:
        raise UnsupportedModel(
            f"the checkpoint is quantized by {method!r}, which is not certified (known: {', '.join(LAYOUTS)}): load "
            "an unquantized checkpoint, or quantize it by one of these"
        )
    LAYOUTS[method].check(settings)
    return settings | {"quant_method": method}


def load_quantized(
    path: Path,
    files: Sequence[Path],
    config: PretrainedConfig,
    settings: dict[str, Any],
    dequantize: bool = True,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the causal LM of a local folder on the CPU. Return it, and transformers' report of missing weights.

    Args:
        files: the folder's weights.
        dequantize: False to keep experts quantized.
        options: keywords of from_pretrained, output_loading_info among them.

    Raises:
        UnsupportedModel: a quantized tensor has no place in the model, or its format is not supported.
    """
    layout = LAYOUTS[settings["quant_method"]]
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=options["trust_remote_code"])
    quantized = {
        name: tensors
        for name, tensors in _by_module(_tensors(files)).items()
        if any(mark in tensors for mark in layout.marks)
    }
    if files and not quantized:
        raise UnsupportedModel(
            f"the checkpoint of {type(empty).__name__} names a quantization and holds no quantized linear (none has"
            f" {' or '.join(layout.marks)}): if it is a plain one, remove quantization_config from its config.json"
        )
    head = empty.get_output_embeddings()
    linears = {name for name, module in empty.named_modules() if isinstance(module, nn.Linear) and module is not head}
    stacks = {} if dequantize else stacks_of(quantized, empty)
    stacked = [name for projections in stacks.values() for names in projections.values() for name in names]
    expanded = [name for name in quantized if name not in linears and name not in stacked]
    reading = {"quant_method": METHOD, "checkpoint": settings, "files": [str(file) for file in files]}
    reading["stacks"] = {place: list(projections) for place, projections in stacks.items()}
    if not expanded and not stacked:
        config.quantization_config = reading
        model, loading_info = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
        _keep_settings(model, settings)
        return model, loading_info
    config = empty.config
    if stacked or len(expanded) < len(quantized):
        config.quantization_config = reading
    else:
        del config.quantization_config  # no module of the model is quantized
    dtype = options["dtype"] if isinstance(options["dtype"], torch.dtype) else empty.dtype
    with contextlib.ExitStack() as opened:
        state_dict = _opened(files, opened)
        modules = dict(empty.named_modules())
        kept = {name: _taken(name, quantized[name], state_dict) for name in stacked}
        for name in expanded:
            kind = {MODULE_CLASS: type(modules[name]).__name__} if name in modules else {}
            state_dict |= _expanded(name, _taken(name, quantized[name], state_dict), settings | kind, dtype)
        model, loading_info = type(empty).from_pretrained(
            None, config=config, state_dict=state_dict, **options | {"dtype": dtype}
        )
        for place, projections in stacks.items():
            experts: Any = model.get_submodule(place)
            for projection, names in projections.items():
                parts = {name: _read(name, kept[name]) for name in names}
                count, *sides = getattr(empty.get_submodule(place), projection).shape
                n, k = reversed(sides) if experts.is_transposed else sides
                stack = stack_of(f"{place}.{projection}", parts, settings, (count, n, k))
                delattr(experts, projection)
                setattr(experts, projection, stack)
    unknown = {key.removesuffix(".weight") for key in loading_info["unexpected_keys"]} & set(expanded)
    if unknown:
        raise UnsupportedModel(
            f"{min(unknown)}: quantized, and {type(model).__name__} has no place for it; load another checkpoint"
        )
    if hasattr(model.config, "quantization_config"):
        _keep_settings(model, settings)
    model.config.name_or_path = model.name_or_path = str(path)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model, loading_info


class _Later:
    """A tensor of a state dict that is computed when transformers reads it, by slices as in safetensors files."""

    def __init__(self, dtype: torch.dtype, compute: Callable[[], torch.Tensor]) -> None:
        self.dtype, self.compute = dtype, compute

    def get_dtype(self) -> str:
        return next(name for name, dtype in SAFETENSORS_DTYPES.items() if dtype is self.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.compute()[index]


def _opened(files: Iterable[Path], opened: contextlib.ExitStack) -> dict[str, Any]:
    """Return the tensors of safetensors files as slices that are read later; ``opened`` closes the files."""
    slices: dict[str, Any] = {}
    for file in files:
        content = opened.enter_context(safe_open(file, framework="pt"))
        slices |= {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 - no dict
    return slices


def _taken(name: str, tensors: Mapping[str, str], state_dict: dict[str, Any]) -> "_OfLinear":
    """Take a module's quantized tensors out of a state dict: slices by their names in the module."""
    return _OfLinear(name, {leaf: state_dict.pop(key) for leaf, key in tensors.items() if leaf != "bias"})


def _read(name: str, slices: Mapping[str, Any]) -> "_OfLinear":
    return _OfLinear(name, {leaf: part[...] for leaf, part in slices.items()})


def _expanded(name: str, slices: "_OfLinear", settings: dict[str, Any], dtype: torch.dtype) -> dict[str, _Later]:
    """Return a module's weight, dequantized when it is read."""
    if "blocks" in slices:
        return {name: _Later(dtype, lambda: mxfp4_values(name, slices["blocks"][...], slices["scales"][...]).to(dtype))}

    def compute() -> torch.Tensor:
        weight, order = LAYOUTS[settings["quant_method"]].read(name, _read(name, slices), settings)
        return QuantizedLinear(weight, None, order).dequantized(dtype)

    return {f"{name}.weight": _Later(dtype, compute)}


class PackedLinear(nn.Module):
    """Holds a checkpoint's tensors for one linear's weight until all are read."""

    def __init__(self, linear: nn.Linear, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.has_bias = linear.bias is not None
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class _OfLinear(dict[str, Any]):
    """A linear's tensors by their names in the checkpoint. Reading a missing one raises UnsupportedModel."""

    def __init__(self, linear: str, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.linear = linear

    def __missing__(self, name: str) -> Any:
        raise UnsupportedModel(
            f"{self.linear}: the checkpoint has {', '.join(self)} and no {name}, which this quantization needs: fetch"
            " it again, or load another checkpoint"
        )


@register_quantization_config(METHOD)
class CheckpointConfig(QuantizationConfigMixin):
    """Carries the checkpoint's quantization_config, the paths of its files, and experts that stay quantized."""

    def __init__(
        self, checkpoint: dict[str, Any], files: list[str], stacks: dict[str, list[str]], **kwargs: Any
    ) -> None:
        self.quant_method = METHOD
        self.checkpoint, self.files, self.stacks = checkpoint, files, stacks


@register_quantizer(METHOD)
class CheckpointReader(HfQuantizer):
    """Puts PackedLinear in place of quantized linears before transformers reads them, and QuantizedLinear after."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str], **kwargs: Any
    ) -> None:
        layout = LAYOUTS[self.quantization_config.checkpoint["quant_method"]]
        tensors = dict(_tensors(self.quantization_config.files))
        modules, head = dict(model.named_modules()), model.get_output_embeddings()
        for name, parts in _by_module(tensors.items()).items():
            linear = modules.get(name)
            if isinstance(linear, nn.Linear) and linear is not head and any(mark in parts for mark in layout.marks):
                packed = PackedLinear(linear, {leaf: tensors[key] for leaf, key in parts.items()})
                replace_module(model, name, packed)
        for place, projections in self.quantization_config.stacks.items():
            leave_out(model.get_submodule(place), projections)

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


def _keep_settings(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Keep the checkpoint's settings in the config, which fingerprints cover, without the paths of its files."""
    model.config.quantization_config = {"quant_method": METHOD, "checkpoint": settings}


def _require_sizes(name: str, linear: PackedLinear, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    """Reject tensors whose size differs from that of the linear in the model's config.

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


def _by_module(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, dict[str, str]]:
    """Return the names of tensors by module and by their names in it. A stack of mxfp4 counts as a module."""
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for name, _ in tensors:
        stack = STACK.fullmatch(name)
        module, leaf = stack.groups() if stack else name.rpartition(".")[::2]
        modules[module][leaf] = name
    return modules


def _tensors(files: Iterable[str | Path]) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield names of a checkpoint's tensors, each with a tensor of its shape and dtype that takes no memory.

    Raises:
        UnsupportedModel: the file is not in safetensors format, or no layout has a tensor's dtype.
    """
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise UnsupportedModel(f"{file}: a quantized checkpoint is read from safetensors files: convert it to them")
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in SAFETENSORS_DTYPES:
                known = ", ".join(SAFETENSORS_DTYPES)
                raise UnsupportedModel(
                    f"{name} in {file} is {entry['dtype']}, which is not read (known: {known}): load an unquantized"
                    " checkpoint"
                )
            yield name, torch.empty(entry["shape"], dtype=SAFETENSORS_DTYPES[entry["dtype"]], device="meta")
