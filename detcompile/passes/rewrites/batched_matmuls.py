"""Batched products become products or sums whose order is pinned: of a few weights, or of a row's own matrices."""

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace, shape_of
from detcompile.templates.ops import ours

__all__ = ["pin_batched_products"]

aten, prims = torch.ops.aten, torch.ops.prims
MOST_TERMS = 8  # of a sum; a longer one belongs into a template of its own
MOST_MATRICES = 32  # each becomes a product of its own


def pin_batched_products(gm: fx.GraphModule) -> fx.GraphModule:
    """bmm(a_GMK, w_GKN)  ->  cat([mm(a_GMK[0], w_GKN[0]), ...])      where w has known extents: einsum, grouped linears
    bmm(a_RMK, b_RKN)  ->  row_sum(a_RM1K * b_R1NK)             where K is small and M, N are known: gemma3n mixes so
    bmm(a_RMK, b_RKN)  ->  batched_matmul(a_RMK, b_RNK)         where K is known, and M or N: attention of an encoder
    baddbmm(c, a, b)  ->  c + bmm(a, b)
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.baddbmm.default):
        _add_apart(gm.graph, node)
    for node in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        known = [[not size.free_symbols for size in shape_of(operand)] for operand in node.args]
        (_, M, K), (_, _, N) = known
        whole = all(known[0] + known[1])  # whose rows are not told apart from weights here
        if all(known[1]) and not whole and int(shape_of(node.args[1])[0]) <= MOST_MATRICES:
            _pin_each(gm.graph, node, int(shape_of(node.args[1])[0]))
        elif M and K and N and int(shape_of(node.args[1])[1]) <= MOST_TERMS:
            _pin_sum(gm.graph, node)
        elif K and (M or N):
            _pin_batch(gm.graph, node)
    return gm


def _add_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Only unscaled; the sum is of two terms, each rounded."""
    if not node.kwargs:
        c, a, b = node.args
        product = insert(graph, aten.bmm.default, (a, b), node)
        replace(node, insert(graph, aten.add.Tensor, (c, product), node))


def _pin_batch(graph: fx.Graph, node: fx.Node) -> None:
    a, b = node.args
    turned = insert(graph, aten.permute.default, (b, [0, 2, 1]), node)
    replace(node, insert(graph, ours.batched_matmul.default, (a, turned), node))


def _pin_each(graph: fx.Graph, node: fx.Node, matrices: int) -> None:
    products = []
    for place in range(matrices):
        a, w = (insert(graph, aten.select.int, (operand, 0, place), node) for operand in node.args)
        products.append(insert(graph, aten.unsqueeze.default, (insert(graph, aten.mm.default, (a, w), node), 0), node))
    whole = products[0] if matrices == 1 else insert(graph, _joined, tuple(products), node)
    if matrices > 1:
        whole.target, whole.args = aten.cat.default, (products,)
    replace(node, whole)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def _pin_sum(graph: fx.Graph, node: fx.Node) -> None:
    """The products and their sum stay in fp32; one rounding."""
    a, b = (
        value
        if value.meta["val"].dtype == torch.float32
        else insert(graph, prims.convert_element_type.default, (value, torch.float32), node)
        for value in node.args
    )
    a = insert(graph, aten.unsqueeze.default, (a, 2), node)
    b = insert(graph, aten.unsqueeze.default, (insert(graph, aten.permute.default, (b, [0, 2, 1]), node), 1), node)
    product = insert(graph, aten.mul.Tensor, (a, b), node)
    replace(node, insert(graph, ours.row_sum.default, (product, node.meta["val"].dtype), node))
