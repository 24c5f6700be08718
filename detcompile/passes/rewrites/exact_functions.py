"""Functions of a graph in exact arithmetic, by the definition of docs/exact.md."""

import math

import torch
from torch import Tensor, fx

from detcompile.passes.graphs import insert, replace
from detcompile.templates.ops import ours

aten = torch.ops.aten
FUNCTIONS = {
    aten.exp.default: "exp",
    aten.exp2.default: "exp2",
    aten.log.default: "log",
    aten.rsqrt.default: "rsqrt",
    aten.sigmoid.default: "sigmoid",
}


def pin_exact_functions(gm: fx.GraphModule) -> fx.GraphModule:
    """exp(x)   ->  exact_function(x, "exp"), and the other FUNCTIONS, of float32 x
    relu(x)  ->  where(x <= 0, 0, x)
    x / 2^k  ->  x * 2^-k, which rounds the same
    x^2      ->  x * x
    native_layer_norm(x, [R], weight, bias, eps)[0]  ->  exact_layer_norm(x, weight or 1, bias or 0, eps)
    """
    for target, name in FUNCTIONS.items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if node.meta["val"].dtype is node.args[0].meta["val"].dtype is torch.float32:
                replace(node, insert(gm.graph, ours.exact_function.default, (node.args[0], name), node))
    for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
        zero = _filled(node, node.meta["val"], [], 0.0)
        below = insert(gm.graph, aten.le.Scalar, (node.args[0], 0), node)
        replace(node, insert(gm.graph, aten.where.self, (below, zero, node.args[0]), node))
    for node in gm.graph.find_nodes(op="call_function", target=aten.div.Tensor):
        divisor = node.args[1]
        if isinstance(divisor, (int, float)) and math.frexp(divisor)[0] == 0.5:
            replace(node, insert(gm.graph, aten.mul.Tensor, (node.args[0], 1 / divisor), node))
    for node in gm.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        if node.args[1] == 2:
            replace(node, insert(gm.graph, aten.mul.Tensor, (node.args[0], node.args[0]), node))
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_layer_norm.default):
        x, shape, weight, bias, eps = node.args
        value = x.meta["val"]
        if len(shape) == 1 and value.dtype is torch.float32 and all(user.args[1] == 0 for user in node.users):
            weight = weight or _filled(node, value, shape, 1.0)
            bias = bias or _filled(node, value, shape, 0.0)
            norm = insert(gm.graph, ours.exact_layer_norm.default, (x, weight, bias, eps), node)
            for user in list(node.users):
                replace(user, norm)
    return gm


def _filled(node: fx.Node, value: Tensor, shape: list[int], number: float) -> fx.Node:
    """Add a constant of a value's dtype and device before a node."""
    with node.graph.inserting_before(node):
        filled = node.graph.call_function(
            aten.full.default, (shape, number), {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        )
    filled.meta = {**node.meta, "val": value.new_full(shape, number)}
    return filled
