"""LayerInputs: the inputs of a graph that belong to a layer, and what another layer has in their places."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from detcompile.passes.layers.structure import Repeats
from detcompile.step import KVGroup, StepInputs

__all__ = ["LayerInputs"]


class _Owned(NamedTuple):
    """An input of a layer: a weight by its name in the layer, or a part of the step by the name of its field."""

    kind: str  # weight, cache or group
    name: str


class LayerInputs:
    """The inputs of layers whose structures are known, in a model that attends once a layer.

    Args:
        layers: all layers of the model.
        repeats: structures of the layers.
        step: an example with the caches of all layers.
        groups: KV groups of all layers.
    """

    def __init__(
        self, layers: Sequence[nn.Module], repeats: Repeats, step: StepInputs, groups: Sequence[KVGroup]
    ) -> None:
        self.repeats = repeats
        self._step = step
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._weights = [dict((*layer.named_parameters(), *layer.named_buffers())) for layer in layers]
        self._owned: dict[int, _Owned] = {}
        for weights in self._weights:
            for name, tensor in weights.items():
                self._owned.setdefault(id(tensor), _Owned("weight", name))
        for kind, fields in (("cache", ("k_caches", "v_caches")), ("group", ("slot_mappings", "block_tables"))):
            for field in fields:
                self._owned |= dict.fromkeys(map(id, getattr(step, field)), _Owned(kind, field))

    def name_of(self, given: Any) -> str | None:
        """What an input is to its layer; None if it is for all layers."""
        owned = self._owned.get(id(given))
        return None if owned is None else f"{owned.kind} {owned.name}"

    def of(self, given: Any, layer: int) -> Any:
        """What this layer has in the place of an input that another layer of its structure takes."""
        owned = self._owned.get(id(given))
        if owned is None:
            return given
        if owned.kind == "weight":
            return self._weights[layer][owned.name]
        held: tuple[Tensor, ...] = getattr(self._step, owned.name)
        return held[layer if owned.kind == "cache" else self._group_of[layer]]
