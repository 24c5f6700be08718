"""Rules of operations whose result does not depend on the order of evaluation: maxima, integer sums, stable sorts.

Floating-point sums are refused here: row templates compute them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import shape_of
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import Refusal, Rows, Rule, drop, require_feature

aten = torch.ops.aten


def _reduced_dims(node: fx.Node) -> list[int]:
    rank = len(shape_of(node.args[0]))
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None or dims == []:
        return list(range(rank))
    return [dims] if isinstance(dims, int) else list(dims)


def _exact_reduction(node: fx.Node, ctx: Context) -> Rows | tuple[Rows, ...]:
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    result = drop(ctx.rows(node.args[0]), _reduced_dims(node), keepdim, "a reduction")
    return (result,) * len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else result


def _integer_sum(node: fx.Node, ctx: Context) -> Rows | tuple[Rows, ...]:
    for dtype in (node.args[0].meta["val"].dtype, node.meta["val"].dtype):
        if dtype.is_floating_point or dtype.is_complex:
            raise Refusal("a floating-point sum whose order is not pinned")
    return _exact_reduction(node, ctx)


def _running_integers(node: fx.Node, ctx: Context) -> Rows:
    """Integer sums and products have the same result in any order."""
    if node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype.is_complex:
        raise Refusal("a running sum whose order is not pinned")
    value = ctx.rows(node.args[0])
    require_feature(value, node.args[1], "a running sum")
    return value


def _sort(node: fx.Node, ctx: Context) -> tuple[Rows, ...]:
    value = ctx.rows(node.args[0])
    require_feature(value, node.kwargs.get("dim", -1), "an ordering")
    if node.target is not aten.sort.stable or not node.kwargs.get("stable"):
        raise Refusal("which of equal elements an unstable sort puts first is not pinned; sort(stable=True) pins it")
    return (value, value)


def _topk(node: fx.Node, ctx: Context) -> tuple[Rows, ...]:
    """Refuse topk: kernels that depend on the number of rows choose among equal elements. rewrites.sorts removes it."""
    raise Refusal("which of equal elements topk finds is not pinned; sort(stable=True) pins it")


ORDER_FREE: Mapping[Any, Rule] = {
    aten.amax.default: _exact_reduction,
    aten.amin.default: _exact_reduction,
    aten.max.dim: _exact_reduction,
    aten.min.dim: _exact_reduction,
    aten.argmax.default: _exact_reduction,
    aten.argmin.default: _exact_reduction,
    aten.any.dim: _exact_reduction,
    aten.any.dims: _exact_reduction,
    aten.any.default: _exact_reduction,
    aten.all.dim: _exact_reduction,
    aten.all.default: _exact_reduction,
    aten.sum.dim_IntList: _integer_sum,
    aten.sum.default: _integer_sum,
    aten.cumsum.default: _running_integers,
    aten.cumprod.default: _running_integers,
    aten.topk.default: _topk,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
}
