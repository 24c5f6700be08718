"""A program that runs one compiled region for all layers of a structure, each over that layer's weights and caches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from detcompile.passes.graphs import sympy_size
from detcompile.passes.layers.regions import NotCut, Region
from detcompile.passes.layers.structure import Repeats
from detcompile.passes.programs.binding import ExampleStep
from detcompile.passes.proof.certificate import Certificate
from detcompile.step import KVGroup
from detcompile.templates.device.cuda_graphs import is_warmup


class _Owned(NamedTuple):
    """An input of a layer: a weight by its name in the layer, or a part of the step by its field."""

    kind: str  # weight, cache or group
    name: str
    owner: int  # index of the layer, or of the group


class LayerInputs:
    """The inputs of a graph that belong to a layer, and their counterparts in other layers of the same structure.

    The model has one attention per layer.

    Args:
        layers: all layers of the model.
        repeats: layers by their structure.
        example: a step with the caches of all layers.
        groups: KV groups of all layers.
        here: the consecutive layers that the program runs; None for all.
        trains: whether the weights are trained.
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
        """Return whether an input belongs to a layer, or to the layers of a group."""
        return id(given) in self._owned

    @property
    def is_stage(self) -> bool:
        """True if the program runs only some of the layers."""
        return len(self.here) < len(self.repeats.first)

    @property
    def has_end(self) -> bool:
        """True if the program runs the last layer and what follows it."""
        return self.here.stop == len(self.repeats.first)

    def is_everywhere(self, given: Any) -> bool:
        """Return whether every stage takes this tensor of a step: not for caches and token ids."""
        owned = self._owned.get(id(given))
        return not self.is_token_ids(given) and (owned is None or owned.kind != "cache")

    def is_token_ids(self, given: Any) -> bool:
        """Return whether an input is the token ids of the step."""
        return given is self._token_ids

    def is_trained(self, given: Any) -> bool:
        """Return whether an input is a trained weight."""
        return self._trains and isinstance(given, nn.Parameter)

    def require_joinable(self, groups: Sequence[Sequence[Any]]) -> None:
        """Require that the weights of each group, which are joined, belong to one layer, or none to any layer.

        Raises:
            NotCut: a weight that all layers read would be joined with weights of one layer.
        """
        for parts in groups:
            if len({owned.owner if (owned := self._owned.get(id(part))) else None for part in parts}) > 1:
                raise NotCut("a product joins a layer's weights with weights that other layers read too")

    def name_of(self, given: Any, layer: int) -> str | None:
        """Return the name of an input in the layer that reads it; None if the layer does not own the input.

        Raises:
            NotCut: the input is another layer's cache.
        """
        owned = self._owned.get(id(given))
        if owned is None:
            return None
        if owned.owner == (self._group_of[layer] if owned.kind == "group" else layer):
            return f"{owned.kind} {owned.name}"
        if owned.kind == "weight":  # layers of the same structure read the same weight
            return None
        raise NotCut(f"layer {layer} reads {owned.name}[{owned.owner}]")

    def of(self, given: Any, layer: int) -> Any:
        """Return this layer's counterpart of an input of the first layer with the same structure."""
        if self.name_of(given, self.repeats.first[layer]) is None:
            return given
        owned = self._owned[id(given)]
        if owned.kind == "weight":
            return self._weights[layer][owned.name]
        held: tuple[Tensor, ...] = getattr(self._step, owned.name)
        return held[layer if owned.kind == "cache" else self._group_of[layer]]


Run = Callable[[list[Any]], Sequence[Any]]


class Unrolled(NamedTuple):
    """Inputs of a program over all layers: those of the graph over the first layers, then those of other layers."""

    sources: tuple[int, ...]  # by position: the corresponding input of the graph
    layers: tuple[int | None, ...]  # by position: the layer that added it; None for an input of the graph
    given: tuple[tuple[int, ...], ...]  # positions that each region takes, in running order
    regions: tuple[int, ...]  # the graph's region that each of them runs


def owned_inputs(gm: fx.GraphModule, inputs: Sequence[Any], owners: LayerInputs) -> list[bool]:
    """Return, for each input, whether a layer owns it. A number is owned if only tensors of layers have that extent."""
    nodes = gm.graph.find_nodes(op="placeholder")
    general = {
        symbol
        for node, given in zip(nodes, inputs, strict=True)
        if isinstance(given, torch.Tensor) and not owners.is_owned(given)
        for size in node.meta["val"].shape
        for symbol in sympy_size(size).free_symbols
    }
    return [
        owners.is_owned(given)
        if isinstance(given, torch.Tensor)
        else not sympy_size(node.meta["val"]).free_symbols & general
        for node, given in zip(nodes, inputs, strict=True)
    ]


