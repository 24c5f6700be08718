"""From a certified graph over the first layers to code for all: a proof a structure, and one code for equal regions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import TracingContext

from detcompile.orders.numerics import Numerics
from detcompile.passes.graphs import shape_of
from detcompile.passes.layers.inputs import LayerInputs
from detcompile.passes.layers.program import LayeredProgram, Run, Unrolled, owned_inputs, unroll
from detcompile.passes.layers.regions import Region, cut
from detcompile.passes.layers.structure import Repeats
from detcompile.passes.programs.canonical_form import region_form
from detcompile.passes.proof.certificate import Certificate, certify
from detcompile.passes.proof.inputs import Role
from detcompile.passes.proof.provenance import Rows
from detcompile.passes.rewrites.merged_linears import joined
from detcompile.progress import stage

__all__ = ["AllInputs", "Layered", "compile_layers", "inputs_of_all_layers", "role_of"]


class Layered(NamedTuple):
    """A program over all layers of a model."""

    run: LayeredProgram
    certificate: Certificate


def compile_layers(
    gm: fx.GraphModule,
    rows: Sequence[fx.Node],
    inputs: Sequence[Any],
    owners: LayerInputs,
    roles: Mapping[str, Role],
    proved: tuple[Certificate, Mapping[fx.Node, Any]],
    numerics: Numerics,
    compile_region: Callable[[Region, Mapping[str, Role], Certificate], Run],
) -> Layered:
    """Cut a graph over the first layers and compile one region a structure.

    Args:
        gm: the graph, after all rewrites.
        rows: the nodes that `take_marks` gave.
        inputs: traced tensors and numbers of the graph's inputs, in order.
        owners: layers that these belong to.
        roles: roles of the graph's inputs, by name.
        proved: the graph's certificate, and what the proof says of each node.
        numerics: the declared orders.
        compile_region: makes code of a region, given the roles of its inputs and its certificate.

    Raises:
        NotCut: layers read of each other something else than their rows.
    """
    whole, states = proved
    regions = cut(gm, rows, owned_inputs(gm, inputs, owners), [owners.is_trained(given) for given in inputs])
    unrolled = unroll(regions, inputs, owners)
    known_roles = {node.name: role_of(node, state) for node, state in states.items() if node.op != "placeholder"}
    certificates: dict[int, Certificate] = {}
    runs: dict[int, Run] = {}
    by_form: dict[str, Run] = {}
    for index in sorted(set(unrolled.regions)):
        region, last = regions[index], index == len(regions) - 1
        own = known_roles | {name: role for name, role in roles.items() if last or not role.final_gather}
        certificates[index] = certify(region.gm.graph, own, numerics, None)
        form = region_form(region.gm, _names(region, inputs, owners, index - 1))
        if form not in by_form:
            text = f"compile region {len(by_form) + 1} of at most {len(set(unrolled.regions))}"
            with stage(text), TracingContext.report_output_strides():  # each region has its own
                by_form[form] = compile_region(region, own, certificates[index])
        runs[index] = by_form[form]
    certificate = Certificate(_entries(certificates, owners.repeats), numerics, whole.sums)
    shared = {index: regions[index].shared for index in runs}
    return Layered(LayeredProgram(runs, shared, unrolled), certificate)


class AllInputs(NamedTuple):
    """Inputs of a program over all layers."""

    inputs: list[Any]  # in order
    joined: dict[int, torch.Tensor]  # by position: the concatenations that stand in for single weights
    parts: dict[int, tuple[torch.Tensor, ...]]  # by position: what these are made of


def inputs_of_all_layers(
    unrolled: Unrolled, inputs: Sequence[Any], groups: Sequence[tuple[int, ...]], owners: LayerInputs
) -> AllInputs:
    """The inputs of a program, from those of the graph over the first layers.

    Args:
        groups: positions of the weights that are parts of one product, each group in the place of its first.
    """
    positions_of = {positions[0]: positions for positions in groups}
    found = AllInputs([], {}, {})
    for position, (source, layer) in enumerate(zip(unrolled.sources, unrolled.layers, strict=True)):
        parts = [inputs[part] for part in positions_of.get(source, (source,))]
        own = [given if layer is None else owners.of(given, layer) for given in parts]
        found.inputs.append(own[0])
        if len(own) > 1:
            found.joined[position], found.parts[position] = joined(own), tuple(own)
    return found


def role_of(node: fx.Node, state: Any) -> Role:
    """The role, in a graph, of a value that another one made."""
    spaces: dict[int, str] = {}
    if isinstance(state, Rows) and isinstance(node.meta.get("val"), torch.Tensor):
        sizes = shape_of(node)
        for dim, axes in enumerate(state.dims):
            for axis in axes:
                if axis.row is not None and axis.size == sizes[dim]:
                    spaces[dim] = axis.row
    return Role("made", rows=spaces, state=state)


def _names(region: Region, inputs: Sequence[Any], owners: LayerInputs, layer: int) -> list[str]:
    """What each input of a region is to its layer."""
    num_inputs = len(region.gm.graph.find_nodes(op="placeholder"))
    names = ["rows"] * (num_inputs - len(region.given) - len(region.shared))
    names += [f"shared {place}" for place in region.shared]
    for position in region.given:
        common = f"input {position}" if isinstance(inputs[position], torch.Tensor) else ""
        own = owners.name_of(inputs[position], layer) if 0 <= layer < owners.repeats.prefix else None
        names.append(own or common)
    return names


def _entries(certificates: Mapping[int, Certificate], repeats: Repeats) -> tuple[Any, ...]:
    """Entries of the regions; those of a layer say for which layers they hold."""
    found = []
    for index, certificate in sorted(certificates.items()):
        layer = index - 1
        alike = repeats.alike(layer) if 0 <= layer < repeats.prefix else ()
        found += [replace(entry, holds_for=alike) for entry in certificate.entries]
    return tuple(found)
