"""Replace functions, norms and products in a graph's code by those of exact arithmetic (docs/exact.md)."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from detcompile.orders.exact import ARITHMETICS
from detcompile.passes.graphs import arguments_of, insert, replace
from detcompile.passes.rewrites.matmuls import pin_batched_products, pin_matmuls
from detcompile.passes.rewrites.reductions import pin_reductions
from detcompile.templates.ops import ours

aten = torch.ops.aten
_EXPONENT_LIMIT = 126  # below it, a power of two and its reciprocal are normal float32
FUNCTIONS = {
    aten.erf.default: "erf",
    aten.exp.default: "exp",
    aten.exp2.default: "exp2",
    aten.floor.default: "floor",
    aten.log.default: "log",
    aten.log1p.default: "log1p",
    aten.rsqrt.default: "rsqrt",
    aten.sigmoid.default: "sigmoid",
    aten.sqrt.default: "sqrt",
    aten.tanh.default: "tanh",
}


def pin_exact_functions(gm: fx.GraphModule, arithmetic: str) -> fx.GraphModule:
    """exp(x)  ->  exact_function(x, "exp"), and likewise the other FUNCTIONS of float32 x

    REWRITES build other operations from FUNCTIONS, selections and products. Reductions and matrix products first become
    templates of the default numerics, which have fewer variants to match.
    """
    _rewrite(gm, {aten.native_layer_norm.default: _layer_norm})
    gm = pin_matmuls(pin_reductions(pin_batched_products(gm)))
    _rewrite(gm, {ours.expert_matmul.default: _expert_product(arithmetic), **REWRITES})
    for target, name in FUNCTIONS.items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if _is_single(node):
                replace(node, _function(gm.graph, node, node.args[0], name))
    return gm


def _rewrite(gm: fx.GraphModule, table: Mapping[Any, Callable[[fx.Graph, fx.Node], None]]) -> None:
    for target, rewrite in table.items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if _is_single(node):
                rewrite(gm.graph, node)


def _is_single(node: fx.Node) -> bool:
    """Return whether all results of a node are float32, and so are all floats that it reads."""
    value = node.meta["val"]
    results = [part for part in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(part, Tensor)]
    tensors = [*results, *(arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta["val"], Tensor))]
    floats = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
    return {*floats} == {torch.float32} and all(part.dtype is torch.float32 for part in results)


def _function(graph: fx.Graph, node: fx.Node, x: fx.Node, name: str) -> fx.Node:
    return insert(graph, ours.exact_function.default, (x, name), node)


def _select(graph: fx.Graph, node: fx.Node, condition: fx.Node, this: Any, other: Any) -> fx.Node:
    this, other = (part if isinstance(part, fx.Node) else _filled(node, [], part) for part in (this, other))
    return insert(graph, aten.where.self, (condition, this, other), node)


def _relu(graph: fx.Graph, node: fx.Node) -> None:
    """relu(x)  ->  where(x <= 0, 0, x)"""
    below = insert(graph, aten.le.Scalar, (node.args[0], 0), node)
    replace(node, _select(graph, node, below, 0.0, node.args[0]))


def _clamp(graph: fx.Graph, node: fx.Node) -> None:
    """clamp(x, low, high)  ->  x = where(x < low, low, x); where(x > high, high, x).     NaN stays NaN."""
    given = arguments_of(node)
    x = given["self"]
    for compare, bound in ((aten.lt.Scalar, given.get("min")), (aten.gt.Scalar, given.get("max"))):
        if bound is not None:
            x = _select(graph, node, insert(graph, compare, (x, bound), node), float(bound), x)
    replace(node, x)


def _extreme(compare: Any) -> Callable[[fx.Graph, fx.Node], None]:
    """minimum(x, y)  ->  where((x < y) | (x != x), x, y); maximum compares by >.     NaN stays NaN."""

    def rewrite(graph: fx.Graph, node: fx.Node) -> None:
        x, y = node.args
        kept = insert(graph, compare, (x, y), node)
        kept = insert(graph, aten.logical_or.default, (kept, insert(graph, aten.ne.Tensor, (x, x), node)), node)
        replace(node, _select(graph, node, kept, x, y))

    return rewrite


def _divide(graph: fx.Graph, node: fx.Node) -> None:
    """x / 2^k  ->  x * 2^-k, which rounds the same         x / y  ->  exact_divide(x, y)"""
    x, y = node.args
    mantissa, exponent = math.frexp(y) if isinstance(y, (int, float)) else (0.0, 0)
    if mantissa == 0.5 and abs(exponent) < _EXPONENT_LIMIT:
        replace(node, insert(graph, aten.mul.Tensor, (x, 1 / y), node))
        return
    x, y = (part if isinstance(part, fx.Node) else _filled(node, [], part) for part in (x, y))
    replace(node, insert(graph, ours.exact_divide.default, (x, y), node))


def _reciprocal(graph: fx.Graph, node: fx.Node) -> None:
    """reciprocal(x)  ->  exact_divide(1, x)"""
    replace(node, insert(graph, ours.exact_divide.default, (_filled(node, [], 1.0), node.args[0]), node))


def _power(graph: fx.Graph, node: fx.Node) -> None:
    """x^1  ->  x     x^2  ->  x * x     x^3  ->  x * x * x     x^0.5, x^-0.5  ->  sqrt, rsqrt     x^-1  ->  1 / x"""
    x, exponent = node.args
    if exponent == 1:
        replace(node, x)
    elif exponent in (2, 3):
        power = insert(graph, aten.mul.Tensor, (x, x), node)
        replace(node, power if exponent == 2 else insert(graph, aten.mul.Tensor, (power, x), node))
    elif exponent in (0.5, -0.5):
        replace(node, _function(graph, node, x, "sqrt" if exponent > 0 else "rsqrt"))
    elif exponent == -1:
        _reciprocal(graph, node)


def _layer_norm(graph: fx.Graph, node: fx.Node) -> None:
    """native_layer_norm(x, [R], weight, bias, eps)[0]  ->  exact_layer_norm(x, weight or 1, bias or 0, eps)"""
    x, shape, weight, bias, eps = node.args
    if len(shape) == 1 and all(user.args[1] == 0 for user in node.users):
        weight = weight or _filled(node, shape, 1.0)
        bias = bias or _filled(node, shape, 0.0)
        norm = insert(graph, ours.exact_layer_norm.default, (x, weight, bias, eps), node)
        for user in list(node.users):
            replace(user, norm)


def _matmul(graph: fx.Graph, node: fx.Node) -> None:
    """matmul(x, w, bias)  ->  exact_linear(x, *exact_quantize(w), bias), with two digits on both sides"""
    given = arguments_of(node)
    if given["residual"] is None:
        digits, scales = _quantized(graph, node, given["w"], 2)
        replace(node, insert(graph, ours.exact_linear.default, (given["x"], digits, scales, given["bias"], 2), node))


def _expert_product(arithmetic: str) -> Callable[[fx.Graph, fx.Node], None]:
    """expert_matmul(x, ids, w, bias)  ->  exact_expert_linear(x, ids, *exact_quantize(w), bias)"""
    numerics = ARITHMETICS[arithmetic]

    def rewrite(graph: fx.Graph, node: fx.Node) -> None:
        given = arguments_of(node)
        digits, scales = _quantized(graph, node, given["w"], numerics.weights)
        product = (given["x"], given["ids"], digits, scales, given["bias"], numerics.activations)
        replace(node, insert(graph, ours.exact_expert_linear.default, product, node))

    return rewrite


def _quantized(graph: fx.Graph, node: fx.Node, w: fx.Node, digits: int) -> list[fx.Node]:
    """Quantize a weight in the graph, so in every step. Linears have quantized weights and do not need this."""
    pair = insert(graph, ours.exact_quantize.default, (w, digits, True), node)
    return [insert(graph, operator.getitem, (pair, index), node) for index in range(2)]


def _sum(graph: fx.Graph, node: fx.Node) -> None:
    """row_sum(x)  ->  exact_sum(x)"""
    replace(node, insert(graph, ours.exact_sum.default, (node.args[0],), node))


def _softmax(graph: fx.Graph, node: fx.Node) -> None:
    """softmax(x)  ->  exact_softmax(x)"""
    replace(node, insert(graph, ours.exact_softmax.default, (node.args[0],), node))


def _rms_norm(graph: fx.Graph, node: fx.Node) -> None:
    """rms_norm(x, weight, eps)  ->  exact_rms_norm(x, weight or 1, eps)"""
    x, weight, eps, *_ = node.args
    weight = weight or _filled(node, [int(x.meta["val"].shape[-1])], 1.0)
    replace(node, insert(graph, ours.exact_rms_norm.default, (x, weight, eps), node))


def _filled(node: fx.Node, shape: list[int], number: float) -> fx.Node:
    """Insert a float32 constant before a node, on the node's device."""
    like = node.args[0].meta["val"]
    with node.graph.inserting_before(node):
        filled = node.graph.call_function(
            aten.full.default, (shape, number), {"dtype": like.dtype, "device": like.device, "pin_memory": False}
        )
    filled.meta = {**node.meta, "val": like.new_full(shape, number)}
    return filled


REWRITES: Mapping[Any, Callable[[fx.Graph, fx.Node], None]] = {
    aten.clamp.default: _clamp,
    aten.clamp_max.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.div.Tensor: _divide,
    aten.maximum.default: _extreme(aten.gt.Tensor),
    aten.minimum.default: _extreme(aten.lt.Tensor),
    aten.pow.Tensor_Scalar: _power,
    aten.reciprocal.default: _reciprocal,
    aten.relu.default: _relu,
    ours.matmul.default: _matmul,
    ours.rms_norm.default: _rms_norm,
    ours.row_sum.default: _sum,
    ours.softmax.default: _softmax,
}
