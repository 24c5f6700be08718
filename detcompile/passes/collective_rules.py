"""What the collectives do to rows: row t of a result reads row t of each rank's value, and no partial sum gets out.

The certificate of one rank speaks of its own graph. That the ranks' graphs are the same, and their inputs, is what
compile() and the caller see to.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

import detcompile.templates.ops  # noqa: F401 (registers torch.ops.detcompile)
from detcompile.numerics import Numerics, matmul_order
from detcompile.passes.context import Context
from detcompile.passes.provenance import (
    Refusal,
    Rows,
    Rule,
    created,
    join,
    require_feature,
    require_weight,
    shape_of,
)
from detcompile.passes.rules import embedding
from detcompile.passes.template_rules import of_experts
from detcompile.sum_order import SumOrder
from detcompile.templates.cpu_library import isa_of

__all__ = ["COLLECTIVES", "shared_order"]

ours = torch.ops.detcompile


def _matmul_all_reduce(node: fx.Node, ctx: Context) -> Rows:
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    bias, residual = node.args[2:4]
    require_weight(w, "the second matrix")
    require_feature(x, 1, "the sum of a matrix product")
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = Rows((x.dims[0], w.dims[0]))
    return out if residual is None else join([out, ctx.rows(residual)], len(out.dims))


def _expert_matmul_partial(node: fx.Node, ctx: Context) -> Rows:
    """A sum over a share of K: it means nothing until the ranks' shares are added."""
    for user in node.users:
        if user.target is not ours.tree_all_reduce.default or user.args[0] is not node or node in user.args[1:]:
            raise Refusal(f"a rank's partial sum is read by {user.target}, not by the tree over the ranks")
    return of_experts(node, ctx)


def _tree_all_reduce(node: fx.Node, ctx: Context) -> Rows:
    partial, bias, residual, radices = node.args[:4]
    if partial.target is not PARTIAL:
        raise Refusal("adds up ranks' values that are no partial sums of a matrix product")
    tp = partial.args[-1]
    if math.prod(radices) != tp:
        raise Refusal(f"a tree over {math.prod(radices)} ranks adds the partial sums of {tp}")
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = ctx.rows(partial)
    return out if residual is None else join([out, ctx.rows(residual)], len(out.dims))


def _all_gather_columns(node: fx.Node, ctx: Context) -> Rows:
    x = ctx.rows(node.args[0])
    require_feature(x, 1, "a gather of columns")
    return Rows((x.dims[0], created([shape_of(node)[1]], {}).dims[0]))


PARTIAL = ours.expert_matmul_partial.default
COLLECTIVES: Mapping[Any, Rule] = {
    ours.all_gather_columns.default: _all_gather_columns,
    ours.matmul_all_reduce.default: _matmul_all_reduce,
    PARTIAL: _expert_matmul_partial,
    ours.sharded_embedding.default: embedding,
    ours.tree_all_reduce.default: _tree_all_reduce,
}


def shared_order(node: fx.Node, numerics: Numerics) -> SumOrder | None:
    """The order of the whole sum that a product's ranks share; None for what adds nothing of its own."""
    if node.target is ours.matmul_all_reduce.default:
        radices, above = node.args[4:6]
        tp, trees = math.prod(above), [above]
    elif node.target is PARTIAL:
        *_, radices, tp = node.args
        trees = [user.args[3] for user in node.users]
    else:
        return None
    if tp not in numerics.tp_sizes or tuple(radices) != numerics.split_radices(tp)[1]:
        raise Refusal(f"a subtree {tuple(radices)} on each of {tp} ranks, declared is {numerics.radices}")
    if any(tuple(above) != numerics.split_radices(tp)[0] for above in trees):
        raise Refusal(f"{tp} ranks added in the tree {tuple(trees[0])}, declared is {numerics.radices}")
    own = shape_of(node.args[0])[-1]
    if own.free_symbols:
        raise Refusal(f"a sum over {own}, which is not fixed")
    value = node.args[0].meta["val"]
    return matmul_order(int(own) * tp, value.dtype, numerics.radices, isa_of(value.device))
