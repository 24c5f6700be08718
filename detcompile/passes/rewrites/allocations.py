"""A tensor that is allocated and then filled slice by slice becomes the concatenation of its slices."""

from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace, shape_of

__all__ = ["join_fills"]

aten = torch.ops.aten
ALL = 2**63 - 1
ALLOCATIONS = (aten.empty.memory_format, aten.new_empty.default, aten.full.default)


def join_fills(gm: fx.GraphModule) -> fx.GraphModule:
    """slice_scatter(slice_scatter(empty, a, d, 0, n), b, d, n, m)  ->  cat([a, b], d)        where m is the extent of d

    Only a fill without a gap is rewritten; where one has a gap, the certificate names what was not written. Slices
    of everything, as of an unknown number of rows, are left out first.
    """
    if gm.graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        _drop_whole_slices(gm)
    for node in reversed(gm.graph.find_nodes(op="call_function", target=aten.slice_scatter.default)):
        slices = _slices(node)
        if slices is not None:
            joined = insert(gm.graph, aten.cat.default, (slices, _range(node)[0]), node)
            node.replace_all_uses_with(joined)
    gm.graph.eliminate_dead_code()
    return gm


def _drop_whole_slices(gm: fx.GraphModule) -> None:
    """slice(x, d, 0, all)  ->  x        and        slice_scatter(x, y, d, 0, all)  ->  y"""
    for target, first in ((aten.slice.Tensor, 1), (aten.slice_scatter.default, 2)):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            kept: Any = node.args[first - 1]
            given: tuple[Any, ...] = (*node.args[first:], *(0, None, None, 1)[len(node.args) - first :])
            _, start, end, step = given
            of_all = start in (0, None) and step == 1 and (end is None or end == ALL)
            as_wide = shape_of(kept) == shape_of(node) and kept.meta["val"].dtype == node.meta["val"].dtype
            if of_all and not node.kwargs and as_wide:
                replace(node, kept)


def _slices(last: fx.Node) -> list[fx.Node] | None:
    """What fills an allocation along one dimension, in order, or None where ``last`` does not complete such a fill."""
    dim, _, end = _range(last)
    slices: list[fx.Node] = []
    node: Any = last
    while isinstance(node, fx.Node) and node.target is aten.slice_scatter.default:
        own_dim, own_start, own_end = _range(node)
        if own_dim != dim or own_end != end or len(node.args) > 5 or node.kwargs:
            return None
        slices.insert(0, _value(node.args[1]))
        node, end = node.args[0], own_start
    whole = shape_of(last)
    complete = end == 0 and _range(last)[2] == whole[dim] and len(slices) > 1
    if not complete or node.target not in ALLOCATIONS or not _same_but(slices, last, dim):
        return None
    return slices


def _range(node: fx.Node) -> tuple[int, Any, Any]:
    """Dimension, start and end of a slice_scatter, the end within the extent."""
    sizes = shape_of(node)
    dim = (node.args[2] if len(node.args) > 2 else 0) % len(sizes)
    start = node.args[3] if len(node.args) > 3 else None
    end = node.args[4] if len(node.args) > 4 else None
    extent = sizes[dim]
    whole = end is None or (isinstance(end, int) and not extent.free_symbols and end >= extent)
    return dim, start or 0, int(extent) if whole and not extent.free_symbols else end


def _value(source: Any) -> Any:
    """What copy(into, value) writes: the value, if it has the shape and dtype of what it is written into."""
    if source.target is aten.copy.default and not source.kwargs and len(source.args) == 2:
        into, value = source.args
        if shape_of(into) == shape_of(value) and into.meta["val"].dtype == value.meta["val"].dtype:
            return value
    return source


def _same_but(slices: list[fx.Node], last: fx.Node, dim: int) -> bool:
    """Whether all slices have the dtype of the whole, and its shape but along ``dim``."""
    whole = shape_of(last)
    expected = whole[:dim] + whole[dim + 1 :]
    shapes = [shape_of(one) for one in slices]
    return all(shape[:dim] + shape[dim + 1 :] == expected for shape in shapes) and all(
        one.meta["val"].dtype == last.meta["val"].dtype for one in slices
    )
