"""Fuse an exact product with the gate or norm before it and the residual sum after it."""

from itertools import pairwise
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of, sympy_size
from detcompile.templates.ops import ours

aten = torch.ops.aten
DEVICES = ("cuda",)  # a CPU gains nothing: rows stay in its cache between operations
_PRODUCTS = (ours.exact_linear.default, ours.exact_fused_linear.default)


def fuse_exact_linears(gm: fx.GraphModule) -> fx.GraphModule:
    """bf16(y + exact_linear(exact_rms_norm(x)))  ->  exact_fused_linear(x, norm, residual=y, rounded=True)

    Before the product: exact_rms_norm(x) or exact_function(x) * up, if only exact products read the result. After it: a
    sum, and then exact_function(sum, "bf16"). Views may lie between. Bits do not change.
    """
    for product in gm.graph.find_nodes(op="call_function", target=ours.exact_linear.default):
        if product.meta["val"].device.type in DEVICES:
            _fuse(gm.graph, product)
    gm.graph.eliminate_dead_code()
    return gm


def _fuse(graph: fx.Graph, product: fx.Node) -> None:
    _, w, w_scale, bias, x_digits = product.args
    before, after = _match_before(product), _match_after(product)
    if before is None and after is None:
        return
    x, up, function, norm, eps = before or (product.args[0], None, "", None, 0.0)
    last, residual, rounded = after or (product, None, False)
    arguments = (x, up, function, norm, eps, w, w_scale, bias, residual, rounded, x_digits)
    fused = insert(graph, ours.exact_fused_linear.default, arguments, last)
    view = _only_view(product)
    replace(last, fused if view is product else insert(graph, view.target, (fused, view.args[1]), last))


def _match_before(product: fx.Node) -> tuple[fx.Node, fx.Node | None, str, fx.Node | None, float] | None:
    """Match the norm or gate that makes a product's rows: return x, up, function, norm, eps of exact_fused_linear."""
    rows = product.args[0]
    source = _through_views(rows)
    if not _feeds_products(source):
        return None
    if source.target is ours.exact_rms_norm.default and _can_be_rows(source.args[0], rows):
        x, norm, eps = source.args[:3]
        return _as_rows(x, rows, product), None, "", norm, eps
    gate = _match_gate(source)
    if gate is None or not all(_can_be_rows(factor, rows) for factor in (gate[0].args[0], gate[1])):
        return None
    (x, function), up = gate[0].args, gate[1]
    return _as_rows(x, rows, product), _as_rows(up, rows, product), function, None, 0.0


def _match_after(product: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Match the residual sum of a product: return the last fused node, the residual, and whether the sum is rounded."""
    rows, result = product.args[0], _only_view(product)
    total = _only_user(result, aten.add.Tensor)
    residual = None if total is None else _other_addend(total, result)
    if total is None or residual is None or not _can_be_rows(residual, rows):
        return None
    rounding = _only_user(total, ours.exact_function.default)
    rounded = rounding is not None and rounding.args[1] == "bf16"
    return rounding if rounded else total, _as_rows(residual, rows, total), rounded


def _through_views(node: fx.Node) -> fx.Node:
    """Return the node under any views that keep the last dimension."""
    while node.target in VIEWS and shape_of(node.args[0])[-1] == shape_of(node)[-1]:
        node = node.args[0]
    return node


def _feeds_products(node: fx.Node) -> bool:
    """Return whether only exact products read a node, directly or through views that keep the last dimension."""
    for user in node.users:
        is_view = user.target in VIEWS and shape_of(user)[-1] == shape_of(node)[-1]
        if not (_feeds_products(user) if is_view else user.target in _PRODUCTS):
            return False
    return True


def _match_gate(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Match exact_function(x) * up, with factors of one shape, and return both factors."""
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
    """Return whether rows are contiguous and a view can merge all leading dimensions."""
    sizes, strides = shape_of(node), [sympy_size(stride) for stride in node.meta["val"].stride()]
    leading = [(size, stride) for size, stride in zip(sizes[:-1], strides[:-1], strict=True) if size != 1]
    return strides[-1] == 1 and all(outer[1] == size * stride for outer, (size, stride) in pairwise(leading))


def _as_rows(node: fx.Node, like: fx.Node, origin: fx.Node) -> fx.Node:
    """Return a node as one row for each row of ``like``; insert a view before ``origin`` if needed."""
    rows = _through_views(node)
    if len(shape_of(rows)) == 2:
        return rows
    return insert(node.graph, aten.view.default, (node, [like.args[1][0], int(shape_of(node)[-1])]), origin)


def _only_view(node: fx.Node) -> fx.Node:
    """Return a product's only user if it is a view that keeps the last dimension, else the product."""
    view = _only_user(node, *VIEWS)
    return node if view is None or shape_of(view)[-1] != shape_of(node)[-1] else view


def _only_user(node: fx.Node, *targets: Any) -> fx.Node | None:
    """Return a node's only user if it is a call of one of the targets."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target in targets else None


def _other_addend(total: fx.Node, addend: fx.Node) -> fx.Node | None:
    """Return the sum's other addend if it is float32 and has the same shape, else None."""
    if total.kwargs or len(total.args) != 2 or total.args[0] is total.args[1]:
        return None
    other = total.args[1] if total.args[0] is addend else total.args[0]
    if not isinstance(other, fx.Node) or not isinstance(other.meta["val"], torch.Tensor):
        return None
    matches = other.meta["val"].dtype is torch.float32 and shape_of(other) == shape_of(addend)
    return other if matches else None
