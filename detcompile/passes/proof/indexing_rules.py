"""What operations that read or write at given indices do to rows: rules of the kind of movement_rules."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import shape_of
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import (
    Axis,
    Refusal,
    Rows,
    Rule,
    choose_rows,
    gather,
    index,
    join,
    require_feature,
    require_weight,
)

__all__ = ["INDEXING", "embedding"]

aten = torch.ops.aten


def _index(node: fx.Node, ctx: Context) -> Rows:
    return _indexed(node, list(node.args[1]), ctx)


def _indexed(node: fx.Node, indices: list[fx.Node | None], ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    given = [arg for arg in indices if arg is not None]
    if len(given) == 1 and given[0].name in ctx.final_gather:
        (size,) = shape_of(given[0])
        return choose_rows(value, indices.index(given[0]), Axis(size, ctx.final_gather[given[0].name]))
    if any(arg.meta["val"].dtype in (torch.bool, torch.uint8) for arg in given):
        raise Refusal("a mask chooses how many elements there are")
    return index(value, [None if arg is None else ctx.rows(arg, "an index") for arg in indices])


def _gather(node: fx.Node, ctx: Context) -> Rows:
    return gather(ctx.rows(node.args[0]), node.args[1], ctx.rows(node.args[2], "an index"))


def _scatter_value(node: fx.Node, ctx: Context) -> Rows:
    """x with one constant at chosen features of the same rows: where two indices are equal, both write the same."""
    return Rows(join([ctx.rows(node.args[0]), _scattered(node, ctx)], len(shape_of(node))).dims)


def _scattered(node: fx.Node, ctx: Context) -> Rows:
    """The rows of the index, whose extents have to be x's but for the features that are chosen from."""
    rank = len(shape_of(node))
    dim = node.args[1] % rank
    idx = ctx.rows(node.args[2], "an index")
    require_feature(ctx.rows(node.args[0]), dim, "a scatter")
    require_feature(idx, dim, "a scatter's index")
    chosen, whole = shape_of(node.args[2]), shape_of(node)
    if chosen[:dim] + chosen[dim + 1 :] != whole[:dim] + whole[dim + 1 :]:
        raise Refusal("a scatter that leaves some rows alone")
    return Rows((*idx.dims[:dim], (), *idx.dims[dim + 1 :]))


def _index_select(node: fx.Node, ctx: Context) -> Rows:
    return _indexed(node, [None] * (node.args[1] % len(shape_of(node))) + [node.args[2]], ctx)


def embedding(node: fx.Node, ctx: Context) -> Rows:
    weight, ids = ctx.rows(node.args[0]), ctx.rows(node.args[1], "an index")
    require_weight(weight, "the embedding table")
    return Rows((*ids.dims, weight.dims[1]))


INDEXING: Mapping[Any, Rule] = {
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.scatter.value: _scatter_value,
    aten.embedding.default: embedding,
}
