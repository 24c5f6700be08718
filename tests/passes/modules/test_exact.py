"""Exact arithmetic replaces modules that compute a formula of the definition, and no others."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from detcompile.errors import UnsupportedModel
from detcompile.orders.exact import ARITHMETICS
from detcompile.passes.modules.exact import (
    ExactFunction,
    ExactLayerNorm,
    ExactLinear,
    ExactNorm,
    _function_of,
    _is_linear,
    _norm_of,
    use_exact_arithmetic,
)
from detcompile.passes.modules.exact_rotary import rotary_of
from detcompile.passes.modules.quantized_linear import QuantizedLinear
from detcompile.templates.quantized.weights import QuantizedWeight
from tests.model_cases import random_model


class Norm(nn.Module):
    """A norm whose step is given, with an eps of 1e-6."""

    def __init__(self, step: Any, **buffers: Tensor) -> None:
        super().__init__()
        self.weight, self.eps, self.step = nn.Parameter(torch.ones(24)), 1e-6, step

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.step(wide, self.weight, self.eps).to(x.dtype)


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


NORMS = {
    "llama": (LlamaRMSNorm(24, eps=1e-5), ExactNorm),
    "torch": (nn.RMSNorm(24, eps=1e-6), ExactNorm),
    "one plus weight": (GemmaRMSNorm(24), ExactNorm),
    "a large eps": (LlamaRMSNorm(24, eps=0.1), ExactNorm),
    "layer norm": (nn.LayerNorm(24), ExactLayerNorm),
    "layer norm without bias": (nn.LayerNorm(24, bias=False), ExactLayerNorm),
    "written out": (Norm(rms), ExactNorm),
    "a quotient": (Norm(lambda x, w, eps: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w), ExactNorm),
}
OTHER_NORMS = {
    "no eps": Norm(lambda x, w, eps: rms(x, w, 0.0).nan_to_num()),
    "another eps": Norm(lambda x, w, eps: rms(x, w, 1.001e-6)),
    "eps outside": Norm(lambda x, w, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w),
    "clamped": Norm(lambda x, w, eps: rms(x, w, eps).clamp(-100, 100)),
    "scaled by 1 + 1e-7": Norm(lambda x, w, eps: rms(x, w, eps) * (1 + 1e-7)),
    "no weight": Norm(lambda x, w, eps: rms(x, torch.ones(24), eps)),
    "weight twice": Norm(lambda x, w, eps: rms(x, w * w, eps)),
    "nearly no mean": Norm(lambda x, w, eps: rms(x - 1e-6 * x.mean(-1, keepdim=True), w, eps)),
    "a sample's variance": Norm(lambda x, w, eps: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) * w),
    "a gate": Gated(rms),
}


@pytest.mark.parametrize(("module", "kind"), NORMS.values(), ids=NORMS)
def test_norm_is_identified(module: nn.Module, kind: type) -> None:
    assert type(_norm_of(module)) is kind


@pytest.mark.parametrize("module", OTHER_NORMS.values(), ids=OTHER_NORMS)
def test_norm_that_differs_slightly_is_not_identified(module: nn.Module) -> None:
    assert _norm_of(module) is None


class Function(nn.Module):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


FUNCTIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "sigmoid": "sigmoid",
}
OTHER_FUNCTIONS = {
    **{name: ACT2FN[name] for name in ("quick_gelu", "gelu_10", "mish", "hardswish", "relu6", "leaky_relu")},
    "silu of 1 + 1e-7": Function(lambda x: nn.functional.silu(x) * (1 + 1e-7)),
    "silu, clipped far out": Function(lambda x: nn.functional.silu(x).clamp(max=1e6)),
    "silu, zero far out": Function(lambda x: torch.where(x < -20, 0.0, nn.functional.silu(x))),
    "silu of a slope": Function(lambda x: x * torch.sigmoid(1.0000001 * x)),
    "silu near zero": Function(lambda x: torch.where(x.abs() < 1e-6, 0.0, nn.functional.silu(x))),
    "sigmoid with a floor": Function(lambda x: torch.sigmoid(x).clamp(min=1e-15)),
}


@pytest.mark.parametrize(("name", "function"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_function_is_identified(name: str, function: str) -> None:
    module = _function_of(ACT2FN[name], torch.device("cpu"))
    assert isinstance(module, ExactFunction) and module.name == function


@pytest.mark.parametrize("module", OTHER_FUNCTIONS.values(), ids=OTHER_FUNCTIONS)
def test_function_that_differs_slightly_is_not_identified(module: nn.Module) -> None:
    assert _function_of(module, torch.device("cpu")) is None


class Router(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


def test_subclass_of_linear_is_not_replaced() -> None:
    model: Any = random_model("llama", torch.float32)
    model.model.layers[0].mlp.gate_proj = Router(80, 176)
    use_exact_arithmetic(model, "exact16", 64)
    assert type(model.model.layers[0].mlp.gate_proj) is Router
    assert type(model.model.layers[1].mlp.gate_proj) is ExactLinear


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-7)


class Biased(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias * 1.0000001


@pytest.mark.parametrize("bias", [True, False])
def test_linear_written_out_is_identified(bias: bool) -> None:
    assert _is_linear(FalconLinear(24, 40, bias=bias))
    assert not any(_is_linear(kind(24, 40)) for kind in (Router, Scaled, Biased))


@pytest.mark.parametrize("arithmetic", ["exact8", "exact16"])
def test_weight_of_a_linear_can_be_read(arithmetic: str) -> None:
    linear = nn.Linear(80, 176)
    error = (ExactLinear(linear, ARITHMETICS[arithmetic]).weight - linear.weight).abs().max()
    assert error < linear.weight.abs().max() / (200 if arithmetic == "exact8" else 60000)


@pytest.mark.parametrize("arithmetic", ["exact8", "exact16"])
def test_int8_weights_of_a_checkpoint_are_the_digits(arithmetic: str) -> None:
    given = torch.arange(-128, 128).view(4, 64).to(torch.int8)
    scales = torch.tensor([[0.5, 0.25, 2.0, 3.0]], dtype=torch.bfloat16)
    linear = ExactLinear(
        QuantizedLinear(QuantizedWeight(given, scales, None, None, 64, 64, 1), None), ARITHMETICS[arithmetic]
    )
    assert torch.equal(linear.digits[0], given.clamp(min=-127)) and torch.equal(linear.scales, scales[0].float())
    assert not linear.digits[1:].any()
    two_groups = QuantizedWeight(given, scales.repeat(2, 1), None, None, 64, 32, 1)  # are quantized again
    quantized = QuantizedLinear(two_groups, None)
    linear = ExactLinear(quantized, ARITHMETICS[arithmetic])
    assert torch.equal(linear.digits[0].abs().amax(1), torch.full((4,), 127))
    model: Any = random_model("llama", torch.float32)
    model.model.layers[0].mlp.up_proj = quantized
    replaced(quantized)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.up_proj is a quantized linear whose forward"):
        use_exact_arithmetic(model, arithmetic, 64)


def doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, out: out * 2)


def replaced(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) * 2


CHANGES = {  # of a model, which exact arithmetic must keep
    "hook of a linear": ("mlp.up_proj", doubled),
    "hook before a linear": (
        "self_attn.o_proj",
        lambda module: module.register_forward_pre_hook(
            lambda _, args, given: ((args[0] + 0.5,), given), with_kwargs=True
        ),
    ),
    "hook of a norm": ("input_layernorm", doubled),
    "hook before a norm": (
        "input_layernorm",
        lambda module: module.register_forward_pre_hook(lambda _, args: (args[0] + 0.5,)),
    ),
    "hook of a function": ("mlp.act_fn", doubled),
    "forward of a linear": ("mlp.up_proj", replaced),
    "forward of a norm": ("input_layernorm", replaced),
    "hook of a layer": ("", doubled),
    "class of a layer": ("", lambda layer: setattr(layer, "__class__", Doubled)),
}


class Doubled(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        return super().forward(hidden_states, **given) * 2


@pytest.mark.parametrize("change", CHANGES)
def test_user_changes_are_kept(change: str) -> None:
    name, apply = CHANGES[change]
    models = [random_model("llama", torch.float32) for _ in range(2)]
    for model in models:
        apply(model.model.layers[0].get_submodule(name))
    use_exact_arithmetic(models[0], "exact8x16", 64)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        actual, expected = (model(ids, use_cache=False).logits for model in models)
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_hook_of_a_rotary_embedding_is_rejected() -> None:
    model: Any = random_model("llama", torch.float32)
    model.model.rotary_emb.register_forward_hook(lambda _, args, out: (out[0] * 0.5, out[1] * 0.5))
    with pytest.raises(UnsupportedModel, match="they are not cos and sin of positions"):
        use_exact_arithmetic(model, "exact16", 64)


class Turned(LlamaRotaryEmbedding):
    """Angles a little larger from the middle of the context on."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(x, position_ids)
        return torch.where(position_ids[..., None] < 40, cos, cos * (1 + 1e-7)), sin


class OtherFrequencies(LlamaRotaryEmbedding):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inv_freq *= 1 + 1e-6


def test_rotary_embedding_that_differs_slightly_is_rejected() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    model: Any = nn.Module()
    model.config = config
    for kind in (Turned, OtherFrequencies):
        with pytest.raises(UnsupportedModel, match="does not define the tables"):
            rotary_of(model, kind(config), 64)
    scaled = LlamaRotaryEmbedding(config)
    scaled.attention_scaling = math.nextafter(1.0, 2.0) * (1 + 1e-9)
    with pytest.raises(UnsupportedModel, match="does not define the tables"):
        rotary_of(model, scaled, 64)
    cos, sin = rotary_of(model, LlamaRotaryEmbedding(config), 64)(torch.zeros(1), torch.arange(64)[None])
    assert cos.shape == sin.shape == (1, 64, 16)


def test_positions_with_several_axes_are_rejected() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    model: Any = nn.Module()
    model.config = config
    with pytest.raises(UnsupportedModel, match="LlamaConfig have 3 dimensions"):
        rotary_of(model, LlamaRotaryEmbedding(config), 64)(torch.zeros(1), torch.zeros(3, 1, 8, dtype=torch.int64))
