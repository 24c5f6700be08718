"""Floating-point reductions over features become row templates, and each norm becomes one template.

A reduction over rows is left alone: the certificate refuses it by name.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace, shape_of
from detcompile.templates.ops import ours
from detcompile.torch_internals.operators import OpOverload

aten, prims = torch.ops.aten, torch.ops.prims

# Operations that Inductor would decompose into its reductions before our passes see them.
KEPT_WHOLE = (
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.logsumexp.default,
    aten._fused_rms_norm.default,
)


def pin_reductions(gm: fx.GraphModule) -> fx.GraphModule:
    """mean(x, dims)  ->  row_sum(x) / R        softmax(x, -1)  ->  detcompile.softmax(x)        see REWRITES"""
    for floating, rewrite in REWRITES.items():
        for node in gm.graph.find_nodes(op="call_function", target=floating):
            dtypes = (node.args[0].meta["val"].dtype, _result_dtype(node))
            summed = all(dtype.is_floating_point for dtype in dtypes) and torch.float64 not in dtypes
            if summed and _has_known_length(node):
                rewrite(gm.graph, node)
    return gm


def reduced_dims(node: fx.Node) -> list[int]:
    """Return the dimensions that a reduction or norm reduces, ascending and >= 0."""
    rank = len(shape_of(node.args[0]))
    if node.target is aten.native_group_norm.default:
        return list(range(1, rank))
    if node.target is aten.native_layer_norm.default or node.target is aten._fused_rms_norm.default:
        return list(range(rank - len(node.args[1]), rank))
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return sorted(dim % rank for dim in dims) if dims else list(range(rank))


def keeps_dims(node: fx.Node) -> bool:
    """Return whether a reduction keeps its dimensions with extent 1."""
    return bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))


def _result_dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).dtype


def _has_known_length(node: fx.Node) -> bool:
    """Return whether the number of terms is known and at least 1."""
    sizes = shape_of(node.args[0])
    return bool(sizes) and not any(sizes[dim].free_symbols or sizes[dim] == 0 for dim in reduced_dims(node))


def _as_rows(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, int]:
    """Return the input with the reduced dimensions last and flattened, and their extent R."""
    x, dims = node.args[0], reduced_dims(node)
    sizes = shape_of(x)
    kept = [dim for dim in range(len(sizes)) if dim not in dims]
    length = math.prod(int(sizes[dim]) for dim in dims)
    if kept + dims != list(range(len(sizes))):
        x = insert(graph, aten.permute.default, (x, kept + dims), node)
    if len(dims) > 1:
        outer = _extents(graph, node, [(node.args[0], dim) for dim in kept])
        x = insert(graph, aten.reshape.default, (x, [*outer, length]), node)
    return x, length


def _extents(graph: fx.Graph, node: fx.Node, dims: Iterable[tuple[fx.Node, int]]) -> list[Any]:
    """Return extents for a reshape: -1 for a single unknown extent, sym_size for several."""
    sizes = [(value, dim, shape_of(value)[dim]) for value, dim in dims]
    left_out = sum(bool(size.free_symbols) for *_, size in sizes) == 1
    return [
        int(size) if not size.free_symbols else -1 if left_out else insert(graph, aten.sym_size.int, (value, dim), node)
        for value, dim, size in sizes
    ]


def _restore(graph: fx.Graph, node: fx.Node, result: fx.Node) -> fx.Node:
    """Restore the reduced dimensions with extent 1 if the operation keeps them."""
    if keeps_dims(node):
        for dim in reduced_dims(node):
            result = insert(graph, aten.unsqueeze.default, (result, dim), node)
    return result


def _cast(graph: fx.Graph, node: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return insert(graph, prims.convert_element_type.default, (value, dtype), node)


def _replace_parts(graph: fx.Graph, node: fx.Node, parts: dict[int, fx.Node]) -> bool:
    """Replace the getitems of a node with several results. Return False, without a change, if others are used."""
    users = list(node.users)
    if any(user.target is not operator.getitem or user.args[1] not in parts for user in users):
        return False
    for user in users:
        replace(user, parts[user.args[1]])
    graph.erase_node(node)
    return True


def _sum(graph: fx.Graph, node: fx.Node) -> None:
    x, _ = _as_rows(graph, node)
    replace(node, _restore(graph, node, insert(graph, ours.row_sum.default, (x, node.meta["val"].dtype), node)))


def _mean(graph: fx.Graph, node: fx.Node) -> None:
    """Sum and divide in float32, with one rounding."""
    x, length = _as_rows(graph, node)
    total = insert(graph, ours.row_sum.default, (x, torch.float32), node)
    mean = insert(graph, aten.div.Tensor, (total, length), node)
    replace(node, _restore(graph, node, _cast(graph, node, mean, node.meta["val"].dtype)))


def _moments(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> dict[int, fx.Node]:
    x, _ = _as_rows(graph, node)
    correction = node.kwargs.get("correction")
    pair = insert(graph, ours.row_var_mean.default, (x, 1.0 if correction is None else float(correction)), node)
    parts = [insert(graph, operator.getitem, (pair, i), node) for i in range(2)]
    return {i: _restore(graph, node, _cast(graph, node, part, dtype)) for i, part in enumerate(parts)}


def _layer_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite a layer norm without the statistics, which only a backward pass reads."""
    x, shape, weight, bias, eps = node.args
    _normed(graph, node, ours.layer_norm.default, [x, weight, bias], len(shape), eps)


