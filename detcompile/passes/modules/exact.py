"""Modules of a Llama or Qwen3 decoder in exact integer arithmetic (docs/exact.md).

use_exact_arithmetic changes the modules; passes.proof.exact then refuses a graph with any other arithmetic.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.orders.exact import ARITHMETICS, ExactArithmetic
from detcompile.passes.modules.quantized_linear import replace_module
from detcompile.templates.exact.attention import row_words
from detcompile.templates.exact.rope import rope_tables
from detcompile.templates.ops import ours

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_KV_DIGITS = "_detcompile_kv_digits"  # attribute of an attention module


class ExactLinear(nn.Module):
    """forward(x [..., K]) -> [..., N]: x and the weight as integers of one or two digits."""

    digits: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, arithmetic: ExactArithmetic) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.x_digits = arithmetic.activations
        digits, scales = ours.exact_quantize(linear.weight.detach().float(), arithmetic.weights, True)
        self.register_buffer("digits", digits)
        self.register_buffer("scales", scales)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = ours.exact_linear(x.flatten(0, -2), self.digits, self.scales, self.bias, self.x_digits)
        return out.view(*x.shape[:-1], self.out_features)


class ExactNorm(nn.Module):
    """forward(x [..., R]) -> [..., R]: x / rms(x) * weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().float(), requires_grad=False)
        self.eps = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_rms_norm(x, self.weight, self.eps)


class ExactFunction(nn.Module):
    """forward(x) -> the function of each element."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ours.exact_function(x, self.name)


class ExactRotary(nn.Module):
    """forward(x, position_ids [B, T]) -> cos and sin [B, T, D], from tables."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, head_dim: int, theta: float, device: torch.device) -> None:
        super().__init__()
        for name, table in zip(("cos", "sin"), rope_tables(length, head_dim, theta)):
            self.register_buffer(name, torch.cat([table, table], -1).to(device))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return F.embedding(position_ids, self.cos), F.embedding(position_ids, self.sin)


def use_exact_arithmetic(model: PreTrainedModel, arithmetic: str, max_context: int) -> None:
    """Change the model in place, to float32 activations and quantised weights.

    Raises:
        UnsupportedModel: exact arithmetic does not define a part of the model; the message names it.
    """
    chosen, config = ARITHMETICS[arithmetic], model.config
    rope = getattr(config, "rope_parameters", None) or {}
    for what, value, defined in (
        ("architecture", type(model).__name__, _ARCHITECTURES),
        ("hidden_act", getattr(config, "hidden_act", None), ("silu",)),
        ("rope_type", rope.get("rope_type"), ("default",)),
    ):
        if value not in defined:
            raise UnsupportedModel(
                f"{type(model).__name__}: Numerics.arithmetic={arithmetic!r} does not define the {what} {value!r}, only"
                f" {', '.join(defined)}. Compile it without Numerics.arithmetic"
            )
    model.float()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            replace_module(model, name, ExactLinear(module, chosen))
        elif hasattr(module, "variance_epsilon"):
            replace_module(model, name, ExactNorm(module))
        elif name.endswith("rotary_emb"):
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            replace_module(model, name, ExactRotary(max_context, head_dim, rope["rope_theta"], model.device))
        elif name.endswith("act_fn"):
            replace_module(model, name, ExactFunction("silu"))
        elif isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, _KV_DIGITS, chosen.kv)
    if chosen.bf16_residual:
        for layer in model.model.layers:
            kind: Any = type(layer)
            layer.__class__ = _with_rounded_sums(kind)


def kv_digits(module: Any) -> int:
    """Return the digits of an attention module's keys and values; 0 if they are not quantised."""
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
