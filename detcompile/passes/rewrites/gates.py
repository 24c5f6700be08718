"""The gate of an MLP becomes one operation, and then one with the product that it reads.

In Inductor's kernel every element divides in 64 bits to find its row; and what one launch computes need not be written.
"""

from typing import Any

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of, sympy_size
from detcompile.templates.ops import ours

__all__ = ["fuse_gated_products", "fuse_gates"]

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
DEVICES = ("cuda",)  # on a CPU Inductor's loop is as fast


def fuse_gates(gm: fx.GraphModule) -> fx.GraphModule:
    """mul(round(g / (exp(-g) + 1)), u)  ->  silu_mul(g, u)          g and u of one shape and dtype

    A silu that something else reads too, or whose product broadcasts or does not lie in rows as silu_mul's result does
    (views that follow were traced with its strides), keeps its operations. The bits are the same for float32; for 16
    bits they are silu_mul's own.
    """
    for mul in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        value = mul.meta["val"]
        if mul.kwargs or value.device.type not in DEVICES or not _lies_in_rows(value):
            continue
        for silu, up in (mul.args, mul.args[::-1]):
            gate = _match_silu(silu)
            if gate is not None and isinstance(up, fx.Node) and _is_like(gate, mul) and _is_like(up, mul):
                replace(mul, insert(gm.graph, ours.silu_mul.default, (gate, up), mul))
                break
    gm.graph.eliminate_dead_code()
    return gm


def fuse_gated_products(gm: fx.GraphModule) -> fx.GraphModule:
    """y = matmul(x, w), silu_mul(y[:, :F], y[:, F:])  ->  gated_matmul(x, w)          w [2 F, K]

    Where nothing else reads the product; after the linears of one input share it (passes/rewrites/merged_linears.py).
    The bits stay.
    """
    for gate in gm.graph.find_nodes(op="call_function", target=ours.silu_mul.default):
        product = _match_halves(*gate.args)
        if product is not None:
            out = insert(gm.graph, ours.gated_matmul.default, product.args[:2], gate)
            half = gate.args[0]
            if half.target in VIEWS:
                out = insert(gm.graph, half.target, (out, half.args[1]), gate)
            replace(gate, out)
    gm.graph.eliminate_dead_code()
    return gm


def _match_halves(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The product whose first half of columns is ``gate`` and whose second is ``up``, behind whatever views."""
    halves = []
    for node in (gate, up):
        while node.target in VIEWS and len(node.users) == 1:
            node = node.args[0]
        if node.target is not aten.slice.Tensor or len(node.users) != 1 or node.args[1] != 1 or len(node.args) != 4:
            return None
        halves.append(node.args)
    (product, _, *first), (other, _, *second) = halves
    whole = product is other and product.target is ours.matmul.default and len(product.users) == 2
    if not whole or any(arg is not None for arg in product.args[2:4]) or product.args[4] or len(product.args) != 5:
        return None
    width = int(product.meta["val"].shape[1])
    return product if (first, second) == ([0, width // 2], [width // 2, width]) else None


def _is_like(x: fx.Node, mul: fx.Node) -> bool:
    return shape_of(x) == shape_of(mul) and x.meta["val"].dtype == mul.meta["val"].dtype


def _lies_in_rows(value: torch.Tensor) -> bool:
    step = sympy.Integer(1)
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if sympy_size(size) != 1 and sympy_size(stride) != step:
            return False
        step *= sympy_size(size)
    return True


def _match_silu(node: Any) -> fx.Node | None:
    """g of round(float32(g) / (exp(-float32(g)) + 1)), the decomposition of aten.silu."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    rounded = node.meta["val"].dtype
    quotient = node.args[0] if node.target is convert else node
    if not _is(quotient, aten.div.Tensor):
        return None
    g, total = quotient.args
    if not _is(total, aten.add.Tensor) or total.args[1] != 1 or not _is(total.args[0], aten.exp.default):
        return None
    negative = total.args[0].args[0]
    if not _is(negative, aten.neg.default) or negative.args[0] is not g or not isinstance(g, fx.Node):
        return None
    if rounded is torch.float32:
        return g
    return g.args[0] if g.target is convert and g.meta["val"].dtype is torch.float32 else None


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target and not node.kwargs
