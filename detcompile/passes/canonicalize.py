"""One spelling an operation, so that the rewrites that follow need one pattern each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from detcompile.passes.provenance import shape_of

__all__ = ["VIEWS", "canonicalize", "insert"]

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def canonicalize(gm: fx.GraphModule) -> fx.GraphModule:
    """bmm(a, b) with K = 1  ->  mul(a, b)   (rotary embeddings: an outer product sums nothing)
    index_put(x, [mask], v)  ->  where(mask, v, x)           (a mask of x's shape, and one value)

    baddbmm and addmm with scaled operands are left as they are: no rewrite takes them and the certificate names them.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        if shape_of(node.args[0])[2] == 1:
            node.target = aten.mul.Tensor
    for node in gm.graph.find_nodes(op="call_function", target=aten.index_put.default):
        if _is_masked_fill(node):
            x, (mask,), value = node.args[:3]
            node.target, node.args = aten.where.self, (mask, value, x)
    return gm


def _is_masked_fill(node: fx.Node) -> bool:
    x, indices, value = node.args[:3]
    accumulates = bool(node.kwargs) or any(node.args[3:])
    if accumulates or len(indices) != 1 or indices[0] is None:
        return False
    mask, kind = indices[0], value.meta["val"]
    whole = mask.meta["val"].dtype is torch.bool and shape_of(mask) == shape_of(x)
    return whole and not kind.shape and kind.dtype == x.meta["val"].dtype


def insert(graph: fx.Graph, target: Callable[..., Any], args: tuple, origin: fx.Node) -> fx.Node:
    """Add a node before ``origin`` that carries its place in the source and its own fake value."""
    with graph.inserting_before(origin):
        node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda arg: arg.meta["val"])
    mode = torch._guards.detect_fake_mode(values)
    assert mode is not None, f"no fake value among the arguments of {target}"
    with mode:
        node.meta = {**origin.meta, "val": target(*values)}
    return node
