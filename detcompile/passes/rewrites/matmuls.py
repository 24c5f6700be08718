"""Matrix products become the matmul template, with bias and residual as its epilogue."""

import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import set_source_trace

__all__ = ["fuse_residuals", "pin_matmuls", "transposed_weight"]

aten = torch.ops.aten
# The argument's position.
RESIDUAL_OF = {
    ours.matmul.default: 3,
    ours.dequant_matmul.default: 5,
    ours.matmul_all_reduce.default: 3,
    ours.tree_all_reduce.default: 2,
}


def pin_matmuls(gm: fx.GraphModule) -> fx.GraphModule:
    """mm(x, w_KN)  ->  matmul(x, w_NK, None, None, [])         addmm(b, x, w_KN)  ->  matmul(x, w_NK, b, None, [])

    Both are one sum in the order of matmul_order; row-parallel linears call the template with their tree themselves.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        _pin(gm.graph, node, node.args[0], node.args[1], None)
    for node in gm.graph.find_nodes(op="call_function", target=aten.addmm.default):
        if not node.kwargs and len(shape_of(node.args[0])) == 1:
            _pin(gm.graph, node, node.args[1], node.args[2], node.args[0])
    return gm


def _pin(graph: fx.Graph, node: fx.Node, x: fx.Node, w_KN: fx.Node, bias: fx.Node | None) -> None:
    w_NK = transposed_weight(graph, w_KN, node)
    pinned = insert(graph, ours.matmul.default, (x, w_NK, bias, None, []), node)
    replace(node, pinned)


def transposed_weight(graph: fx.Graph, w_KN: fx.Node, product: fx.Node) -> fx.Node:
    """The second operand of a product as the template takes it, [N, K]."""
    return w_KN.args[0] if _is_transpose(w_KN) else insert(graph, aten.permute.default, (w_KN, [1, 0]), product)


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0])


def fuse_residuals(gm: fx.GraphModule) -> fx.GraphModule:
    """add(r, view(matmul(x, w, b, None)))  ->  view(matmul(x, w, b, view(r)))          and of all reductions the same

    The template rounds the product before it adds, as the two operations did.
    """
    for add in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if add.kwargs or not all(isinstance(arg, fx.Node) for arg in add.args):
            continue
        for y, r in (add.args, add.args[::-1]):
            product = y.args[0] if y.target in VIEWS else y
            if _takes_residual(product, y, r, add):
                _fuse(gm.graph, add, product, y, r)
                break
    return gm


def _takes_residual(product: fx.Node, y: fx.Node, r: fx.Node, add: fx.Node) -> bool:
    return (
        product.target in RESIDUAL_OF
        and product.args[RESIDUAL_OF[product.target]] is None
        and len(shape_of(product)) == 2
        and len(product.users) == 1
        and len(y.users) == 1
        and shape_of(r) == shape_of(add) == shape_of(y)
        and r.meta["val"].dtype == product.meta["val"].dtype
        and r is not y
    )


def _fuse(graph: fx.Graph, add: fx.Node, product: fx.Node, y: fx.Node, r: fx.Node) -> None:
    flat = r
    if y is not product:  # [-1, N]: no symbolic size has to be threaded through
        flat = insert(graph, aten.reshape.default, (r, [-1, int(product.meta["val"].shape[1])]), add)
    place = RESIDUAL_OF[product.target]
    fused = insert(graph, product.target, (*product.args[:place], flat, *product.args[place + 1 :]), add)
    set_source_trace(fused, product)
    if y is not product:
        fused = insert(graph, y.target, (fused, *y.args[1:]), add)
    add.replace_all_uses_with(fused)
    for dead in dict.fromkeys((add, y, product)):
        graph.erase_node(dead)
