"""Rows that are indexed by their own numbers are read as they stand, so that they can be followed."""

import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of

__all__ = ["drop_batch_indices"]

aten, prims = torch.ops.aten, torch.ops.prims
SAME_NUMBERS = (*VIEWS, aten.unsqueeze.default, prims.convert_element_type.default, aten._to_copy.default)


def drop_batch_indices(gm: fx.GraphModule) -> fx.GraphModule:
    """index(x_BS, [arange(B) [B, 1, 1, 1], j [S]])  ->  permute(index(x_BS, [None, j [1, 1, S]]), ...)

    As masks of transformers read the padding of a row: mask[batch_idx, kv_idx] over all pairs.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        x, indices = node.args
        place = _place_of_rows(x, indices)
        if place is not None:
            _index_the_rest(gm.graph, node, place)
    return gm


def _place_of_rows(x: fx.Node, indices: list[fx.Node | None]) -> int | None:
    """The dimension, from the end, along which the first index counts all rows of x and the others are constant."""
    if len(indices) < 2 or any(index is None for index in indices):
        return None
    shape, rows = shape_of(indices[0]), shape_of(x)[0]
    counted = [i - len(shape) for i, size in enumerate(shape) if size != 1]
    if len(counted) != 1 or shape[counted[0]] != rows or not _counts_up(indices[0]):
        return None
    (place,) = counted
    others = [shape_of(index) for index in indices[1:]]
    return place if all(len(other) < -place or other[place] == 1 for other in others) else None


def _counts_up(node: fx.Node) -> bool:
    """Whether the values are 0, 1, 2, ..., in order: of a range, through views of it."""
    while node.target in SAME_NUMBERS or (node.target is aten.slice.Tensor and _is_whole(node)):
        node = node.args[0]
    if node.target is prims.iota.default:
        return node.kwargs["start"] == 0 and node.kwargs["step"] == 1
    return node.target is aten.arange.start_step and node.args[0] == 0 and node.args[2:] in ((), (1,))


def _is_whole(part: fx.Node) -> bool:
    return shape_of(part) == shape_of(part.args[0])


def _index_the_rest(graph: fx.Graph, node: fx.Node, place: int) -> None:
    """Index the other dimensions, then move the rows, which stayed first, to their place."""
    x, indices = node.args
    rank = len(shape_of(node)) - (len(shape_of(x)) - len(indices))  # of the indices, broadcast
    others = []
    for index in indices[1:]:
        if len(shape_of(index)) >= -place:
            index = insert(graph, aten.squeeze.dim, (index, place), node)
        others.append(index)
    chosen = insert(graph, aten.index.Tensor, (x, [None, *others]), node)
    missing = rank - 1 - (len(shape_of(chosen)) - 1 - (len(shape_of(x)) - len(indices)))
    for _ in range(missing):
        chosen = insert(graph, aten.unsqueeze.default, (chosen, 1), node)
    dims = list(range(1, len(shape_of(chosen))))
    dims.insert(rank + place, 0)
    moved = insert(graph, aten.permute.default, (chosen, dims), node)
    replace(node, insert(graph, aten.clone.default, (moved,), node, memory_format=torch.contiguous_format))
