"""Sorts and running sums become functions of one row. Among equal elements, the lowest index comes first."""

import operator
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace, shape_of

aten = torch.ops.aten
DEFAULTS = (None, None, -1, True, True)  # x, k, dim, largest, sorted


def pin_topk(gm: fx.GraphModule) -> fx.GraphModule:
    """topk(x, k, dim, largest, _)  ->  the first k of sort(x, stable=True, dim, descending=largest)

    torch's topk does not define which of equal elements it returns, and its kernel may depend on the number of rows. A
    stable sort has one result. Elements of topk(sorted=False) come in this order too. Values are pinned like indices:
    0.0 and -0.0 are equal with different bits.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.topk.default):
        given: tuple[Any, ...] = (*node.args, *DEFAULTS[len(node.args) :])
        x, k, dim, largest, _ = given
        if node.kwargs or not isinstance(k, int):
            continue
        both = insert(gm.graph, _stable_sort, (x, dim, largest), node)
        both.target, both.args = aten.sort.stable, (x,)  # the name that the certificate knows
        both.kwargs = {"stable": True, "dim": dim, "descending": largest}
        for part in range(2):
            for user in _users(node, part):
                whole = insert(gm.graph, operator.getitem, (both, part), node)
                first = insert(gm.graph, aten.slice.Tensor, (whole, dim, 0, k), node)
                dense = insert(gm.graph, aten.clone.default, (first,), node)
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


aten, prims = torch.ops.aten, torch.ops.prims
# The combining operation and its neutral element.
COMBINED: dict[Any, tuple[Any, int]] = {
    aten.cumsum.default: (aten.add.Tensor, 0),
    aten.cumprod.default: (aten.mul.Tensor, 1),
}


def pin_running_sums(gm: fx.GraphModule) -> fx.GraphModule:
    """cumsum(x, dim)  ->  y = x + shift(x, 1); y = y + shift(y, 2); y = y + shift(y, 4); ...

    Element i is a tree over the elements up to i, independent of other rows and of later elements (Hillis and Steele,
    "Data parallel algorithms", CACM 1986). 16-bit values are float32 until the end. Integers need no order. A length
    that is not fixed is left to the certificate.
    """
    for target, (combine, neutral) in COMBINED.items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            x, dim = node.args[:2]
            sizes = shape_of(x)
            if node.meta["val"].dtype.is_floating_point and sizes and not sizes[dim].free_symbols:
                _double(gm.graph, node, combine, neutral, dim % len(sizes), int(sizes[dim]))
    return gm


def _double(graph: fx.Graph, node: fx.Node, combine: Any, neutral: int, dim: int, length: int) -> None:
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    y = insert(graph, prims.convert_element_type.default, (node.args[0], wide), node)
    for shift in (1 << level for level in range((length - 1).bit_length())):
        kept = insert(graph, aten.slice.Tensor, (y, dim, 0, length - shift), node)
        first = insert(graph, aten.slice.Tensor, (y, dim, 0, shift), node)
        filled = _filled(graph, first, neutral, node)
        shifted = insert(graph, aten.cat.default, ([filled, kept], dim), node)
        y = insert(graph, combine, (y, shifted), node)
    replace(node, insert(graph, prims.convert_element_type.default, (y, dtype), node))


def _filled(graph: fx.Graph, like: fx.Node, neutral: int, origin: fx.Node) -> fx.Node:
    """Return zeros or ones of a value's shape and dtype, computed from it because its row count may be unknown."""
    equal, unequal = (insert(graph, compare, (like, like), origin) for compare in (aten.eq.Tensor, aten.ne.Tensor))
    both = insert(graph, aten.bitwise_or.Tensor if neutral else aten.bitwise_and.Tensor, (equal, unequal), origin)
    return insert(graph, prims.convert_element_type.default, (both, like.meta["val"].dtype), origin)
