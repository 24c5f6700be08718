"""Compile a certified graph over the first layers to code for all layers, or for a pipeline stage's layers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from detcompile.errors import UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.graphs import shape_of
from detcompile.passes.layers.program import LayeredProgram, LayerInputs, Run, Unrolled, narrowed, owned_inputs, unroll
from detcompile.passes.layers.regions import NotCut, Region, cut
from detcompile.passes.layers.structure import Repeats
from detcompile.passes.programs.binding import NUM_TOKENS
from detcompile.passes.programs.canonical_form import region_form
from detcompile.passes.proof.certificate import Certificate, certify
from detcompile.passes.proof.context import Role
from detcompile.passes.proof.provenance import Rows
from detcompile.passes.rewrites.merged_linears import joined
from detcompile.progress import stage
from detcompile.torch_internals.fake_tensors import TracingContext, unset_fake_temporarily
from detcompile.torch_internals.graph_nodes import mark_user_outputs


class GivenRows(NamedTuple):
    """The rows [1, T, H] that a stage takes."""

    value: Tensor  # of the trace, with a symbol for T
    example: Tensor  # for a step of two tokens


class Layered(NamedTuple):
    """A program over all layers of a model, or over a stage's layers."""

    run: LayeredProgram
    certificate: Certificate  # of all layers
    stage: Certificate | None = None  # the stage's proof; None if all layers run here
    rows: GivenRows | None = None  # of a stage after the first


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
    """Cut a graph over the first layers and compile one region per structure.

    Args:
        gm: the graph, after all rewrites.
        rows: the nodes returned by `take_marks`.
        inputs: traced tensors and numbers of the graph's inputs, in order.
        owners: the layers that the inputs belong to.
        roles: roles of the graph's inputs, by name.
        proved: the graph's certificate, and the proof's state of each node.
        numerics: the declared orders.
        compile_region: compiles a region, given the roles of its inputs and its certificate.

    Raises:
        NotCut: layers read more of each other than their rows.
    """
    whole, states = proved
    trained = [owners.is_trained(given) for given in inputs]
    regions, repeats = cut(gm, rows, owned_inputs(gm, inputs, owners), trained), owners.repeats
    known = {node.name: role_of(node, state) for node, state in states.items() if node.op != "placeholder"}

    def roles_in(index: int) -> dict[str, Role]:
        last = index == len(regions) - 1
        return known | {name: role for name, role in roles.items() if last or not role.final_gather}

    everywhere = sorted({0, *(1 + first for first in repeats.first), len(regions) - 1})
    proofs = {index: certify(regions[index].gm.graph, roles_in(index), numerics, None) for index in everywhere}
    certificate = Certificate(_entries(proofs, repeats, range(len(repeats.first))), numerics, whole.sums)
    if owners.here.start:
        regions[0] = without_rows(regions[0])
        proofs[0] = certify(regions[0].gm.graph, roles_in(0), numerics, None)
    unrolled = _of_stage(unroll(regions, inputs, owners), inputs, list(roles.values()), owners)
    runs, by_form = dict[int, Run](), dict[str, Run]()
    here = sorted(set(unrolled.regions))
    for index in here:
        form = region_form(regions[index].gm, _names(regions[index], inputs, owners, index - 1))
        if form not in by_form:
            text = f"compile region {len(by_form) + 1} of at most {len(here)}"
            with stage(text), TracingContext.report_output_strides():  # separate for each region
                by_form[form] = compile_region(regions[index], roles_in(index), proofs[index])
        runs[index] = by_form[form]
    program = LayeredProgram(runs, {index: regions[index].shared for index in runs}, unrolled, bool(owners.here.start))
    if not owners.is_stage:
        return Layered(program, certificate)
    part = replace(certificate, entries=_entries({index: proofs[index] for index in here}, repeats, owners.here))
    return Layered(program, certificate, part, given_rows(rows) if owners.here.start else None)


class AllInputs(NamedTuple):
    """Inputs of a program over all layers."""

    inputs: list[Any]  # in order
    joined: dict[int, torch.Tensor]  # by position: joined weights
    parts: dict[int, tuple[torch.Tensor, ...]]  # by position: the weights that were joined


def inputs_of_all_layers(
    unrolled: Unrolled, inputs: Sequence[Any], groups: Sequence[tuple[int, ...]], owners: LayerInputs
) -> AllInputs:
    """Return the inputs of a program, given those of the graph over the first layers.

    Args:
        groups: positions of weights that are joined, at the first position of each group.
    """
    positions_of = {positions[0]: positions for positions in groups}
    result = AllInputs([], {}, {})
    for position, (source, layer) in enumerate(zip(unrolled.sources, unrolled.layers, strict=True)):
        parts = [inputs[part] for part in positions_of.get(source, (source,))]
        tensors = [given if layer is None else owners.of(given, layer) for given in parts]
        result.inputs.append(tensors[0])
        if len(tensors) > 1:
            result.joined[position], result.parts[position] = joined(tensors), tuple(tensors)
    return result


def role_of(node: fx.Node, state: Any) -> Role:
    """Return the role, in one graph, of a value that another graph computes."""
    spaces: dict[int, str] = {}
    if isinstance(state, Rows) and isinstance(node.meta.get("val"), torch.Tensor):
        sizes = shape_of(node)
        for dim, axes in enumerate(state.dims):
            for axis in axes:
                if axis.row is not None and axis.size == sizes[dim]:
                    spaces[dim] = axis.row
    return Role("made", rows=spaces, state=state)


