"""What the collectives do to rows: row t of a result reads row t of each rank's value, and no partial sum gets out.

The certificate of one rank speaks of its own graph. That the ranks' graphs are the same, and their inputs, is what
compile() and the caller see to.
"""

import math

from torch import fx

from detcompile.passes.graphs import shape_of
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import Refusal, Rows, created, join, require_feature, require_weight
from detcompile.passes.proof.template_rules import of_experts
from detcompile.templates.ops import ours

__all__ = ["columns_gathered", "expert_matmul_partial", "matmul_all_reduce", "tree_all_reduce"]


def matmul_all_reduce(node: fx.Node, ctx: Context) -> Rows:
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    bias, residual = node.args[2:4]
    require_weight(w, "the second matrix")
    require_feature(x, 1, "the sum of a matrix product")
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = Rows((x.dims[0], w.dims[0]))
    return out if residual is None else join([out, ctx.rows(residual)], len(out.dims))


def expert_matmul_partial(node: fx.Node, ctx: Context) -> Rows:
    """A sum over a share of K: it means nothing until the ranks' shares are added."""
    for user in node.users:
        if user.target is not ours.tree_all_reduce.default or user.args[0] is not node or node in user.args[1:]:
            raise Refusal(f"a rank's partial sum is read by {user.target}, not by the tree over the ranks")
    return of_experts(node, ctx)


def tree_all_reduce(node: fx.Node, ctx: Context) -> Rows:
    partial, bias, residual, radices = node.args[:4]
    if partial.target is not ours.expert_matmul_partial.default:
        raise Refusal("adds up ranks' values that are no partial sums of a matrix product")
    tp = partial.args[-1]
    if math.prod(radices) != tp:
        raise Refusal(f"a tree over {math.prod(radices)} ranks adds the partial sums of {tp}")
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = ctx.rows(partial)
    return out if residual is None else join([out, ctx.rows(residual)], len(out.dims))


def columns_gathered(node: fx.Node, ctx: Context) -> Rows:
    x = ctx.rows(node.args[0])
    require_feature(x, 1, "a gather of columns")
    return Rows((x.dims[0], created([shape_of(node)[1]], {}).dims[0]))