def _fused_rms_norm(graph: fx.Graph, node: fx.Node) -> None:
    x, shape, weight, eps = node.args
    eps = torch.finfo(x.meta["val"].dtype).eps if eps is None else eps
    _normed(graph, node, ours.rms_norm.default, [x, weight], len(shape), eps, False)


def _normed(graph: fx.Graph, node: fx.Node, norm: Any, operands: list[fx.Node | None], dims: int, *rest: Any) -> None:
    """Write a norm over the last ``dims`` dimensions as one over a single flattened dimension."""
    x = operands[0]
    sizes = shape_of(x)
    if dims > 1:
        length = math.prod(map(int, sizes[-dims:]))
        outer = _extents(graph, node, [(x, dim) for dim in range(len(sizes) - dims)])
        shapes = [[*outer, length], [length], [length]]
        operands = [
            value and insert(graph, aten.reshape.default, (value, shape), node)
            for value, shape in zip(operands, shapes, strict=False)
        ]
    result = insert(graph, norm, (*operands, *rest), node)
    if dims > 1:
        result = insert(graph, aten.reshape.default, (result, [*outer, *map(int, sizes[-dims:])]), node)
    _replace_parts(graph, node, {0: result})


def _group_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Write a group norm as layer_norm with one row per group, in float32, with one rounding at the end."""
    x, weight, bias, _, channels, _, groups, eps = node.args
    sizes, dtype = shape_of(x), x.meta["val"].dtype
    batch = _extents(graph, node, [(x, 0)])
    shape = [*batch, groups, math.prod(map(int, sizes[1:])) // groups]
    rows = insert(graph, aten.reshape.default, (_cast(graph, node, x, torch.float32), shape), node)
    normed = insert(graph, ours.layer_norm.default, (rows, None, None, eps), node)
    result = insert(graph, aten.reshape.default, (normed, [*batch, *map(int, sizes[1:])]), node)
    for parameter, combine in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
        if parameter is not None:
            of_channel = insert(graph, aten.reshape.default, (parameter, [channels, *[1] * (len(sizes) - 2)]), node)
            result = insert(graph, combine, (result, of_channel), node)
    _replace_parts(graph, node, {0: _cast(graph, node, result, dtype)})


def _last_dim(target: OpOverload):
    """Return a rewrite that moves the reduced dimension to the end and back."""

    def rewrite(graph: fx.Graph, node: fx.Node) -> None:
        (dim,), rank = reduced_dims(node), len(shape_of(node.args[0]))
        order = [*range(dim), *range(dim + 1, rank), dim]
        x = node.args[0]
        if dim != rank - 1:
            x = insert(graph, aten.permute.default, (x, order), node)
        result = insert(graph, target, (x, node.meta["val"].dtype, []), node)
        if dim != rank - 1:
            back = [order.index(place) for place in range(rank)]
            result = insert(graph, aten.permute.default, (result, back), node)
        replace(node, result)

    return rewrite


def _logsumexp(graph: fx.Graph, node: fx.Node) -> None:
    x, _ = _as_rows(graph, node)
    result = insert(graph, ours.logsumexp.default, (x, []), node)
    replace(node, _restore(graph, node, _cast(graph, node, result, node.meta["val"].dtype)))


REWRITES = {
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.var.correction: lambda graph, node: replace(node, _moments(graph, node, node.meta["val"].dtype)[0]),
    aten.var_mean.correction: lambda graph, node: _replace_parts(
        graph, node, _moments(graph, node, node.meta["val"][0].dtype)
    ),
    aten.native_group_norm.default: _group_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten._softmax.default: _last_dim(ours.softmax.default),
    aten._log_softmax.default: _last_dim(ours.log_softmax.default),
    aten.logsumexp.default: _logsumexp,
}


def pin_rms_norms(gm: fx.GraphModule) -> fx.GraphModule:
    """The eight operations of an RMSNorm  ->  rms_norm(x, weight, eps, round_before_weight)

        h = x.float(); n = h * rsqrt(mean(h * h, -1) + eps)
        n.to(x.dtype) * weight                               round_before_weight = True   (Llama, Qwen)
        (n * weight_fp32).to(x.dtype)                        round_before_weight = False  (Gemma)

    Runs before pin_reductions. A norm of another form keeps its operations, and only its mean is pinned.
    """
    for mean in gm.graph.find_nodes(op="call_function", target=aten.mean.dim):
        match = _match_rms_norm(mean)
        if match:
            last, args = match
            replace(last, insert(gm.graph, ours.rms_norm.default, args, last))
    gm.graph.eliminate_dead_code()
    return gm


def _only_user(node: fx.Node, *targets: OpOverload) -> fx.Node | None:
    """Return the node's only reader, if it is one of these operations without keywords such as alpha."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets and not users[0].kwargs else None


