"""Rotary tables of exact integer arithmetic (docs/exact.md) in place of a model's rotary embeddings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.exact_matching import agree, has_other_forward, result_in_float64
from detcompile.templates.exact.rope import ROPE_TYPES, rope_tables
from detcompile.torch_internals.modules import hooks_of

_FREQUENCIES = "inv_freq"  # a buffer; some models put a layer type before the name
_FLOAT32_ERROR = 2e-5  # relative; transformers computes frequencies in float32


class ExactRotary(nn.Module):
    """forward(x, position_ids [B, T], layer_type) -> cos and sin [B, T, width], from tables by layer type.

    If the model's tables are complex, the result is [B, T, width, 2], as in passes.adapters.modules.
    """

    def __init__(self, tables: Mapping[str | None, tuple[Tensor, Tensor]], config: Any, is_complex: bool) -> None:
        super().__init__()
        self.config, self.layer_types = config, list(tables)  # some models read these
        self.is_complex = is_complex
        for layer_type, (cos, sin) in tables.items():
            prefix = _prefix(layer_type)
            self.register_buffer(f"{prefix}cos", cos)
            self.register_buffer(f"{prefix}sin", sin)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        if position_ids.dim() != 2:
            raise UnsupportedModel(
                "Numerics.arithmetic needs position_ids [batch, tokens], and those of"
                f" {type(self.config).__name__} have {position_ids.dim()} dimensions. Compile the model without"
                " Numerics.arithmetic"
            )
        tables = (getattr(self, f"{_prefix(layer_type)}{name}") for name in ("cos", "sin"))
        cos, sin = (F.embedding(position_ids, table) for table in tables)
        return torch.stack([cos, sin], -1) if self.is_complex else (cos, sin)


def has_frequencies(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding."""
    return bool(_layer_types(module))


def rotary_of(model: PreTrainedModel, module: Any, length: int) -> nn.Module:
    """Return an exact replacement of a rotary embedding, for positions below ``length``.

    Raises:
        UnsupportedModel: exact arithmetic does not define its tables.
    """
    config = getattr(module, "config", None) or model.config
    tables, is_complex = {}, False
    for layer_type in _layer_types(module):
        parameters = getattr(config, "rope_parameters", None) or {}
        parameters = parameters if layer_type is None else parameters.get(layer_type) or {}
        kind = parameters.get("rope_type", "default")
        where = f"{type(model).__name__}: Numerics.arithmetic does not define the tables of {type(module).__name__}"
        if kind not in ROPE_TYPES:
            raise UnsupportedModel(
                f"{where} with the rope_type {kind!r}. It defines {', '.join(ROPE_TYPES)}. Compile the model without"
                " Numerics.arithmetic"
            )
        changed = has_other_forward(module) or hooks_of(module)
        table = None if changed else _tables(module, layer_type, parameters, config, length)
        if table is None:
            raise UnsupportedModel(
                f"{where}: they are not cos and sin of positions times the frequencies of its rope_type {kind!r}. If"
                " the model was cast to 16 bits, load it with dtype= instead, which keeps its frequencies in float32;"
                " otherwise compile it without Numerics.arithmetic"
            )
        cos, sin, is_complex = table
        tables[layer_type] = cos, sin
    return ExactRotary(tables, config, is_complex)


def _layer_types(module: nn.Module) -> list[str | None]:
    """Return the layer types for which a rotary embedding has frequencies; None stands for all layers."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith(_FREQUENCIES)]
    prefixes = [name.removesuffix(_FREQUENCIES) for name in names if not name.endswith(f"original_{_FREQUENCIES}")]
    return [prefix.removesuffix("_") or None for prefix in prefixes]


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _tables(
    module: Any, layer_type: str | None, parameters: Mapping[str, Any], config: Any, length: int
) -> tuple[Tensor, Tensor, bool] | None:
    """Return cos and sin in the module's layout, and whether its tables are complex; None if it computes others."""
    name, scaling_name = f"{_prefix(layer_type)}{_FREQUENCIES}", f"{_prefix(layer_type)}attention_scaling"
    given, double = getattr(module, name), result_in_float64(type(module), config)
    if parameters.get("rope_theta") is None or not isinstance(double, nn.Module):
        return None
    frequencies, scaling = ROPE_TYPES[parameters.get("rope_type", "default")](parameters, 2 * len(given), config)
    wide = torch.tensor(frequencies, dtype=torch.float64, device=given.device)
    double = double.to(given.device)
    if not agree(getattr(double, name, None), wide, 0.0) or not ((given - wide).abs() <= _FLOAT32_ERROR * wide).all():
        return None
    if not math.isclose(getattr(module, scaling_name, 1.0), scaling, rel_tol=1e-12):
        return None
    positions = torch.tensor([sorted({*range(min(length, 16)), length // 2, length - 1})], device=given.device)
    arguments = (positions,) if layer_type is None else (positions, layer_type)
    result = result_in_float64(double, torch.zeros(1, 1, 1, dtype=torch.float64, device=given.device), *arguments)
    is_complex = isinstance(result, Tensor) and result.is_complex()
    result = (result.real, result.imag) if is_complex else result
    if not isinstance(result, tuple) or len(result) != 2:
        return None
    angles = positions[..., None] * wide
    for layout in _LAYOUTS:
        expected = [layout(table) * scaling for table in (angles.cos(), angles.sin())]
        if all(agree(actual, table, length) for actual, table in zip(result, expected, strict=True)):
            cos, sin = (layout(table).to(given.device) for table in rope_tables(length, frequencies, scaling))
            return cos, sin, is_complex
    return None


_LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda table: torch.cat([table, table], -1),
    lambda table: table.repeat_interleave(2, -1),
    lambda table: table,
)
