"""Stages of a pipeline: what one of them runs of a graph that is cut where layers meet, and the proof of all."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from detcompile.errors import UnsupportedModel
from detcompile.passes.graphs import shape_of
from detcompile.passes.layers.regions import NotCut, Region
from detcompile.passes.programs.example_step import NUM_TOKENS
from detcompile.passes.proof.certificate import Certificate
from detcompile.torch_internals.fake_tensors import unset_fake_temporarily
from detcompile.torch_internals.graph_nodes import mark_user_outputs

__all__ = ["GivenRows", "given_rows", "require_whole", "without_rows"]

Operation = tuple[str, str, str]  # name, order and class


def without_rows(region: Region) -> Region:
    """What comes before the layers, for a stage that is given the rows: (rows, *shared)  ->  (*shared)."""
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


class GivenRows(NamedTuple):
    """The rows [1, T, H] that a stage is given."""

    value: Tensor  # of the trace, T being a symbol
    example: Tensor  # those of a step of two tokens


def given_rows(rows: Sequence[fx.Node]) -> GivenRows:
    """The rows that a stage hands to the next.

    Raises:
        NotCut: layers hand each other something of another form, which no other process would know.
    """
    for node in rows:
        value, sizes = node.meta["val"], shape_of(node)
        plain = len(sizes) == 3 and sizes[0] == 1 and bool(sizes[1].free_symbols) and not sizes[2].free_symbols
        if not plain or not value.is_contiguous():
            raise NotCut(f"layers hand each other {list(value.shape)} with strides {list(value.stride())}")
    with unset_fake_temporarily():
        return GivenRows(value, torch.zeros(1, NUM_TOKENS, int(sizes[2]), dtype=value.dtype, device=value.device))


class _Parts(NamedTuple):
    """Operations of a certificate, by where they stand."""

    before: list[Operation]
    layers: dict[int, list[Operation]]
    after: list[Operation]


def require_whole(stages: Sequence[Certificate], whole: Certificate) -> None:
    """Compare the operations of all stages, (op, order, class), with those of the model that was not cut.

    Each layer has its operations, in their order, in one stage; the ends have what comes before the layers and after
    them; and stages in between make nothing that is not made before the layers, as several may make what all read.

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
