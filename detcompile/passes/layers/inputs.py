"""LayerInputs: the inputs of a graph that belong to a layer, and what another layer has in their places."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from detcompile.passes.layers.regions import NotCut
from detcompile.passes.layers.structure import Repeats
from detcompile.passes.programs.example_step import ExampleStep
from detcompile.step import KVGroup

__all__ = ["LayerInputs"]


class _Owned(NamedTuple):
    """An input of a layer: a weight by its name in the layer, or a part of the step by the name of its field."""

    kind: str  # weight, cache or group
    name: str
    owner: int  # index of the layer, or of the group


class LayerInputs:
    """The inputs of layers whose structures are known, in a model that attends once a layer.

    Args:
        layers: all layers of the model.
        repeats: structures of the layers.
        example: a step with the caches of all layers.
        groups: KV groups of all layers.
        here: the layers that the program runs, one behind the other; None for all.
        trains: the weights are to be trained.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        repeats: Repeats,
        example: ExampleStep,
        groups: Sequence[KVGroup],
        here: range | None = None,
        trains: bool = False,
    ) -> None:
        self.repeats, self._trains = repeats, trains
        self.here = range(len(layers)) if here is None else here
        self._token_ids, _, step, _ = example
        self._step = step
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._weights = [dict((*layer.named_parameters(), *layer.named_buffers())) for layer in layers]
        self._owned: dict[int, _Owned] = {}
        for owner, weights in enumerate(self._weights):
            for name, tensor in weights.items():
                self._owned.setdefault(id(tensor), _Owned("weight", name, owner))
        for kind, fields in (("cache", ("k_caches", "v_caches")), ("group", ("slot_mappings", "block_tables"))):
            for field in fields:
                for owner, tensor in enumerate(getattr(step, field)):
                    self._owned[id(tensor)] = _Owned(kind, field, owner)

    def is_owned(self, given: Any) -> bool:
        """Whether an input belongs to some layer, or to the layers of a group."""
        return id(given) in self._owned

    @property
    def is_stage(self) -> bool:
        """Whether the program runs a part of the layers."""
        return len(self.here) < len(self.repeats.first)

    @property
    def has_end(self) -> bool:
        """Whether the program runs the last layer, and what comes after it."""
        return self.here.stop == len(self.repeats.first)

    def is_everywhere(self, given: Any) -> bool:
        """Whether a tensor of a step is given to the programs of all layers: no cache, and no token ids."""
        owned = self._owned.get(id(given))
        return not self.is_token_ids(given) and (owned is None or owned.kind != "cache")

    def is_token_ids(self, given: Any) -> bool:
        """Whether an input is the token ids of the step."""
        return given is self._token_ids

    def is_trained(self, given: Any) -> bool:
        """Whether an input is a weight that is to be trained."""
        return self._trains and isinstance(given, nn.Parameter)

    def require_joinable(self, groups: Sequence[Sequence[Any]]) -> None:
        """Ask that the weights of each group, which become one, belong to one layer, or all to none.

        Raises:
            NotCut: a weight that all layers read would become a part of each layer's.
        """
        for parts in groups:
            if len({owned.owner if (owned := self._owned.get(id(part))) else None for part in parts}) > 1:
                raise NotCut("a product joins a layer's weights with weights that other layers read too")

    def name_of(self, given: Any, layer: int) -> str | None:
        """What an input is to the layer that reads it; None if it is not the layer's own.

        Raises:
            NotCut: it is another layer's cache.
        """
        owned = self._owned.get(id(given))
        if owned is None:
            return None
        if owned.owner == (self._group_of[layer] if owned.kind == "group" else layer):
            return f"{owned.kind} {owned.name}"
        if owned.kind == "weight":  # the layers that share this one's structure were seen to read the same weight
            return None
        raise NotCut(f"layer {layer} reads {owned.name}[{owned.owner}]")

    def of(self, given: Any, layer: int) -> Any:
        """What this layer has in the place of an input that the first layer of its structure takes."""
        if self.name_of(given, self.repeats.first[layer]) is None:
            return given
        owned = self._owned[id(given)]
        if owned.kind == "weight":
            return self._weights[layer][owned.name]
        held: tuple[Tensor, ...] = getattr(self._step, owned.name)
        return held[layer if owned.kind == "cache" else self._group_of[layer]]
