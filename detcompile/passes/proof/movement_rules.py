"""Rules of operations that move or index elements. An operation without a rule is refused.

A rule takes (node, context) and returns the state of the node's value, or raises Refusal with the reason.
"""

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import shape_of, sympy_size
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import (
    Axis,
    Layout,
    Refusal,
    Rows,
    Rule,
    Size,
    choose_rows,
    created,
    expand,
    gather,
    index,
    is_feature,
    join,
    permute,
    require_feature,
    require_weight,
    view,
)

aten, prims = torch.ops.aten, torch.ops.prims


def _view(node: fx.Node, ctx: Context) -> Rows:
    return view(ctx.rows(node.args[0]), shape_of(node))


def _transpose(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    order = list(range(len(value.dims)))
    a, b = (node.args[1], node.args[2]) if len(node.args) > 2 else (-2, -1)
    order[a], order[b] = order[b], order[a]
    return permute(value, order)


def _slice(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    given: tuple[Any, ...] = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, start, _, step = given
    before, after = shape_of(node.args[0])[dim], shape_of(node)[dim]
    if before == after and step == 1 and (start in (0, None) or _all_from_the_end(start, before)):
        return value
    if any(isinstance(ctx.states[arg], Size) for arg in node.all_input_nodes):
        raise Refusal("a slice at a value computed from a token or batch count")
    require_feature(value, dim, "a slice")
    return Rows((*value.dims[:dim], *created([after], {}).dims, *value.dims[dim:][1:]))


def _all_from_the_end(start: Any, extent: sympy.Expr) -> bool:
    """Return whether a slice starts at minus the extent, and so is whole."""
    value = start.meta.get("val") if isinstance(start, fx.Node) else None
    return isinstance(value, torch.SymInt) and sympy.expand(sympy_size(value) + extent) == 0


def _select(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    dim = node.args[1] % len(value.dims)
    require_feature(value, dim, "a choice of one element")
    return value.without(dim)


def _unsqueeze(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    dim = node.args[1] % (len(value.dims) + 1)
    return Rows((*value.dims[:dim], (), *value.dims[dim:]))


def _cat(node: fx.Node, ctx: Context) -> Rows:
    values = [ctx.rows(arg) for arg in node.args[0]]
    rank = len(values[0].dims)
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    along = created([shape_of(node)[dim]], {}).dims[0]
    first_axes = values[0].dims[dim]
    if not is_feature(first_axes) and all(value.dims[dim] == first_axes for value in values):
        along = (Axis(sympy.Integer(len(values))), *first_axes)  # a stack: the index of the value is outermost
    else:
        for value in values:
            require_feature(value, dim, "a concatenation")
    others = join([value.without(dim) for value in values], rank - 1)
    return Rows((*others.dims[:dim], along, *others.dims[dim:]))


def _slice_scatter(node: fx.Node, ctx: Context) -> Rows:
    """A slice of features is replaced by values of the same rows."""
    value, part = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    rank = len(value.dims)
    dim = (node.args[2] if len(node.args) > 2 else 0) % rank
    for operand in (value, part):
        require_feature(operand, dim, "a slice")
    others = join([operand.without(dim) for operand in (value, part)], rank - 1)
    return Rows((*others.dims[:dim], value.dims[dim], *others.dims[dim:]))


def _select_scatter(node: fx.Node, ctx: Context) -> Rows:
    """One element of a feature dimension is replaced by values of the same rows."""
    value, part = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    rank = len(value.dims)
    dim = (node.args[2] if len(node.args) > 2 else 0) % rank
    require_feature(value, dim, "a choice of one element")
    others = join([value.without(dim), part], rank - 1)
    return Rows((*others.dims[:dim], value.dims[dim], *others.dims[dim:]))


def _repeat(node: fx.Node, ctx: Context) -> Rows:
    """Repeating a value once per row gives each row the whole value."""
    value, repeats = ctx.rows(node.args[0]), node.args[1]
    new = len(repeats) - len(value.dims)
    dims = [*[()] * new, *value.dims]
    for i, times in enumerate(repeats):
        rows = sympy_size(times.meta["val"]) if isinstance(times, fx.Node) else None
        if rows in ctx.row_symbols:
            require_feature(Rows(tuple(dims)), i, "a repetition")
            dims[i] = (Axis(rows, ctx.row_symbols[rows]), *dims[i])
        elif rows is not None:
            raise Refusal("repeats by a count computed from a token or batch count")
        elif times != 1:
            require_feature(Rows(tuple(dims)), i, "a repetition")
            dims[i] = created([shape_of(node)[i]], {}).dims[0]
    return Rows(tuple(dims))


def _glu(node: fx.Node, ctx: Context) -> Rows:
    """Half of the features is multiplied by the sigmoid of the other half."""
    value = ctx.rows(node.args[0])
    dim = (node.args[1] if len(node.args) > 1 else -1) % len(value.dims)
    require_feature(value, dim, "a gated unit")
    return Rows((*value.dims[:dim], *created([shape_of(node)[dim]], {}).dims, *value.dims[dim + 1 :]))


def _split(node: fx.Node, ctx: Context) -> tuple[Rows, ...]:
    value = ctx.rows(node.args[0])
    dim = (node.args[2] if len(node.args) > 2 else 0) % len(value.dims)
    require_feature(value, dim, "a split")
    parts = [sympy_size(part.shape[dim]) for part in node.meta["val"]]
    return tuple(Rows((*value.dims[:dim], *created([part], {}).dims, *value.dims[dim + 1 :])) for part in parts)


def _unbind(node: fx.Node, ctx: Context) -> tuple[Rows, ...]:
    value = ctx.rows(node.args[0])
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(value.dims)
    require_feature(value, dim, "an unbind")
    return (value.without(dim),) * len(node.meta["val"])


def _unfold(node: fx.Node, ctx: Context) -> Rows:
    """Windows over a feature dimension: the window index stays in place, its contents come last."""
    value = ctx.rows(node.args[0])
    dim = node.args[1] % len(value.dims)
    require_feature(value, dim, "windows")
    places, inside = created([shape_of(node)[dim], shape_of(node)[-1]], {}).dims
    return Rows((*value.dims[:dim], places, *value.dims[dim + 1 :], inside))


def _flip(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    for dim in node.args[1]:
        require_feature(value, dim, "a flip")
    return value


def _pad(node: fx.Node, ctx: Context) -> Rows:
    value, padding = ctx.rows(node.args[0]), node.args[1]
    dims = list(value.dims)
    for i in range(len(padding) // 2):
        if padding[2 * i] or padding[2 * i + 1]:
            require_feature(value, -1 - i, "padding")
            dims[-1 - i] = created([shape_of(node)[-1 - i]], {}).dims[0]
    return Rows(tuple(dims))


def _constant(node: fx.Node, ctx: Context) -> Rows:
    """full, zeros, ...: the number of rows may be a size, but not the fill value."""
    return created(shape_of(node), ctx.row_symbols)


def _iota(node: fx.Node, ctx: Context) -> Rows:
    (length,) = shape_of(node)
    if length.free_symbols or node.all_input_nodes:
        raise Refusal("numbers the rows of the batch (a value computed from a token or batch count)")
    return created([length], {})


def _keep(node: fx.Node, ctx: Context) -> Any:
    return ctx.states[node.args[0]]


def _write_back(node: fx.Node, ctx: Context) -> Layout:
    """Allow copy_ of an updated cache into its graph input."""
    cache, written = (ctx.states[arg] for arg in node.args[:2])
    if not isinstance(cache, Layout) or not isinstance(written, Layout):
        raise Refusal("writes rows into an input of the graph")
    source = node.args[1]
    if cache != written or source.target is not operator.getitem or source.args[0] is not ctx.caches.get(cache):
        raise Refusal(f"writes {written.part}[{written.index}] of the step into {cache.part}[{cache.index}]")
    ctx.kept.add(cache)
    return cache


MOVEMENT: Mapping[Any, Rule] = {
    aten._unsafe_view.default: _view,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.permute.default: lambda node, ctx: permute(ctx.rows(node.args[0]), node.args[1]),
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.expand.default: lambda node, ctx: expand(ctx.rows(node.args[0]), shape_of(node), ctx.row_symbols),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.cat.default: _cat,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.repeat.default: _repeat,
    aten.glu.default: _glu,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.unfold.default: _unfold,
    aten.flip.default: _flip,
    prims.rev.default: _flip,
    aten.constant_pad_nd.default: _pad,
    aten.full.default: _constant,
    aten.full_like.default: _constant,
    aten.scalar_tensor.default: _constant,
    prims.iota.default: _iota,
    aten.arange.start_step: _iota,
    aten.alias.default: _keep,
    aten.detach.default: _keep,
    aten.lift_fresh_copy.default: _keep,
    aten.copy_.default: _write_back,
    operator.getitem: lambda node, ctx: ctx.states[node.args[0]][node.args[1]],
}


def _indexed(node: fx.Node, indices: list[fx.Node | None], ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    given = [arg for arg in indices if arg is not None]
    if len(given) == 1 and given[0].name in ctx.final_gather:
        (size,) = shape_of(given[0])
        return choose_rows(value, indices.index(given[0]), Axis(size, ctx.final_gather[given[0].name]))
    if any(arg.meta["val"].dtype in (torch.bool, torch.uint8) for arg in given):
        raise Refusal("a boolean mask selects a number of elements that depends on the data")
    return index(value, [None if arg is None else ctx.rows(arg, "an index") for arg in indices])


def _scatter_value(node: fx.Node, ctx: Context) -> Rows:
    """A constant is written at chosen features of the same rows. Equal indices write the same value."""
    return Rows(join([ctx.rows(node.args[0]), _scattered(node, ctx)], len(shape_of(node))).dims)


def _scattered(node: fx.Node, ctx: Context) -> Rows:
    """Return the rows of the index. Its extents must equal those of x, except the dimension of chosen features."""
    rank = len(shape_of(node))
    dim = node.args[1] % rank
    idx = ctx.rows(node.args[2], "an index")
    require_feature(ctx.rows(node.args[0]), dim, "a scatter")
    require_feature(idx, dim, "a scatter's index")
    chosen, whole = shape_of(node.args[2]), shape_of(node)
    if chosen[:dim] + chosen[dim + 1 :] != whole[:dim] + whole[dim + 1 :]:
        raise Refusal("a scatter whose index has no entry for some rows")
    return Rows((*idx.dims[:dim], (), *idx.dims[dim + 1 :]))


def embedding(node: fx.Node, ctx: Context) -> Rows:
    weight, ids = ctx.rows(node.args[0]), ctx.rows(node.args[1], "an index")
    require_weight(weight, "the embedding table")
    return Rows((*ids.dims, weight.dims[1]))


INDEXING: Mapping[Any, Rule] = {
    aten.index.Tensor: lambda node, ctx: _indexed(node, list(node.args[1]), ctx),
    aten.index_select.default: lambda node, ctx: _indexed(
        node, [None] * (node.args[1] % len(shape_of(node))) + [node.args[2]], ctx
    ),
    aten.gather.default: lambda node, ctx: gather(
        ctx.rows(node.args[0]), node.args[1], ctx.rows(node.args[2], "an index")
    ),
    aten.scatter.value: _scatter_value,
    aten.embedding.default: embedding,
}
