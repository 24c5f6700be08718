"""Modules in exact integer arithmetic (docs/exact.md).

use_exact_arithmetic replaces linears, norms, functions and rotary tables by those of the definition. It identifies
norms, functions and tables by their results on a few rows. passes.proof.exact then rejects any other arithmetic.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Conv1D, PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.orders.exact import ARITHMETICS, ExactArithmetic
from detcompile.passes.modules.quantized_linear import replace_module
from detcompile.templates.exact.attention import row_words
from detcompile.templates.exact.rope import rope_tables
from detcompile.templates.ops import ours

_ROUNDED_SUMS = ("LlamaForCausalLM", "Qwen3ForCausalLM")  # with bfloat16 residual sums, if the variant has them
_KV_DIGITS = "_detcompile_kv_digits"  # attribute of an attention module
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_PROBED_POSITIONS = 16


class ExactLinear(nn.Module):
    """forward(x [..., K]) -> [..., N]: x and the weight as integers of one or two digits."""

    digits: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear | Conv1D, arithmetic: ExactArithmetic) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        weight = weight.t().contiguous() if isinstance(linear, Conv1D) else weight
        self.out_features = len(weight)
        self.x_digits = arithmetic.activations
        digits, scales = ours.exact_quantize(weight, arithmetic.weights, True)
        self.register_buffer("digits", digits)
        self.register_buffer("scales", scales)
        self.bias = None if linear.bias is None else _fixed(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = ours.exact_linear(x.flatten(0, -2), self.digits, self.scales, self.bias, self.x_digits)
        return out.view(*x.shape[:-1], self.out_features)


class ExactNorm(nn.Module):
    """forward(x [..., R]) -> [..., R]: x / rms(x) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = _fixed(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_rms_norm(x, self.weight, self.eps)


class ExactLayerNorm(nn.Module):
    """forward(x [..., R]) -> [..., R]: (x - mean) / deviation * weight + bias."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = _fixed(weight), _fixed(bias), eps

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_layer_norm(x, self.weight, self.bias, self.eps)


class ExactFunction(nn.Module):
    """forward(x) -> the function of each element."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_function(x, self.name)


class ExactRotary(nn.Module):
    """forward(x, position_ids [B, T]) -> cos and sin [B, T, width], from tables."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return F.embedding(position_ids, self.cos), F.embedding(position_ids, self.sin)


def use_exact_arithmetic(model: PreTrainedModel, arithmetic: str, max_context: int) -> None:
    """Change the model in place, to float32 activations and quantized weights.

    Modules outside the definition stay as they are; the proof then rejects the graph by the name of an operation.

    Raises:
        UnsupportedModel: the definition has no such rotary tables.
    """
    chosen = ARITHMETICS[arithmetic]
    model.float()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | Conv1D):
            replace_module(model, name, ExactLinear(module, chosen))
        elif "Norm" in type(module).__name__:
            replace_module(model, name, _norm_of(module) or module)
        elif type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations"):
            replace_module(model, name, _function_of(module, model.device) or module)
        elif isinstance(getattr(module, "inv_freq", None), Tensor):
            replace_module(model, name, _rotary_of(model, module, max_context))
        elif isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _KV_DIGITS, chosen.kv)
    if chosen.bf16_residual and type(model).__name__ in _ROUNDED_SUMS:
        for layer in model.model.layers:
            kind: Any = type(layer)
            layer.__class__ = _with_rounded_sums(kind)


@torch.no_grad()
def _norm_of(module: nn.Module) -> nn.Module | None:
    """Return the exact norm with a module's results; None if there is none."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    R = len(weight)
    x = torch.sin(torch.arange(1, 4 * R + 1, device=weight.device, dtype=torch.float32)).view(4, R) * 3 + 1
    out = _result_of(module, x)
    zeros = torch.zeros_like(weight)
    layer_norm = F.layer_norm(x, (R,), weight, bias, eps)
    if _close(out, layer_norm):
        return ExactLayerNorm(weight, zeros if bias is None else bias, eps)
    for scale in (weight, weight + 1):
        if bias is None and _close(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale):
            return ExactNorm(scale, eps)
    return None


@torch.no_grad()
def _function_of(module: nn.Module, device: torch.device) -> nn.Module | None:
    """Return the exact function with a module's results; None if there is none."""
    x = torch.linspace(-6, 6, 200, device=device)
    out = _result_of(module, x)
    gelu_tanh = F.gelu(x, approximate="tanh")
    for name, values in (("silu", F.silu(x)), ("gelu_tanh", gelu_tanh), ("sigmoid", torch.sigmoid(x))):
        if _close(out, values):
            return ExactFunction(name)
    return None


@torch.no_grad()
def _rotary_of(model: PreTrainedModel, module: Any, length: int) -> nn.Module:
    """Return exact tables with the results of a rotary embedding.

    Raises:
        UnsupportedModel: the definition has no such tables.
    """
    parameters = getattr(model.config, "rope_parameters", None) or {}
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    if kind in _ROPE_TYPES and theta is not None:
        device = module.inv_freq.device
        change = functools.partial(_ROPE_TYPES[kind], parameters)
        cos, sin = (table.to(device) for table in rope_tables(length, 2 * len(module.inv_freq), theta, change))
        positions = torch.arange(min(length, _PROBED_POSITIONS), device=device)[None]
        given = _result_of(module, torch.zeros(1, 1, 1, device=device), positions)
        for layout in _ROPE_LAYOUTS:
            exact = ExactRotary(layout(cos), layout(sin))
            expected = exact(positions, positions)
            if isinstance(given, tuple) and all(_close(a, b) for a, b in zip(given, expected, strict=True)):
                return exact
    raise UnsupportedModel(
        f"{type(model).__name__}: Numerics.arithmetic does not define the tables of {type(module).__name__} with the"
        f" rope_type {kind!r}, only of {', '.join(_ROPE_TYPES)}. Compile it without Numerics.arithmetic"
    )


def _llama3(parameters: Mapping[str, Any], frequency: float) -> float:
    factor, length = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    waves = length / (2 * math.pi / frequency)
    if waves > high:
        return frequency
    smooth = max(0.0, (waves - low) / (high - low))
    return (1 - smooth) * (frequency / factor) + smooth * frequency


_ROPE_TYPES: Mapping[str, Callable[[Mapping[str, Any], float], float]] = {  # float64 frequencies
    "default": lambda parameters, frequency: frequency,
    "linear": lambda parameters, frequency: frequency / parameters["factor"],
    "llama3": _llama3,
}
_ROPE_LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda table: torch.cat([table, table], -1),
    lambda table: table.repeat_interleave(2, -1),
    lambda table: table,
)


