"""Rankings become a function of the row alone: of equal elements, the one of the lowest index comes first."""

import operator
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace

__all__ = ["pin_sorts", "pin_topk"]

aten = torch.ops.aten
DEFAULTS = (None, None, -1, True, True)  # x, k, dim, largest, sorted


def pin_topk(gm: fx.GraphModule) -> fx.GraphModule:
    """topk(x, k, dim, largest, _)  ->  the first k of sort(x, stable=True, dim, descending=largest)

    torch's topk leaves open which of equal elements it finds, and its kernel may follow the number of rows. A stable
    sort has one result. Elements of topk(sorted=False) come in this order too. Equal values are not equal bits where
    zeros have signs, so that values are pinned as indices are.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.topk.default):
        given: tuple[Any, ...] = (*node.args, *DEFAULTS[len(node.args) :])
        x, k, dim, largest, _ = given
        if node.kwargs or not isinstance(k, int):
            continue
        both = insert(gm.graph, _stable_sort, (x, dim, largest), node)
        both.target, both.args = aten.sort.stable, (x,)  # what the certificate knows, by its own name
        both.kwargs = {"stable": True, "dim": dim, "descending": largest}
        for part in range(2):
            for user in _users(node, part):
                whole = insert(gm.graph, operator.getitem, (both, part), node)
                first = insert(gm.graph, aten.slice.Tensor, (whole, dim, 0, k), node)
                dense = insert(gm.graph, aten.clone.default, (first,), node)  # as topk's: views of it may follow
                replace(user, dense)
        gm.graph.erase_node(node)
    return gm


def pin_sorts(gm: fx.GraphModule) -> fx.GraphModule:
    """sort(x, dim, descending)  ->  sort(x, stable=True, dim, descending)"""
    for node in gm.graph.find_nodes(op="call_function", target=aten.sort.default):
        given: tuple[Any, ...] = (*node.args, *(None, -1, False)[len(node.args) :])
        x, dim, descending = given
        if not node.kwargs:
            node.target, node.args = aten.sort.stable, (x,)
            node.kwargs = {"stable": True, "dim": dim, "descending": descending}
    return gm


def _users(node: fx.Node, part: int) -> list[fx.Node]:
    return [user for user in node.users if user.args[1] == part]


def _stable_sort(x: Any, dim: int, descending: bool) -> Any:
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)
