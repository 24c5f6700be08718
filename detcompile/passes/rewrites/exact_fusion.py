"""Fuse a product of exact arithmetic with the gate or norm before it and the residual sum after it."""

from itertools import pairwise
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of, sympy_size
from detcompile.templates.ops import ours

aten = torch.ops.aten
DEVICES = ("cuda",)  # a CPU's operations keep rows in its cache
_PRODUCTS = (ours.exact_linear.default, ours.exact_fused_linear.default)


def fuse_exact_linears(gm: fx.GraphModule) -> fx.GraphModule:
    """bf16(y + exact_linear(exact_rms_norm(x)))  ->  exact_fused_linear(x, norm, residual=y, rounded=True)

    Before the product: exact_rms_norm(x), or exact_function(x) * up, if only such products read it. After it: a sum,
    and its exact_function "bf16". Views may lie between. The bits stay the same.
    """
    for product in gm.graph.find_nodes(op="call_function", target=ours.exact_linear.default):
        if product.meta["val"].device.type in DEVICES:
            _fuse(gm.graph, product)
    gm.graph.eliminate_dead_code()
    return gm


def _fuse(graph: fx.Graph, product: fx.Node) -> None:
    x, w, w_scale, bias, x_digits = product.args
    source = _through_views(x)
    up, function, norm, eps = None, "", None, 0.0
    if _feeds_products(source):
        gate = _match_gate(source)
        if source.target is ours.exact_rms_norm.default and _can_be_rows(source.args[0], x):
            norm, eps = source.args[1:3]
            x = _as_rows(source.args[0], x, product)
        elif gate is not None and all(_can_be_rows(part, x) for part in (gate[0].args[0], gate[1])):
            function = gate[0].args[1]
            x, up = (_as_rows(part, x, product) for part in (gate[0].args[0], gate[1]))
    last, result = product, _only_view(product)
    residual, rounded = None, False
    total = _only_user(result, aten.add.Tensor)
    other = total and _other_addend(total, result)
    if total is not None and other is not None and _can_be_rows(other, product.args[0]):
        last = total
        residual = _as_rows(other, product.args[0], total)
        rounding = _only_user(total, ours.exact_function.default)
        if rounding is not None and rounding.args[1] == "bf16":
            last, rounded = rounding, True
    if up is None and norm is None and residual is None:
        return
    arguments = (x, up, function, norm, eps, w, w_scale, bias, residual, rounded, x_digits)
    fused = insert(graph, ours.exact_fused_linear.default, arguments, last)
    replace(last, fused if result is product else insert(graph, result.target, (fused, result.args[1]), last))


def _through_views(node: fx.Node) -> fx.Node:
    """Return the node below views that keep the length of rows."""
    while node.target in VIEWS and shape_of(node.args[0])[-1] == shape_of(node)[-1]:
        node = node.args[0]
    return node


def _feeds_products(node: fx.Node) -> bool:
    """Return whether exact_linear alone reads a node as rows, through any views."""
    for user in node.users:
        is_view = user.target in VIEWS and shape_of(user)[-1] == shape_of(node)[-1]
        if not (_feeds_products(user) if is_view else user.target in _PRODUCTS):
            return False
    return True


def _match_gate(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Match exact_function(x) * up, all of one shape, and return both factors."""
    if node.target is not aten.mul.Tensor or node.kwargs:
        return None
    for gate, up in (node.args, node.args[::-1]):
        is_gate = isinstance(gate, fx.Node) and gate.target is ours.exact_function.default and len(gate.users) == 1
        if is_gate and isinstance(up, fx.Node) and shape_of(gate) == shape_of(up) == shape_of(node):
            return gate, up
    return None


def _can_be_rows(node: fx.Node, like: fx.Node) -> bool:
    """Return whether a node can be viewed as one row for each row of ``like`` [M, K]."""
    rows = _through_views(node)
    return len(shape_of(rows)) == 2 or (like.target in VIEWS and _has_rows(node))


def _has_rows(node: fx.Node) -> bool:
    """Return whether all leading dimensions can be viewed as one, and rows are contiguous."""
    sizes, strides = shape_of(node), [sympy_size(stride) for stride in node.meta["val"].stride()]
    leading = [(size, stride) for size, stride in zip(sizes[:-1], strides[:-1], strict=True) if size != 1]
    return strides[-1] == 1 and all(outer[1] == size * stride for outer, (size, stride) in pairwise(leading))


def _as_rows(node: fx.Node, like: fx.Node, origin: fx.Node) -> fx.Node:
    rows = _through_views(node)
    if len(shape_of(rows)) == 2:
        return rows
    return insert(node.graph, aten.view.default, (node, [like.args[1][0], int(shape_of(node)[-1])]), origin)


def _only_view(node: fx.Node) -> fx.Node:
    """Return the view of a product if it is its only reader and keeps rows, else the product."""
    view = _only_user(node, *VIEWS)
    return node if view is None or shape_of(view)[-1] != shape_of(node)[-1] else view


def _only_user(node: fx.Node, *targets: Any) -> fx.Node | None:
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target in targets else None


def _other_addend(total: fx.Node, one: fx.Node) -> fx.Node | None:
    """Return the other addend if it is float32 and has the shape of ``one``, else None."""
    if total.kwargs or len(total.args) != 2 or total.args[0] is total.args[1]:
        return None
    other = total.args[1] if total.args[0] is one else total.args[0]
    if not isinstance(other, fx.Node) or not isinstance(other.meta["val"], torch.Tensor):
        return None
    same = other.meta["val"].dtype is torch.float32 and shape_of(other) == shape_of(one)
    return other if same else None
