"""QuantizedLinear: a linear whose weights stay quantized, and its place in a model."""

from typing import Any

import torch
from torch import Tensor, nn

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.quantized_layouts import block_of, float8_weight
from detcompile.templates.ops import ours
from detcompile.templates.quantized.weights import QuantizedWeight, dequantized, kept_features, kept_inputs
from detcompile.torch_internals.modules import with_hooks_of


class _Quantized(nn.Module):
    """Holds the parts of a QuantizedWeight, whose features are those of ``num_experts`` matrices one after another."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    mins: Tensor | None
    num_experts = 1

    def _hold(self, weight: QuantizedWeight) -> None:
        self.in_features, self.out_features = weight.k, len(weight.w) // self.num_experts
        self.group, self.rows = weight.group, weight.rows
        parts = {"packed": weight.w, "scales": weight.scales, "zeros": weight.zeros, "mins": weight.mins}
        for name, value in parts.items():
            self.register_buffer(name, value)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight's parts on their present device."""
        return QuantizedWeight(self.packed, self.scales, self.zeros, self.mins, self.in_features, self.group, self.rows)


class QuantizedLinear(_Quantized):
    """forward(x [..., K]) -> [..., N] in x.dtype: the product with the weights dequantized to x.dtype, then the bias.

    Args:
        weight: [N, K] in few bits.
        order: indices into x of the weight's k, if a checkpoint has sorted them by group.
    """

    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, order: Tensor | None = None) -> None:
        super().__init__()
        self._hold(weight)
        self.radices: list[int] = []  # of the tree, where the linear is row-parallel
        self.register_buffer("order", order)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [N, K] that x is multiplied with, with K in the order of x."""
        w = dequantized(self.quantized, dtype)
        return w if self.order is None else w[:, self.order.argsort()]

    def keep_features(self, features: Tensor) -> None:
        """Keep only these outputs, in this order."""
        features = features.to(self.packed.device)
        self._hold(kept_features(self.quantized, features))
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach()[features], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x[..., self.order]
        out = ours.dequant_matmul(
            x.flatten(0, -2), *self.quantized[:4], self.bias, None, self.group, self.rows, self.radices
        )
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        bits = self.quantized.bits
        return f"{self.in_features}, {self.out_features}, bits={bits}, group={self.group}, rows={self.rows}"


class QuantizedStack(_Quantized):
    """One projection of all experts, quantized: the features of one weight [E * N, K], expert by expert."""

    def __init__(self, weight: QuantizedWeight, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._hold(weight)

    def keep_features(self, features: Tensor) -> None:
        """Keep only these outputs of every expert, in this order."""
        firsts = torch.arange(self.num_experts, device=features.device)[:, None] * self.out_features
        self._hold(kept_features(self.quantized, (firsts + features).flatten().to(self.packed.device)))

    def keep_inputs(self, share: slice) -> None:
        """Keep only this range of K."""
        self._hold(kept_inputs(self.quantized, share))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices [E, N, K]."""
        return dequantized(self.quantized, dtype).unflatten(0, (self.num_experts, self.out_features))

    def forward(self, x: Tensor, ids: Tensor, bias: Tensor | None, radices: list[int]) -> Tensor:
        """Return expert_matmul with the dequantized weights."""
        parts = self.quantized[:4]
        return ours.dequant_expert_matmul(x, ids, *parts, bias, self.group, self.rows, radices, self.num_experts)

    def partial(self, x: Tensor, ids: Tensor, radices: list[int], tp: int) -> Tensor:
        """Return expert_matmul_partial with the dequantized weights."""
        sizes = (self.group, self.rows, radices, self.num_experts, tp)
        return ours.dequant_expert_matmul_partial(x, ids, *self.quantized[:4], *sizes)


def pin_quantized(model: Any) -> int:
    """Replace the float8 linears of transformers by ours; return the model's number of quantized linears.

    Raises:
        UnsupportedModel: the model was loaded with quantized weights of another kind; the message names it.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "FP8Linear" and module.weight.element_size() == 1:
            block = block_of(module.block_size)
            weight = float8_weight(name, module.weight.detach(), module.weight_scale_inv.detach(), block)
            replace_module(model, name, with_hooks_of(QuantizedLinear(weight, module.bias), module))
    count = sum(isinstance(module, (QuantizedLinear, QuantizedStack)) for module in model.modules())
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    if count == 0 and method is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} holds weights of the quantization method {getattr(method, 'value', method)!r}, "
            "whose products have no pinned order: load its folder with detcompile.load_model (which reads fp8, gptq, "
            "awq and compressed-tensors), or load the model without quantization"
        )
    foreign = next((n for n, m in model.named_modules() if type(m).__name__.startswith("FP8")), None)
    if foreign is not None:
        kind = type(model.get_submodule(foreign)).__name__
        raise UnsupportedModel(f"{foreign}: a {kind} has no template; load the model with dequantize=True")
    return count


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of this name by ``module``."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
