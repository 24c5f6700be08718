"""Replace a model's modules by those of exact integer arithmetic (docs/exact.md).

use_exact_arithmetic replaces linears, norms, activations and rotary embeddings. It identifies a module by the formula
that it computes (exact_matching). passes.proof.exact later rejects operations that exact arithmetic does not define.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Conv1D, PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.orders.exact import ARITHMETICS, ExactArithmetic
from detcompile.passes.modules.exact_matching import (
    agree,
    float64_copy,
    has_other_forward,
    result_in_float64,
    takes_one_argument,
)
from detcompile.passes.modules.exact_rotary import has_frequencies, rotary_of
from detcompile.passes.modules.quantized_linear import QuantizedLinear, QuantizedStack, replace_module
from detcompile.templates.exact.attention import row_words
from detcompile.templates.ops import ours
from detcompile.torch_internals.modules import with_hooks_of
from detcompile.transformers_internals.experts import takes_implementation

_ROUNDED_SUMS = {  # models in which exact8 and exact8x16 round residual sums to bfloat16, and their layers
    "LlamaForCausalLM": "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "Qwen3ForCausalLM": "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
}
_KV_DIGITS = "_detcompile_kv_digits"  # attribute of a model and its attention modules
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_SIZES = (0.0, 1e-8, 1e-5, 1e-4, 1e-3, 1e-2, 0.3, 1.0, 30.0, 1e4)  # of test rows; an epsilon matters in the small ones
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


class ExactLinear(nn.Module):
    """forward(x [..., K]) -> [..., N], with x and the weight as integers of one or two digits.

    Args:
        dtype: to which a quantized weight is dequantized first.
    """

    digits: Tensor
    scales: Tensor

    def __init__(
        self,
        linear: nn.Linear | Conv1D | QuantizedLinear,
        arithmetic: ExactArithmetic,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.x_digits = arithmetic.activations
        digits, scales = _digits_of(linear, arithmetic.weights, dtype)
        self.out_features: int = digits.shape[1]
        self.in_features: int = digits.shape[2]
        self.register_buffer("digits", digits)
        self.register_buffer("scales", scales)
        self.bias = None if linear.bias is None else _frozen(linear.bias)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [N, K], for code that reads a linear's weight instead of calling it."""
        return dequantized(self.digits, self.scales)

    def keep_features(self, features: Tensor) -> None:
        """Keep only these outputs, in this order."""
        features = features.to(self.digits.device)
        self.digits, self.scales = self.digits[:, features].contiguous(), self.scales[features]
        self.bias = None if self.bias is None else _frozen(self.bias[features])
        self.out_features = len(features)

    def forward(self, x: Tensor) -> Tensor:
        out = ours.exact_linear(x.flatten(0, -2), self.digits, self.scales, self.bias, self.x_digits)
        return out.view(*x.shape[:-1], self.out_features)


