"""Linears with a low-rank adapter (LoRA), and the conversion of PEFT's layers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Conv1D

from detcompile.errors import UnsupportedModel
from detcompile.passes.modules.quantized_linear import replace_module

SLOT = "slot"  # adapter name of every SlottedLinear
NO_ADAPTER = -1.0
ONE = "one LoRA adapter is trained or served at a time"


class AdaptedLinear(nn.Module):
    """forward(x [..., K]) -> [..., N] in the dtype of the linear: linear(x) + B(A(x)) * scaling, rounded as PEFT does.

    Shares the modules of the PEFT layer that it replaces, under the same names.

    Args:
        base_layer: K -> N.
        lora_A, lora_B: K -> r and r -> N, by adapter name.
        dropout: PEFT's dropout probability in training; not applied here.
    """

    def __init__(
        self,
        base_layer: nn.Linear | Conv1D,
        lora_A: nn.ModuleDict,
        lora_B: nn.ModuleDict,
        scaling: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base_layer, lora_A, lora_B
        (self.adapter,) = lora_A
        self.scaling, self.dropout = scaling, dropout

    @property
    def takes(self) -> dict[str, Any]:
        """The linears that read x, by name in the module."""
        return {"base_layer": self.base_layer, f"lora_A.{self.adapter}": self.lora_A[self.adapter]}

    @property
    def gives(self) -> list[Any]:
        """The linears that return all N features."""
        return [self.base_layer, self.lora_B[self.adapter]]

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base_layer(x)
        A: Any = self.lora_A[self.adapter]
        B = self.lora_B[self.adapter]
        return (base + B(A(x.to(A.weight.dtype))) * self.scaling).to(base.dtype)


class SlottedLinear(AdaptedLinear):
    """A linear whose adapter can be exchanged: A and B have room for any rank up to R, and its scaling is a tensor.

    A smaller rank leaves zeros at the end of A's rows and B's columns, which change no sum. Without an adapter A and B
    are 0 and the scaling is negative: adding -0.0 leaves every bit of the linear's output, zeros with a sign included.

    Args:
        base_layer: K -> N.
        rank: R.
    """

    def __init__(self, base_layer: nn.Linear | Conv1D, rank: int) -> None:
        weight = base_layer.weight
        n, k = weight.shape if isinstance(base_layer, nn.Linear) else reversed(weight.shape)
        empty: dict[str, Any] = {"device": "meta", "bias": False}  # draws no random numbers
        A, B = nn.Linear(k, rank, **empty), nn.Linear(rank, n, **empty)
        for part in (A, B):
            part.weight = nn.Parameter(weight.new_zeros(part.weight.shape), requires_grad=False)
        super().__init__(base_layer, nn.ModuleDict({SLOT: A}), nn.ModuleDict({SLOT: B}), NO_ADAPTER, 0.0)
        del self.scaling
        scaling = torch.tensor(NO_ADAPTER, dtype=torch.float32, device=weight.device)
        self.register_buffer("scaling", scaling, persistent=False)

    @property
    def slot(self) -> tuple[Tensor, Tensor, Tensor]:
        """A [R, K], B [N, R] and the scaling []."""
        return self.lora_A[SLOT].weight, self.lora_B[SLOT].weight, self.scaling  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base_layer(x)
        low_rank: Tensor = self.lora_B[SLOT](self.lora_A[SLOT](x))
        return base + (low_rank.float() * self.scaling).to(base.dtype)


def add_slots(model: Any, rank: int) -> None:
    """Put a SlottedLinear in place of every linear but the language-model head.

    Raises:
        UnsupportedModel: the model has an adapter already, or no linears.
    """
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    adapted = next((name for name, module in modules.items() if isinstance(module, AdaptedLinear)), None)
    if adapted is not None:
        raise UnsupportedModel(f"{adapted} has an adapter: load the model without one, and load_adapter() it by name")
    linears = [name for name, one in modules.items() if type(one) in (nn.Linear, Conv1D) and one is not head]
    if not linears:
        raise UnsupportedModel(f"{type(model).__name__} has no plain linears, which adapters need")
    for name in linears:
        replace_module(model, name, SlottedLinear(modules[name], rank))


def slots_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return A, B and scaling of every SlottedLinear by its name."""
    return {name: module.slot for name, module in model.named_modules() if isinstance(module, SlottedLinear)}


def without_slots(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model with slots under the names of the model without them."""
    parts = f".lora_A.{SLOT}.weight", f".lora_B.{SLOT}.weight", ".scaling"
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(parts)}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in kept.items()}


def take_adapters(model: Any) -> Any:
    """Return the model inside a PEFT model, with AdaptedLinear for PEFT's layers. Return other models unchanged.

    Raises:
        UnsupportedModel: an adapter is not a plain LoRA of an unquantized linear; the message names the module.
    """
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return model
    others = {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs.values()} - {"LORA"}
    if others:
        raise UnsupportedModel(f"adapters of PEFT's type {', '.join(sorted(others))}: only LORA is trained and served")
    if len(configs) != 1:
        raise UnsupportedModel(f"adapters {', '.join(configs)}: {ONE}; delete_adapter() the others")
    (config,) = configs.values()
    if config.layer_replication:
        raise UnsupportedModel("layer_replication of a LoraConfig: layers that run several times share one gradient")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    replaced = ""
    for name, module in list(inner.named_modules()):
        if type(module).__module__.startswith("peft.") and not (replaced and name.startswith(f"{replaced}.")):
            replace_module(inner, name, _adapted(name, module))
            replaced = name
    if isinstance(inner.get_output_embeddings(), AdaptedLinear):
        raise UnsupportedModel("an adapter of the language-model head: leave it out of target_modules")
    return inner


def _adapted(name: str, layer: Any) -> AdaptedLinear:
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if kind != "peft.tuners.lora.layer.Linear":
        raise UnsupportedModel(
            f"{name}: a {kind}. Only LoRA of linears in the model's dtype is trained and served: no modules_to_save, no"
            " trainable tokens, no adapters of embeddings, experts or quantized linears"
        )
    base = layer.base_layer
    if type(base) not in (nn.Linear, Conv1D):
        raise UnsupportedModel(f"{name}: an adapter of a {type(base).__name__}; only linears have adapters here")
    if layer.merged:
        raise UnsupportedModel(f"{name}: its adapter is merged: unmerge_adapter() first")
    if layer.disable_adapters or [*layer.active_adapters] != [*layer.lora_A]:
        raise UnsupportedModel(f"{name}: its adapter is not active: enable it ({ONE})")
    (adapter,) = layer.lora_A
    if adapter in layer.lora_variant:
        variant = type(layer.lora_variant[adapter]).__name__
        raise UnsupportedModel(f"{name}: a {variant} (use_dora and the like); plain LoRA is trained and served")
    dropout = float(getattr(layer.lora_dropout[adapter], "p", 0.0))
    return AdaptedLinear(base, layer.lora_A, layer.lora_B, float(layer.scaling[adapter]), dropout)
