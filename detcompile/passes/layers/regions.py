"""A traced graph cut where layers meet: before the layers, one graph per layer, and after them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from detcompile.errors import UnsupportedModel
from detcompile.passes.graphs import VIEWS
from detcompile.torch_internals.graph_nodes import mark_user_outputs


@torch.library.custom_op("detcompile_graph::layer_boundary", mutates_args=())
def layer_boundary(rows: Tensor, layer: int) -> Tensor:
    """Copy the rows that ``layer`` reads. A mark in traced graphs; it never runs in a program.

    Its namespace is separate because operations in ``detcompile`` are templates, which have orders.
    """
    return rows.clone()


@layer_boundary.register_fake
def _(rows: Tensor, layer: int) -> Tensor:
    return torch.empty_like(rows)


def mark_layers(layers: Sequence[nn.Module]) -> None:
    """Pass the rows that enter the first layer and the output of each layer through ``layer_boundary``.

    The hooks stay on the layers, which belong to a view that is traced and dropped.
    """
    layers[0].register_forward_pre_hook(_before, with_kwargs=True)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(functools.partial(_after, index + 1))


def _before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (torch.ops.detcompile_graph.layer_boundary(args[0], 0), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": torch.ops.detcompile_graph.layer_boundary(kwargs["hidden_states"], 0)}


def _after(index: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return (torch.ops.detcompile_graph.layer_boundary(output[0], index), *output[1:])
    return torch.ops.detcompile_graph.layer_boundary(output, index)


def take_marks(gm: fx.GraphModule) -> list[fx.Node]:
    """Erase the marks. Return the nodes of the rows that enter each layer, and of the last layer's output.

    Return no node if some rows were not marked, or marked twice.
    """
    marks = gm.graph.find_nodes(op="call_function", target=torch.ops.detcompile_graph.layer_boundary.default)
    rows: list[fx.Node] = []
    for mark in sorted(marks, key=lambda mark: mark.args[1]):
        if mark.args[1] == len(rows):
            rows.append(mark.args[0])
        mark.replace_all_uses_with(mark.args[0])
        gm.graph.erase_node(mark)
    return rows if len(set(rows)) == len(marks) else []


aten = torch.ops.aten
# Operations that each region repeats instead of taking their results: they cost nothing, or alias their inputs.
CHEAP = (
    *VIEWS,
    aten.expand.default,
    aten.full.default,
    aten.permute.default,
    aten.scalar_tensor.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
)
OUTSIDE = -1  # place of values that depend on no layer's rows


class NotCut(UnsupportedModel):
    """The layers of a graph pass each other more than one tensor of rows."""


class Region(NamedTuple):
    """A part of a graph as a separate graph. Its nodes keep their names.

    Its inputs, in order: the ``rows`` of the region before it (not in the first region), ``shared`` values that the
    first region computes, and ``given`` inputs of the whole graph. The first region returns the rows, then every
    shared value. Other regions return their rows, and the last one the outputs of the whole graph.
    """

    gm: fx.GraphModule
    shared: tuple[int, ...]  # numbers of the shared values that it takes
    given: tuple[int, ...]  # positions of the whole graph's inputs


def cut(
    gm: fx.GraphModule, rows: Sequence[fx.Node], owned: Sequence[bool], trained: Sequence[bool] = ()
) -> list[Region]:
    """Cut a graph into regions, in the order in which they run.

    Args:
        rows: nodes of the rows that enter each layer, and of the last layer's output.
        owned: for each input, whether it belongs to a layer.
        trained: for each input, whether it is a trained weight. Each region repeats what is computed from weights
            alone, so that no gradient of a weight passes between regions.

    Raises:
        NotCut: a layer reads more of another layer than its rows.
    """
    places = _places(gm.graph, rows)
    inputs = gm.graph.find_nodes(op="placeholder")
    of_layers = {node for node, belongs in zip(inputs, owned, strict=True) if belongs}
    copied = _copied(gm.graph, places, of_layers, {node for node, trains in zip(inputs, trained) if trains})
    (output,) = gm.graph.find_nodes(op="output")
    results = [[row] for row in rows] + [list(output.args[0])]
    while True:
        parts = []
        for place, gives in zip(range(OUTSIDE, len(rows)), results, strict=True):
            made = [node for node in gm.graph.nodes if places.get(node) == place and node not in copied]
            parts.append(_with_copied([node for node in made if node.op != "placeholder"], gives, copied))
        shared = _read_elsewhere(parts, results, rows)
        # Share the base of a view instead: Inductor cannot return a view whose strides depend on the number of tokens.
        views = {node for node in shared if node.target in CHEAP}
        if not views:
            break
        copied |= views
    results[0] += shared
    return [_region(gm, part, rows, gives, shared) for part, gives in zip(parts, results, strict=True)]


def _places(graph: fx.Graph, rows: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return, by node, the layer whose rows it depends on, or OUTSIDE."""
    entering = {node: layer for layer, node in enumerate(rows)}
    places: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        read = {entering.get(arg, places[arg]) for arg in node.all_input_nodes}
        layers = read - {OUTSIDE}
        if len(layers) > 1:
            raise NotCut(f"{node} reads rows of layers {sorted(layers)}")
        places[node] = layers.pop() if layers else OUTSIDE
    for layer, node in enumerate(rows):
        if places[node] != layer - 1:
            raise NotCut(f"the rows that enter layer {layer} are not computed by the layer before it")
    return places