def _match_rms_norm(mean: fx.Node) -> tuple[fx.Node, tuple] | None:
    """Return the last operation of the norm and the template's arguments."""
    square = mean.args[0]
    h = square.args[0] if square.args else None
    squared = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
    squared = squared or (square.target is aten.mul.Tensor and square.args[0] is square.args[1])
    if (
        not squared
        or not isinstance(h, fx.Node)
        or h.meta["val"].dtype != torch.float32
        or reduced_dims(mean) != [len(shape_of(h)) - 1]
    ):
        return None
    shifted = _only_user(mean, aten.add.Tensor)
    if shifted is None or not isinstance(shifted.args[1], float):
        return None
    root = _only_user(shifted, aten.rsqrt.default)
    normed = root and _only_user(root, aten.mul.Tensor)
    if normed is None or not keeps_dims(mean) or {normed.args[0], normed.args[1]} != {h, root}:
        return None
    return _match_weight(normed, h, float(shifted.args[1]))


def _match_weight(normed: fx.Node, h: fx.Node, eps: float) -> tuple[fx.Node, tuple] | None:
    widened = h.target is prims.convert_element_type.default
    x = h.args[0] if widened else h
    dtype, length = x.meta["val"].dtype, shape_of(h)[-1]
    rounded = _only_user(normed, prims.convert_element_type.default) if widened else normed
    if rounded is not None and rounded.meta["val"].dtype == dtype:
        scaled = _only_user(rounded, aten.mul.Tensor)
        weight = scaled and _vector(scaled, rounded, length, dtype)
        return (scaled, (x, weight, eps, True)) if weight else (rounded, (x, None, eps, True))
    scaled = _only_user(normed, aten.mul.Tensor)
    weight = scaled and _vector(scaled, normed, length, None)
    narrowed = weight and _only_user(scaled, prims.convert_element_type.default)
    if narrowed and narrowed.meta["val"].dtype == dtype:
        return narrowed, (x, weight, eps, False)
    return None


def _vector(product: fx.Node, other: fx.Node, length: object, dtype: torch.dtype | None) -> fx.Node | None:
    """Return the factor of ``product`` that is a weight [R] of ``dtype`` (None: any dtype)."""
    factors = [arg for arg in product.args if arg is not other]
    if len(factors) != 1 or not isinstance(factors[0], fx.Node):
        return None
    value = factors[0].meta["val"]
    return factors[0] if shape_of(factors[0]) == (length,) and dtype in (None, value.dtype) else None
