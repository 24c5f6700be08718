"""Canonicalize operations, so that later rewrites need one pattern each.

Slice-by-slice fills of an allocation become concatenations. An index that enumerates all rows is dropped.
"""

import math
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of

aten, prims = torch.ops.aten, torch.ops.prims


def canonicalize(gm: fx.GraphModule) -> fx.GraphModule:
    """bmm(a, b) with K = 1  ->  mul(a, b)   (rotary embeddings: an outer product sums nothing)
    _unsafe_index(x, i)  ->  index(x, i)                     (which never reads another row, even out of bounds)
    index_put(x, [mask], v)  ->  where(mask, v, x)           (a mask of x's shape, and one value)
    view(x [4 T, 8], [T, 32])  ->  view(view(x, [T, 4, 8]), [T, 32])   (as Inductor compiles it correctly; and inverse)
    slice_scatter(full(0.0), part [T, 4], 1, 4, 8)  ->  constant_pad_nd(part, [4, 0], 0.0)   (Inductor fuses a pad)
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
        if not _pad_instead(node):
            _scatter_without_units(gm.graph, node)
    return gm


def _split_mixed_rows(graph: fx.Graph, view: fx.Node) -> None:
    """Split a view from or to a dimension with rows and features into two views, with separate dimensions in between.

    Inductor (torch 2.11 to 2.13) matches the two shapes by a guess of the unknown extent, and may read other rows.
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


def _pad_instead(scatter: fx.Node) -> bool:
    """Replace a slice_scatter into a constant, as the gradient of a slice of features; return False if it is none."""
    constant, part, *_ = scatter.args
    dim, start, end = _slice_range(scatter)
    whole = shape_of(scatter)
    if constant.target is not aten.full.default or scatter.kwargs or len(scatter.args) > 5 or whole[dim].free_symbols:
        return False
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end:
        return False
    fits = shape_of(part) == (*whole[:dim], end - start, *whole[dim + 1 :])
    if not fits or part.meta["val"].dtype != scatter.meta["val"].dtype:
        return False
    sides = [0] * (2 * (len(whole) - dim))
    sides[-2:] = start, int(whole[dim]) - end
    scatter.target, scatter.args = aten.constant_pad_nd.default, (part, sides, constant.args[1])
    return True


def _scatter_without_units(graph: fx.Graph, scatter: fx.Node) -> None:
    """Drop dimensions of extent 1 from a slice_scatter of four or more dimensions.

    Inductor takes [N, 1, H, W] for an image, and cannot choose a layout for it if an extent is unknown.
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
    """Return whether an extent is an unknown number times a known factor."""
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


ALL = 2**63 - 1
ALLOCATIONS = (aten.empty.memory_format, aten.new_empty.default, aten.full.default)


def join_fills(gm: fx.GraphModule) -> fx.GraphModule:
    """slice_scatter(slice_scatter(empty, a, d, 0, n), b, d, n, m)  ->  cat([a, b], d)        where m is the extent of d

    Only fills without a gap are rewritten; the certificate refuses the others. Slices of a whole dimension, such as an
    unknown number of rows, are dropped first.
    """
    if gm.graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        _drop_whole_slices(gm)
    for node in reversed(gm.graph.find_nodes(op="call_function", target=aten.slice_scatter.default)):
        slices = _filling_slices(node)
        if slices is not None:
            joined = insert(gm.graph, aten.cat.default, (slices, _slice_range(node)[0]), node)
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


def _filling_slices(last: fx.Node) -> list[fx.Node] | None:
    """Return the slices that fill an allocation along one dimension, in order; None if ``last`` completes no fill."""
    dim, _, end = _slice_range(last)
    slices: list[fx.Node] = []
    node: Any = last
    while isinstance(node, fx.Node) and node.target is aten.slice_scatter.default:
        slice_dim, slice_start, slice_end = _slice_range(node)
        if slice_dim != dim or slice_end != end or len(node.args) > 5 or node.kwargs:
            return None
        slices.insert(0, _copied_value(node.args[1]))
        node, end = node.args[0], slice_start
    whole = shape_of(last)
    complete = end == 0 and _slice_range(last)[2] == whole[dim] and len(slices) > 1
    if not complete or node.target not in ALLOCATIONS or not _same_but(slices, last, dim):
        return None
    return slices


def _slice_range(node: fx.Node) -> tuple[int, Any, Any]:
    """Return dimension, start and end of a slice_scatter, with the end clamped to the extent."""
    sizes = shape_of(node)
    dim = (node.args[2] if len(node.args) > 2 else 0) % len(sizes)
    start = node.args[3] if len(node.args) > 3 else None
    end = node.args[4] if len(node.args) > 4 else None
    extent = sizes[dim]
    whole = end is None or (isinstance(end, int) and not extent.free_symbols and end >= extent)
    return dim, start or 0, int(extent) if whole and not extent.free_symbols else end


def _copied_value(source: Any) -> Any:
    """Return the value that copy(into, value) writes, if it has the shape and dtype of ``into``."""
    if source.target is aten.copy.default and not source.kwargs and len(source.args) == 2:
        into, value = source.args
        if shape_of(into) == shape_of(value) and into.meta["val"].dtype == value.meta["val"].dtype:
            return value
    return source


def _same_but(slices: list[fx.Node], last: fx.Node, dim: int) -> bool:
    """Return whether all slices have the dtype of the whole, and its shape except along ``dim``."""
    whole = shape_of(last)
    expected = whole[:dim] + whole[dim + 1 :]
    shapes = [shape_of(one) for one in slices]
    return all(shape[:dim] + shape[dim + 1 :] == expected for shape in shapes) and all(
        one.meta["val"].dtype == last.meta["val"].dtype for one in slices
    )


SAME_NUMBERS = (*VIEWS, aten.unsqueeze.default, prims.convert_element_type.default, aten._to_copy.default)


def drop_batch_indices(gm: fx.GraphModule) -> fx.GraphModule:
    """index(x_BS, [arange(B) [B, 1, 1, 1], j [S]])  ->  permute(index(x_BS, [None, j [1, 1, S]]), ...)

    transformers' masks read a row's padding this way: mask[batch_idx, kv_idx] over all pairs.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        x, indices = node.args
        place = _place_of_rows(x, indices)
        if place is not None:
            _index_the_rest(gm.graph, node, place)
    return gm


def _place_of_rows(x: fx.Node, indices: list[fx.Node | None]) -> int | None:
    """Return the dimension, from the end, where the first index enumerates all rows of x and others are constant."""
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
    """Return whether a node is a range 0, 1, 2, ..., possibly through views."""
    while node.target in SAME_NUMBERS or (node.target is aten.slice.Tensor and _is_whole(node)):
        node = node.args[0]
    if node.target is prims.iota.default:
        return node.kwargs["start"] == 0 and node.kwargs["step"] == 1
    return node.target is aten.arange.start_step and node.args[0] == 0 and node.args[2:] in ((), (1,))


def _is_whole(part: fx.Node) -> bool:
    return shape_of(part) == shape_of(part.args[0])


def _index_the_rest(graph: fx.Graph, node: fx.Node, place: int) -> None:
    """Index the other dimensions, then move the rows from the front to their place."""
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