def _result_of(module: nn.Module, *given: Tensor) -> Any:
    """Return what a module computes; None if it takes other arguments."""
    try:
        return module(*given)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None


def _close(actual: Any, expected: Tensor) -> bool:
    """Return whether two results agree to about four digits, as those of other float32 orders do."""
    return (
        isinstance(actual, Tensor)
        and actual.shape == expected.shape
        and bool(torch.allclose(actual.float(), expected, rtol=1e-4, atol=2e-5))
    )


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().float().clone(), requires_grad=False)


def kv_digits(module: Any) -> int:
    """Return the digits of an attention module's keys and values; 0 if they are not quantized."""
    digits: int = getattr(module, _KV_DIGITS, 0)
    return digits


def cached_shape(module: Any, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    """Return extents of a cached key and value: KV heads, and words of a key and a value."""
    digits = kv_digits(module)
    words = [row_words(x.shape[3], digits) if digits else x.shape[3] for x in (key, value)]
    return key.shape[1], words[0], words[1]


@functools.cache  # one class, so that layers have one structure
def _with_rounded_sums(layer: Any) -> Any:
    return type(f"Exact{layer.__name__}", (layer,), {"forward": _forward})


def _forward(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    """Run a decoder layer whose residual sums are rounded to bfloat16."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
    hidden_states = _rounded(hidden_states + attended)
    return _rounded(hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)))


def _rounded(x: Tensor) -> Tensor:
    return ours.exact_function(x, "bf16")  # torch below 2.13 drops a cast to bfloat16 and back
