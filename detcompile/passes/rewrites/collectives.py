"""A model's all_reduce of a matrix product becomes the declared tree. A single rank computes the whole tree.

Rank r of the group must hold the r-th range of K. Other collectives stay, and the certificate refuses them by name: a
product with a bias or with other readers, and other values, reductions and dtypes.
"""

from typing import NamedTuple

import torch
from torch import fx

from detcompile.errors import DetcompileError
from detcompile.orders.numerics import Numerics, matmul_order
from detcompile.passes.graphs import VIEWS, insert, place_of
from detcompile.passes.rewrites.matmuls import transposed_weight
from detcompile.templates.ops import ours
from detcompile.torch_internals.distributed import process_group
from detcompile.torch_internals.operators import c10d

aten = torch.ops.aten
IN_TURN = (ours.exact_linear_all_reduce.default, ours.exact_expert_linear_all_reduce.default)


class _Sum(NamedTuple):
    """wait_tensor(all_reduce(product, "sum", group)), or of a view of the product."""

    product: fx.Node  # mm(x, w_KN)
    view: fx.Node | None
    reduced: fx.Node
    total: fx.Node
    copy: fx.Node | None  # into the product, where all_reduce was called on it in place


def pin_collectives(gm: fx.GraphModule, numerics: Numerics) -> fx.GraphModule:
    """all_reduce(mm(x, w_KN), "sum")  ->  matmul_all_reduce(x, w_NK, None, None, below, above)

    In a group of one:  matmul(x, w_NK, None, None, radices).

    Raises:
        NumericsError: K does not split into equal leaves.
        InvalidInput: products of this dtype have no order.
    """
    for reduced in gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        match = _sum_of(reduced)
        if match is not None and process_group(reduced.args[2]).size() in numerics.tp_sizes:
            _pin(gm.graph, match, numerics)
    return gm


def order_collectives(gm: fx.GraphModule) -> fx.GraphModule:
    """all_reduce(x, ...)  ->  all_reduce(x, ..., the one before), unless it reads that one already

    Ranks of exact arithmetic may hold unequal shares, for which a compiler may choose unequal orders. An argument that
    is not needed would still cross the boundaries at which a graph is cut into layers.
    """
    last: fx.Node | None = None
    for node in gm.graph.nodes:
        if node.target in IN_TURN:
            if last is not None and not _reads(node, last):
                node.args = (*node.args, last)
            last = node
    return gm


def _reads(node: fx.Node, other: fx.Node) -> bool:
    """Return whether a node depends on another one."""
    seen, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return other in seen


def _sum_of(reduced: fx.Node) -> _Sum | None:
    value, operation, _ = reduced.args
    view = value if value.target in VIEWS else None
    product = value if view is None else value.args[0]
    waits = [user for user in reduced.users if user.target is c10d.wait_tensor.default]
    if operation != "sum" or product.target is not aten.mm.default or len(waits) != 1 or len(reduced.users) != 1:
        return None
    total = waits[0]
    others = [user for user in value.users if user is not reduced]
    copy = others[0] if len(others) == 1 and others[0].target is aten.copy.default else None
    if copy is not None and (copy.args != (value, total) or len(total.users) != 1):
        return None
    if others != [node for node in (copy,) if node is not None] or (view is not None and len(product.users) != 1):
        return None  # something reads a rank's share
    return _Sum(product, view, reduced, total, copy)


def _pin(graph: fx.Graph, match: _Sum, numerics: Numerics) -> None:
    x, w_KN = match.product.args
    w_NK = transposed_weight(graph, w_KN, match.product)
    group = match.reduced.args[2]
    size = process_group(group).size()
    try:
        matmul_order(size * int(w_KN.meta["val"].shape[0]), x.meta["val"].dtype, numerics.radices)
    except DetcompileError as error:
        raise type(error)(f"the product at {place_of(match.product)}, which all_reduce adds up: {error}") from None
    if size == 1:
        pinned = insert(graph, ours.matmul.default, (x, w_NK, None, None, list(numerics.radices)), match.product)
    else:
        above, below = map(list, numerics.split_radices(size))
        given = (x, w_NK, None, None, below, above, group, match.product.meta["val"].dtype)
        pinned = insert(graph, ours.matmul_all_reduce.default, given, match.product)
    if match.view is not None:
        pinned = insert(graph, match.view.target, (pinned, *match.view.args[1:]), match.view)
    (match.copy or match.total).replace_all_uses_with(pinned)
    for dead in (match.copy, match.total, match.reduced, match.view, match.product):
        if dead is not None:
            graph.erase_node(dead)
