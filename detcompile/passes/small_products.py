"""Products of small matrices of a row's own become sums over features, whose order is pinned."""

import torch
from torch import fx

import detcompile.templates.ops  # noqa: F401 (registers torch.ops.detcompile)
from detcompile.passes.canonicalize import insert
from detcompile.passes.provenance import shape_of

__all__ = ["pin_small_products"]

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.detcompile
MOST_TERMS = 8  # of a sum; a longer one belongs into a template of its own


def pin_small_products(gm: fx.GraphModule) -> fx.GraphModule:
    """bmm(a_RMK, b_RKN)  ->  row_sum(a_RM1K * b_R1NK)        where K is small and M, N are known: gemma3n mixes so"""
    for node in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        sizes = (*shape_of(node.args[0])[1:], shape_of(node.args[1])[2])
        if not any(size.free_symbols for size in sizes) and int(sizes[1]) <= MOST_TERMS:
            _pin(gm.graph, node)
    return gm


def _pin(graph: fx.Graph, node: fx.Node) -> None:
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
    node.replace_all_uses_with(insert(graph, ours.row_sum.default, (product, node.meta["val"].dtype), node))
    graph.erase_node(node)