class ExactStack(nn.Module):
    """One projection of all experts, [E, N, K], as integers of one or two digits."""

    digits: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, arithmetic: ExactArithmetic) -> None:
        super().__init__()
        self.x_digits = arithmetic.activations
        digits, scales = ours.exact_quantize(weight.detach().float(), arithmetic.weights, True)
        self.register_buffer("digits", digits)
        self.register_buffer("scales", scales)

    @property
    def in_features(self) -> int:
        """K."""
        return self.digits.shape[3]

    def keep_features(self, features: Tensor) -> None:
        """Keep only these outputs of every expert, in this order."""
        features = features.to(self.digits.device)
        self.digits, self.scales = self.digits[:, :, features].contiguous(), self.scales[:, features].contiguous()

    def keep_inputs(self, share: slice) -> None:
        """Keep only this range of K; the scales stay those of the whole K."""
        self.digits = self.digits[..., share].clone(memory_format=torch.contiguous_format)

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply rows by their experts: x [M, K] or [*ids.shape, K], bias [E, N] -> [*ids.shape, N]."""
        return ours.exact_expert_linear(x, ids, self.digits, self.scales, bias, self.x_digits)

    def all_reduced(self, x: Tensor, ids: Tensor, bias: Tensor | None, group: str) -> Tensor:
        """Compute ``forward`` for rows and weights whose K is split over the ranks of a group."""
        return ours.exact_expert_linear_all_reduce(x, ids, self.digits, self.scales, bias, self.x_digits, group)


class ExactNorm(nn.Module):
    """forward(x [..., R]) -> [..., R]: x / rms(x) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = _frozen(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_rms_norm(x, self.weight, self.eps)


class ExactLayerNorm(nn.Module):
    """forward(x [..., R]) -> [..., R]: (x - mean) / deviation * weight + bias."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = _frozen(weight), _frozen(bias), eps

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_layer_norm(x, self.weight, self.bias, self.eps)


class ExactFunction(nn.Module):
    """forward(x) -> the function of each element."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_function(x, self.name)


def use_exact_arithmetic(model: PreTrainedModel, arithmetic: str, max_context: int) -> None:
    """Change a model in place to float32 activations and quantized weights.

    Modules that exact arithmetic does not define stay unchanged; the proof then rejects an operation of theirs.

    Raises:
        UnsupportedModel: rotary tables that exact arithmetic does not define, or a quantized linear whose forward was
            replaced.
    """
    chosen, dtype = ARITHMETICS[arithmetic], model.dtype
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            if has_other_forward(module):
                raise UnsupportedModel(
                    f"{name} is a quantized linear whose forward was replaced: restore its class's forward, or compile"
                    " the model without Numerics.arithmetic"
                )
            _replace(model, name, ExactLinear(module, chosen, dtype))
        elif takes_implementation(module):
            _quantize_experts(module, chosen, dtype)
    nn.Module.float(model)  # PreTrainedModel.float rejects models that were loaded quantized
    setattr(model, _KV_DIGITS, chosen.kv)
    for name, module in list(model.named_modules())[1:]:  # not the model itself, whose class name may contain "Norm"
        plain = type(module).forward in (nn.Linear.forward, Conv1D.forward) and not has_other_forward(module)
        if plain or _is_linear(module):
            _replace(model, name, ExactLinear(module, chosen))
        elif "Norm" in type(module).__name__:
            _replace(model, name, _norm_of(module))
        elif type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations"):
            _replace(model, name, _function_of(module, model.device))
        elif has_frequencies(module):
            replace_module(model, name, rotary_of(model, module, max(2, max_context)))  # the probe runs 2 tokens
    if chosen.bf16_residual and type(model).__name__ in _ROUNDED_SUMS:
        for layer in model.model.layers:
            kind: Any = type(layer)
            if f"{kind.__module__}.{kind.__qualname__}" == _ROUNDED_SUMS[type(model).__name__]:
                layer.__class__ = _with_rounded_sums(kind)


def _replace(model: nn.Module, name: str, module: nn.Module | None) -> None:
    """Replace the submodule of this name and keep its hooks. Do nothing if ``module`` is None."""
    if module is not None:
        replace_module(model, name, with_hooks_of(module, model.get_submodule(name)))


def _digits_of(
    linear: nn.Linear | Conv1D | QuantizedLinear, num_digits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the digits [D, N, K] and scales [N] of a linear's weight.

    A checkpoint's int8 weights with one scale per output channel become the high digits unchanged, except that -128
    becomes -127, the least digit that the kernels take.
    """
    if not isinstance(linear, QuantizedLinear):
        weight = linear.weight.detach().float()
        weight = weight.t().contiguous() if isinstance(linear, Conv1D) else weight
    else:
        given = linear.quantized
        is_plain = given.zeros is None and given.mins is None and linear.order is None
        if given.w.dtype is torch.int8 and is_plain and given.group >= given.k and given.rows == 1:
            high = given.w.clamp(min=-127)
            return torch.stack([high, torch.zeros_like(high)][:num_digits]), given.scales[0].float()
        weight = linear.dequantized(dtype).float()
    digits, scales = ours.exact_quantize(weight, num_digits, True)
    return digits, scales


def dequantized(digits: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [N, K] of digits [D, N, K] and scales [N]."""
    high, *low = digits.float()
    return (high + low[0] * 2**-8 if low else high) * scales[:, None]


def _is_linear(module: nn.Module) -> bool:
    """Return whether a subclass of nn.Linear, such as Falcon's, computes x @ weight.T + bias."""
    if not isinstance(module, nn.Linear) or not takes_one_argument(module):
        return False
    if dict(module.named_parameters()).keys() - {"weight", "bias"} or any(True for _ in module.buffers()):
        return False
    drawn, rows = float64_copy(module), _test_rows(module.in_features, module.weight.device)
    x = rows * rows.new_tensor(_SIZES)[:, None]
    with torch.no_grad():
        for number, parameter in enumerate(drawn.parameters()):
            i = torch.arange(parameter.numel(), device=x.device, dtype=torch.float64)
            parameter.copy_((torch.cos(i * 0.7 + number) + 0.3).view_as(parameter))
        w, b = drawn.weight, drawn.bias
        terms = F.linear(x.abs(), w.abs(), None if b is None else b.abs())
        return agree(result_in_float64(drawn, x), F.linear(x, w, b), terms)


def _test_rows(width: int, device: torch.device) -> Tensor:
    """Return a float64 row of numbers in [-1, 1] for each of _SIZES."""
    return torch.sin(torch.arange(len(_SIZES) * width, device=device, dtype=torch.float64) ** 1.3).view(-1, width)


def _quantize_experts(module: Any, arithmetic: ExactArithmetic, dtype: torch.dtype) -> None:
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        weight = getattr(module, name, None)
        if isinstance(weight, QuantizedStack):
            setattr(module, name, ExactStack(weight.dequantized(dtype), arithmetic))
        elif isinstance(weight, nn.Parameter) and weight.dim() == 3:
            delattr(module, name)
            setattr(module, name, ExactStack(weight.transpose(1, 2) if module.is_transposed else weight, arithmetic))


def _norm_of(module: nn.Module) -> nn.Module | None:
    """Return an exact norm if a module computes its formula, else None."""
    parameters = dict(module.named_parameters())
    eps = next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or weight.dim() != 1 or eps is None or not takes_one_argument(module):
        return None
    if parameters.keys() - {"weight", "bias"} or any(True for _ in module.buffers()):
        return None
    R, drawn = len(weight), float64_copy(module)
    rows = _test_rows(R, weight.device) + 0.4
    rows[:, R // 2] *= R  # an outlier
    x = rows * rows.new_tensor(_SIZES)[:, None]
    with torch.no_grad():
        for number, parameter in enumerate(drawn.parameters()):  # magnitudes from 0.001 to 1000
            i = torch.arange(R, dtype=torch.float64, device=parameter.device)
            parameter.copy_((torch.cos(i * 0.7 + number) + 1.5) * 10 ** (i % 7 - 3))
    w, b, out = drawn.weight.detach(), None if bias is None else drawn.bias.detach(), result_in_float64(drawn, x)
    if agree(out, F.layer_norm(x, (R,), w, b, eps), 1e3):
        return ExactLayerNorm(weight, torch.zeros_like(weight) if bias is None else bias, eps)
    for shift in (0, 1):
        if bias is None and agree(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (w + shift), 0.0):
            return ExactNorm(weight + shift, eps)
    return None


def _function_of(module: nn.Module, device: torch.device) -> nn.Module | None:
    """Return an exact function if a module computes its formula, else None."""
    if not takes_one_argument(module) or any(True for _ in (*module.parameters(), *module.buffers())):
        return None
    far = torch.logspace(-30, 12, 600, dtype=torch.float64, device=device)
    x = torch.cat([torch.linspace(-40, 40, 2001, dtype=torch.float64, device=device), far, -far])
    out = result_in_float64(float64_copy(module), x)
    for name, formula in _FUNCTIONS.items():
        if agree(out, formula(x), x.abs() if name.startswith("gelu") else 0.0):  # x / 2 * (1 + tanh)
            return ExactFunction(name)
    return None


def _frozen(tensor: Tensor) -> nn.Parameter:
    """Return a float32 copy as a parameter without a gradient."""
    return nn.Parameter(tensor.detach().float().clone(), requires_grad=False)


def kv_digits(module: Any) -> int:
    """Return how many digits the keys and values of a model or attention module have; 0 if they are not quantized."""
    digits: int = getattr(module, _KV_DIGITS, 0)
    return digits


def give_kv_digits(model: Any, module: Any) -> None:
    """Give an attention module the number of KV digits that its model has."""
    if kv_digits(model) and isinstance(module, nn.Module):
        setattr(module, _KV_DIGITS, kv_digits(model))


def cached_shape(module: Any, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    """Return the number of KV heads, and the numbers of words of a cached key and of a cached value."""
    digits = kv_digits(module)
    words = [row_words(x.shape[3], digits) if digits else x.shape[3] for x in (key, value)]
    return key.shape[1], words[0], words[1]


@functools.cache  # layers of one class have one structure, so they share a program
def _with_rounded_sums(layer: Any) -> Any:
    return type(f"Exact{layer.__name__}", (layer,), {"forward": _forward})


def _forward(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    """Run a decoder layer whose residual sums are rounded to bfloat16."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
    hidden_states = _rounded(hidden_states + attended)
    return _rounded(hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)))


def _rounded(x: Tensor) -> Tensor:
    return ours.exact_function(x, "bf16")  # not a cast: torch below 2.13 drops a cast to bfloat16 and back