def unroll(regions: Sequence[Region], inputs: Sequence[Any], owners: LayerInputs) -> Unrolled:
    """Return inputs and regions of the program over the layers that run here, given a graph over the first layers."""
    repeats = owners.repeats
    sources = list(range(len(inputs)))
    layers: list[int | None] = [None] * len(inputs)
    added: dict[tuple[int, int], int] = {}  # by layer and position in the graph
    order: list[tuple[int | None, int]] = [(None, 0), *((layer, 1 + repeats.first[layer]) for layer in owners.here)]
    if owners.has_end:
        order.append((None, len(regions) - 1))
    given = []
    for layer, index in order:
        positions = []
        for position in regions[index].given:
            if layer is None or repeats.first[layer] == layer:
                positions.append(position)
                continue
            other = owners.of(inputs[position], layer)
            if other is inputs[position]:
                positions.append(position)
                continue
            if (layer, position) not in added:
                added[layer, position] = len(sources)
                sources.append(position)
                layers.append(layer)
            positions.append(added[layer, position])
        given.append(tuple(positions))
    return Unrolled(tuple(sources), tuple(layers), tuple(given), tuple(index for _, index in order))


def narrowed(unrolled: Unrolled, others: Collection[int]) -> Unrolled:
    """Return the program without inputs that no region takes, except ``others``."""
    kept = sorted({*others, *chain.from_iterable(unrolled.given)})
    place = {position: number for number, position in enumerate(kept)}
    return Unrolled(
        tuple(unrolled.sources[position] for position in kept),
        tuple(unrolled.layers[position] for position in kept),
        tuple(tuple(place[position] for position in positions) for positions in unrolled.given),
        unrolled.regions,
    )


class LayeredCode(NamedTuple):
    """The code of a program over all layers. A program of one graph has a single region."""

    program: "LayeredProgram"
    parts: Mapping[int, tuple[torch.Tensor, ...]]  # by position: weights that were joined
    rows: torch.Tensor | None = None  # example of the last input of a stage after the first
    stage: Certificate | None = None  # proof of the layers of a stage


class LayeredProgram:
    """The program as a function of its inputs in order, which returns the outputs of the last region.

    During warmup, each region runs once, for the first of its layers.

    Args:
        runs: code of the graph's regions, by number.
        shared: numbers of the shared values that each region takes.
        unrolled: inputs and regions of the program.
        takes_rows: whether the last input is the rows that enter the first layer. The first region then returns the
            shared values only.
    """

    def __init__(
        self,
        runs: Mapping[int, Run],
        shared: Mapping[int, tuple[int, ...]],
        unrolled: Unrolled,
        takes_rows: bool = False,
    ) -> None:
        self._takes_rows = takes_rows
        self.runs, self.shared, self.unrolled = runs, shared, unrolled
        first, *others = unrolled.regions
        self._first = runs[first], unrolled.given[0]
        self._steps = [
            (runs[index], shared[index], positions) for index, positions in zip(others, unrolled.given[1:], strict=True)
        ]
        firsts = [others.index(index) for index in dict.fromkeys(others)]
        self._warmup_steps = [self._steps[place] for place in firsts]

    def __call__(self, *given: Any) -> Sequence[Any]:
        run, positions = self._first
        made = run([given[position] for position in positions])
        rows, *shared = (given[-1], *made) if self._takes_rows else made
        outputs: Sequence[Any] = [rows]
        for run, used, positions in self._warmup_steps if is_warmup() else self._steps:
            arguments = [outputs[0], *[shared[index] for index in used], *[given[position] for position in positions]]
            outputs = run(arguments)
        return outputs


def of_one_graph(run: Run, inputs: Sequence[Any], groups: Sequence[tuple[int, ...]]) -> LayeredCode:
    """Wrap a program that is one graph: a single region takes all inputs.

    Args:
        groups: positions of joined weights. The joined weight takes the first position of its group.
    """
    positions = tuple(range(len(inputs)))
    unrolled = Unrolled(positions, (None,) * len(inputs), (positions,), (0,))
    parts = {group[0]: tuple(inputs[position] for position in group) for group in groups}
    return LayeredCode(LayeredProgram({0: run}, {0: ()}, unrolled), parts)
