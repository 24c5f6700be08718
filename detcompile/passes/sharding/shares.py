"""Quantize new weights and take this process's share of them, as was done with the first weights."""

from collections.abc import Mapping
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.modules.quantized_linear import QuantizedLinear, QuantizedStack
from detcompile.passes.preparation import prepare
from detcompile.passes.sharding.shard import pin_row_parallel, shard
from detcompile.weights import named_weights, weight_digests


class NewWeights(NamedTuple):
    """New weights in the form that a compiled model holds.

    Attributes:
        share: this rank's share of all parameters and of the buffers that preparation creates (such as quantized
            weights), under every name.
        whole: digests of the whole weights.
    """

    share: Mapping[str, Tensor]
    whole: Mapping[str, str]


class Shares:
    """A model's structure without weights, from before it was prepared and before ranks or stages took their parts.

    Args:
        model: the whole model, before it is prepared.
        ranks: the ranks that share the model, or this stage of it; None for one rank.
        replicate_attention: as for ``shard``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        numerics: Numerics,
        max_context: int,
        ranks: TensorParallel | None,
        replicate_attention: bool,
    ) -> None:
        hollow = {id(parameter): _hollow(parameter) for parameter in model.parameters()}
        self._structure, self._device = _like(model, hollow), model.device
        self._declared = numerics, max_context
        self._ranks, self._replicate_attention = ranks, replicate_attention

    def whole(self, *, every_name: bool) -> dict[str, Tensor]:
        """Return meta tensors with the shapes and dtypes of the whole parameters, by name."""
        return dict(self._structure.named_parameters(remove_duplicate=not every_name))

    def take(self, contents: Mapping[int, Tensor]) -> NewWeights:
        """Return new weights in the form that this rank holds.

        Args:
            contents: values for the tensors of ``whole``, by id.
        """
        given = {place: tensor.to(self._device) for place, tensor in contents.items()}
        model = _like(
            self._structure, {place: nn.Parameter(tensor, requires_grad=False) for place, tensor in given.items()}
        )
        before = {id(buffer) for buffer in model.buffers()}
        seen, _ = prepare(model, *self._declared, shared=self._ranks is not None)
        whole = weight_digests(named_weights(model))
        if self._ranks is None:
            pin_row_parallel(model, self._declared[0])
        else:
            shard(model, seen.attention, self._declared[0], self._ranks, self._replicate_attention)
        held = named_weights(model, every_name=True)
        return NewWeights({name: tensor for name, tensor in held.items() if id(tensor) not in before}, whole)


def shares_of(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    ranks: TensorParallel | None,
    replicate_attention: bool,
) -> Shares | None:
    """Return the Shares of a model; None for the weights of a quantized checkpoint, which cannot be replaced."""
    if any(isinstance(module, (QuantizedLinear, QuantizedStack)) for module in model.modules()):
        return None
    return Shares(model, numerics, max_context, ranks, replicate_attention)


def _hollow(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _like(model: PreTrainedModel, parameters: Mapping[int, nn.Parameter]) -> PreTrainedModel:
    """Copy a model with other parameters, keyed by the ids of the replaced ones. The copy shares the buffers."""
    memo = {**parameters, **{id(buffer): buffer for buffer in model.buffers()}}
    return deepcopy(model, memo)