def _copied(graph: fx.Graph, places: Mapping[fx.Node, int], owned: set[fx.Node], weights: set[fx.Node]) -> set[fx.Node]:
    """Return nodes outside the layers that each region repeats: numbers, cheap ones, and those of one layer."""
    copied: set[fx.Node] = set()
    special, of_weights = set(owned), set(weights)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or places[node] != OUTSIDE:
            continue
        of_layer = any(arg in special for arg in node.all_input_nodes)
        number = not isinstance(node.meta.get("val"), Tensor) and node.users
        if of_layer:
            special.add(node)
        if node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
            copied.add(node)
        from_inputs = all(arg.op == "placeholder" or arg in copied for arg in node.all_input_nodes)
        if node.op == "get_attr" or of_layer or (number and from_inputs) or (node.target in CHEAP and from_inputs):
            copied.add(node)
    return copied


def _with_copied(made: Sequence[fx.Node], gives: Sequence[Any], copied: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes of a region, including those that it repeats."""
    nodes = set(made)
    wanted = [arg for node in made for arg in node.all_input_nodes] + [node for node in gives if node in copied]
    while wanted:
        node = wanted.pop()
        if node in copied and node not in nodes:
            nodes.add(node)
            wanted += node.all_input_nodes
    return nodes


def _read_elsewhere(
    parts: Sequence[set[fx.Node]], results: Sequence[Sequence[Any]], rows: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return what the first part computes and others read, except the rows."""
    first, others = parts[0], parts[1:]
    read = {arg for part in others for node in part for arg in node.all_input_nodes}
    read |= {node for gives in results[1:] for node in gives if isinstance(node, fx.Node)}
    made_there = set().union(*others)
    return [node for node in rows[0].graph.nodes if node in first and node in read - made_there and node is not rows[0]]


def _region(
    gm: fx.GraphModule, part: set[fx.Node], rows: Sequence[fx.Node], gives: Sequence[Any], shared: Sequence[fx.Node]
) -> Region:
    read = {arg for node in part for arg in node.all_input_nodes} | {
        node for node in gives if isinstance(node, fx.Node)
    }
    inputs = gm.graph.find_nodes(op="placeholder")
    entering = [node for node in rows if node in read - part]
    used = [index for index, node in enumerate(shared) if node in read - part]
    given = [index for index, node in enumerate(inputs) if node in read]
    graph, known = fx.Graph(), {}
    for node in (*entering, *(shared[index] for index in used), *(inputs[index] for index in given)):
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in part:
            known[node] = graph.node_copy(node, known.__getitem__)
    output = graph.output(tuple(known[node] if isinstance(node, fx.Node) else node for node in gives))
    mark_user_outputs(output, len(gives))
    return Region(fx.GraphModule(gm, graph), tuple(used), tuple(given))
