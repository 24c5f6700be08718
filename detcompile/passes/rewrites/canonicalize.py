"""One spelling an operation, so that the rewrites that follow need one pattern each."""

import math
from collections.abc import Iterable

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, shape_of

__all__ = ["canonicalize"]

aten = torch.ops.aten


def canonicalize(gm: fx.GraphModule) -> fx.GraphModule:
    """bmm(a, b) with K = 1  ->  mul(a, b)   (rotary embeddings: an outer product sums nothing)
    _unsafe_index(x, i)  ->  index(x, i)                     (which reads no other row where an index is out of bounds)
    index_put(x, [mask], v)  ->  where(mask, v, x)           (a mask of x's shape, and one value)
    view(x [4 T, 8], [T, 32])  ->  view(view(x, [T, 4, 8]), [T, 32])   (as Inductor gets it right; and the other way)
    slice_scatter(x [4, 1, T, 8], part [3, 1, T, 8])  ->  view(slice_scatter(x [4, T, 8], part [3, T, 8]))

    baddbmm and addmm with scaled operands are left as they are: no rewrite takes them and the certificate names them.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        if shape_of(node.args[0])[2] == 1:
            node.target = aten.mul.Tensor
    for node in gm.graph.find_nodes(op="call_function", target=aten._unsafe_index.Tensor):
        node.target = aten.index.Tensor
    for node in gm.graph.find_nodes(op="call_function", target=aten.index_put.default):
        if _is_masked_fill(node):
            x, (mask,), value = node.args[:3]
            node.target, node.args = aten.where.self, (mask, value, x)
    for target in VIEWS:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            _split_mixed_rows(gm.graph, node)
    for node in gm.graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        _scatter_without_units(gm.graph, node)
    return gm


def _split_mixed_rows(graph: fx.Graph, view: fx.Node) -> None:
    """Take a view from or to a dimension that holds rows and features by way of one dimension for each.

    Inductor (torch 2.11 to 2.13) decides by a guess of an unknown extent how two shapes match, and may read other rows.
    """
    before, after = shape_of(view.args[0]), shape_of(view)
    mixed, plain = (before, after) if any(map(_mixed, before)) else (after, before)
    where = [i for i, extent in enumerate(mixed) if extent.free_symbols]
    rows = [i for i, extent in enumerate(plain) if extent.free_symbols]
    if any(map(_mixed, plain)) or len(where) != 1 or len(rows) != 1 or not _mixed(mixed[where[0]]):
        return
    factor = int(mixed[where[0]].as_coeff_Mul()[0])
    outer, left = divmod(math.prod(map(int, plain[: rows[0]])), math.prod(map(int, mixed[: where[0]])))
    if left or not outer or factor % outer:
        return
    apart = [*map(int, mixed[: where[0]]), outer, -1, factor // outer, *map(int, mixed[where[0] + 1 :])]
    view.args = (insert(graph, aten.view.default, (view.args[0], apart), view), view.args[1])


def _scatter_without_units(graph: fx.Graph, scatter: fx.Node) -> None:
    """Write a slice of four dimensions in as many as have an extent.

    Inductor takes [N, 1, H, W] for an image, whose layout it cannot choose where an extent is unknown.
    """
    x, part, *rest = scatter.args
    whole = shape_of(x)
    kept = [i for i, extent in enumerate(whole) if extent != 1]
    unknown = [i for i in kept if whole[i].free_symbols]
    dim = (rest[0] if rest else 0) % len(whole)
    if scatter.kwargs or len(whole) < 4 or len(kept) == len(whole) or len(unknown) != 1:
        return
    if dim not in kept or dim in unknown or any(shape_of(part)[i].free_symbols for i in kept if i not in unknown):
        return

    def extents(value: fx.Node, dims: Iterable[int]) -> list[int]:
        return [-1 if i in unknown else int(shape_of(value)[i]) for i in dims]

    narrow = [insert(graph, aten.view.default, (value, extents(value, kept)), scatter) for value in (x, part)]
    written = insert(graph, aten.slice_scatter.default, (*narrow, kept.index(dim), *rest[1:]), scatter)
    scatter.target, scatter.args = aten.view.default, (written, extents(x, range(len(whole))))


def _mixed(extent: sympy.Expr) -> bool:
    """Whether an extent is an unknown number times a known one."""
    factor, rows = extent.as_coeff_Mul()
    return factor != 1 and isinstance(rows, sympy.Symbol)


def _is_masked_fill(node: fx.Node) -> bool:
    x, indices, value = node.args[:3]
    accumulates = bool(node.kwargs) or any(node.args[3:])
    if accumulates or len(indices) != 1 or indices[0] is None:
        return False
    mask, kind = indices[0], value.meta["val"]
    whole = mask.meta["val"].dtype is torch.bool and shape_of(mask) == shape_of(x)
    return whole and not kind.shape and kind.dtype == x.meta["val"].dtype