def _names(region: Region, inputs: Sequence[Any], owners: LayerInputs, layer: int) -> list[str]:
    """Return the name of each input of a region in its layer."""
    num_inputs = len(region.gm.graph.find_nodes(op="placeholder"))
    names = ["rows"] * (num_inputs - len(region.given) - len(region.shared))
    names += [f"shared {place}" for place in region.shared]
    for position in region.given:
        common = f"input {position}" if isinstance(inputs[position], torch.Tensor) else ""
        name = owners.name_of(inputs[position], layer) if 0 <= layer < owners.repeats.prefix else None
        names.append(name or common)
    return names


def _of_stage(unrolled: Unrolled, inputs: Sequence[Any], roles: Sequence[Role], owners: LayerInputs) -> Unrolled:
    """Restrict a stage's program to the inputs that it reads and the step tensors that every stage takes."""
    if not owners.is_stage:
        return unrolled
    everywhere = [
        position
        for position, (given, role) in enumerate(zip(inputs, roles, strict=True))
        if isinstance(given, torch.Tensor) and role.kind != "weight" and owners.is_everywhere(given)
    ]
    stage_part = narrowed(unrolled, everywhere)
    if owners.here.start and any(owners.is_token_ids(inputs[source]) for source in stage_part.sources):
        raise NotCut("layers read the token ids, beside the rows of the layer before")
    return stage_part


def _entries(certificates: Mapping[int, Certificate], repeats: Repeats, here: range) -> tuple[Any, ...]:
    """Return the entries of all regions. Entries of a layer list the running layers that they hold for."""
    result = []
    for index, certificate in sorted(certificates.items()):
        layer = index - 1
        alike = repeats.alike(layer) if 0 <= layer < repeats.prefix else ()
        layers = tuple(layer for layer in alike if layer in here)
        result += [replace(entry, holds_for=layers) for entry in certificate.entries]
    return tuple(result)


Operation = tuple[str, str, str]  # name, order and class


def without_rows(region: Region) -> Region:
    """Drop the rows from the first region, for a stage that takes the rows: (rows, *shared)  ->  (*shared)."""
    (output,) = region.gm.graph.find_nodes(op="output")
    gives = list(output.args[0][1:])
    needed, wanted = set(), list(gives)
    while wanted:
        node = wanted.pop()
        if node not in needed:
            needed.add(node)
            wanted += node.all_input_nodes
    inputs = region.gm.graph.find_nodes(op="placeholder")
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in region.gm.graph.nodes:
        if node in needed:
            known[node] = graph.node_copy(node, known.__getitem__)
    result = graph.output(tuple(known[node] for node in gives))
    mark_user_outputs(result, len(gives))
    given = tuple(position for node, position in zip(inputs, region.given, strict=True) if node in needed)
    return Region(fx.GraphModule(region.gm, graph), (), given)


def given_rows(rows: Sequence[fx.Node]) -> GivenRows:
    """Return the rows that a stage passes to the next.

    Raises:
        NotCut: the rows have another form, which the next process would not expect.
    """
    for node in rows:
        value, sizes = node.meta["val"], shape_of(node)
        plain = len(sizes) == 3 and sizes[0] == 1 and bool(sizes[1].free_symbols) and not sizes[2].free_symbols
        if not plain or not value.is_contiguous():
            raise NotCut(f"layers pass each other {list(value.shape)} with strides {list(value.stride())}")
    with unset_fake_temporarily():
        return GivenRows(value, torch.zeros(1, NUM_TOKENS, int(sizes[2]), dtype=value.dtype, device=value.device))


class _Parts(NamedTuple):
    """Operations of a certificate, by place."""

    before: list[Operation]
    layers: dict[int, list[Operation]]
    after: list[Operation]


def require_whole(stages: Sequence[Certificate], whole: Certificate) -> None:
    """Require that the stages together have the operations (op, order, class) of the uncut model.

    Each layer has its operations, in order, in exactly one stage. The first stage has what precedes the layers, the
    last what follows them. Other stages may only repeat operations that precede the layers.

    Raises:
        UnsupportedModel: they differ; the message says where.
    """
    expected, parts = _parts(whole), [_parts(stage) for stage in stages]
    for layer, operations in expected.layers.items():
        if [part.layers[layer] for part in parts if layer in part.layers] != [operations]:
            raise UnsupportedModel(f"the stages do not prove layer {layer} as the whole model does: compile with pp=1")
    same_ends = (parts[0].before, parts[-1].after) == (expected.before, expected.after)
    if not same_ends or any(part.after for part in parts[:-1]):
        raise UnsupportedModel("the ends of the pipeline do not prove what the whole model does: compile with pp=1")
    for index, part in enumerate(parts):
        added = Counter(part.before) - Counter(expected.before)
        if added or part.layers.keys() - expected.layers.keys():
            raise UnsupportedModel(f"stage {index} proves {sorted(added)}, which is not the model's: compile with pp=1")


def _parts(certificate: Certificate) -> _Parts:
    parts = _Parts([], {}, [])
    for entry in certificate.entries:
        operation = entry.op, entry.order, entry.kind
        if not entry.holds_for:
            (parts.after if parts.layers else parts.before).append(operation)
        for layer in entry.holds_for:
            parts.layers.setdefault(layer, []).append(operation)
    return parts
