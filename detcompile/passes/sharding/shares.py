"""Shares: cut this process's share out of new weights, in the way that the first weights were cut."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.modules.quantized_linear import QuantizedLinear, QuantizedStack
from detcompile.passes.preparation import prepare
from detcompile.passes.sharding.shard import pin_row_parallel, shard


class Shares:
    """A model's structure before ranks took shares of it, or stages their layers, without its weights.

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
        self._structure = _like(model, hollow)
        self._declared = numerics, max_context
        self._ranks, self._replicate_attention = ranks, replicate_attention

    def whole(self, *, every_name: bool) -> dict[str, Tensor]:
        """Return meta tensors with the shapes and dtypes of the whole parameters, by name."""
        return dict(self._structure.named_parameters(remove_duplicate=not every_name))

    def take(self, contents: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return this rank's share of every parameter, of all layers, by each of its names.

        Args:
            contents: values for the tensors of ``whole``, by id.
        """
        parameters = {place: nn.Parameter(tensor, requires_grad=False) for place, tensor in contents.items()}
        model = _like(self._structure, parameters)
        seen, _ = prepare(model, *self._declared, shared=self._ranks is not None)
        if self._ranks is None:
            pin_row_parallel(model, self._declared[0])
        else:
            shard(model, seen.attention, self._declared[0], self._ranks, self._replicate_attention)
        return dict(model.named_parameters(remove_duplicate=False))


def shares_of(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    ranks: TensorParallel | None,
    replicate_attention: bool,
) -> Shares | None:
    """Return the Shares of a model; None for quantized weights, which cannot be replaced."""
    quantized = (QuantizedLinear, QuantizedStack)
    if numerics.is_exact or any(isinstance(module, quantized) for module in model.modules()):
        return None
    return Shares(model, numerics, max_context, ranks, replicate_attention)


def _hollow(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _like(model: PreTrainedModel, parameters: Mapping[int, nn.Parameter]) -> PreTrainedModel:
    """Copy a model with other parameters, keyed by the ids of those that they replace. The copy shares its buffers."""
    memo = {**parameters, **{id(buffer): buffer for buffer in model.buffers()}}
    return deepcopy(model, memo)
