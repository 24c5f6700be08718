"""Convolutions and pools become products, sums and maxima over sliding windows."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import insert, replace, shape_of, sympy_size
from detcompile.templates.ops import ours

aten, prims = torch.ops.aten, torch.ops.prims


def pin_convolutions(gm: fx.GraphModule) -> fx.GraphModule:
    """convolution(x_NCS, w_OCk, bias)  ->  mm(windows(x) [N * S, C * k], w [C * k, O]) + bias

    A product sums over a window, channel by channel, in the order of matmul. Each group is a separate product.
    Transposed convolutions and unknown extents are left to the certificate.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, w, _, _, _, _, transposed, _, _ = node.args
        if not transposed and not any(size.free_symbols for size in (*shape_of(x)[1:], *shape_of(w))):
            _convolve(gm.graph, node)
    return gm


def _convolve(graph: fx.Graph, node: fx.Node) -> None:
    x, w, bias, stride, padding, dilation, _, _, groups = node.args
    kernel, rank = [int(size) for size in shape_of(w)[2:]], len(shape_of(w)) - 2
    batch, channels, outputs = _extent(x, 0), int(shape_of(x)[1]), int(shape_of(w)[0])
    places, terms = [int(size) for size in shape_of(node)[2:]], channels // groups * math.prod(kernel)
    windows = _windows(graph, node, x, kernel, [_each(given, rank) for given in (stride, padding, dilation)], 0)
    apart = _reshape(graph, node, windows, [batch, groups, channels // groups, *places, *kernel])
    order = [1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank)]
    rows = insert(graph, aten.permute.default, (apart, order), node)
    rows = _reshape(graph, node, rows, [groups, batch, math.prod(places), terms])
    rows = _reshape(graph, node, rows, [groups, -1, terms])
    weights = _reshape(graph, node, w, [groups, outputs // groups, terms])
    weights = insert(graph, aten.permute.default, (weights, [0, 2, 1]), node)
    if groups == 1:
        rows, weights = (insert(graph, aten.select.int, (value, 0, 0), node) for value in (rows, weights))
        operands, multiply = (
            ((rows, weights), aten.mm.default) if bias is None else ((bias, rows, weights), aten.addmm.default)
        )
        product = insert(graph, multiply, operands, node)
    else:
        product = insert(graph, aten.bmm.default, (rows, weights), node)
    product = _reshape(graph, node, product, [groups, batch, math.prod(places), outputs // groups])
    product = insert(graph, aten.permute.default, (product, [1, 0, 3, 2]), node)
    product = insert(graph, aten.clone.default, (product,), node, memory_format=torch.contiguous_format)
    result = _reshape(graph, node, product, [batch, outputs, *places])
    if groups > 1 and bias is not None:
        result = insert(graph, aten.add.Tensor, (result, _reshape(graph, node, bias, [outputs, *[1] * rank])), node)
    replace(node, result)


def _each(given: Sequence[int], rank: int) -> list[int]:
    """Repeat a single number for all dimensions."""
    return list(given) * rank if len(given) == 1 else list(given)


def _extent(x: fx.Node, dim: int) -> int:
    """Return an extent for a reshape: -1 if it is unknown."""
    size = shape_of(x)[dim]
    return -1 if size.free_symbols else int(size)


def _reshape(graph: fx.Graph, node: fx.Node, value: fx.Node, shape: Sequence[int]) -> fx.Node:
    return insert(graph, aten.reshape.default, (value, list(shape)), node)


def _windows(
    graph: fx.Graph, node: fx.Node, x: fx.Node, kernel: list[int], moves: Sequence[Sequence[int]], padding_value: float
) -> fx.Node:
    """x [..., S] -> [..., places, kernel]: windows over the last dimensions. Moves: stride, padding, dilation."""
    stride, padding, dilation = moves
    first = len(shape_of(x)) - len(kernel)
    if any(padding):
        sides = [side for amount in reversed(padding) for side in (amount, amount)]
        x = insert(graph, aten.constant_pad_nd.default, (x, sides, padding_value), node)
    for i, size in enumerate(kernel):
        span = dilation[i] * (size - 1) + 1
        x = insert(graph, aten.unfold.default, (x, first + i, span, stride[i]), node)
        if dilation[i] > 1:
            x = insert(graph, aten.slice.Tensor, (x, len(shape_of(x)) - 1, 0, span, dilation[i]), node)
    return x


def pin_pools(gm: fx.GraphModule) -> fx.GraphModule:
    """avg_pool2d(x, kernel)  ->  row_sum(windows(x)) / terms         max_pool2d(x, kernel)  ->  amax(windows(x))

    Averages over windows with different numbers of terms, and indices of maxima, are left to the certificate.
    """
    for target, (rank, what) in POOLS.items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            x = node.args[0]
            if any(size.free_symbols for size in shape_of(x)[-rank - 1 :]) or len(shape_of(x)) < rank + 1:
                continue
            windows = what(node, rank)
            if windows is not None:
                _pool(gm.graph, node, *windows)
    return gm


def _average(node: fx.Node, rank: int) -> tuple[list[int], list[list[int]], int] | None:
    given: tuple[Any, ...] = (*node.args, *(None, None, [], [0], False, True, None)[len(node.args) :])
    _, kernel, stride, padding, _, count_padding, divisor = given
    kernel, padding = _each(kernel, rank), _each(padding, rank)
    if node.kwargs or (any(padding) and not count_padding and divisor is None):
        return None
    return kernel, [_each(stride, rank) or kernel, padding, [1] * rank], divisor or math.prod(kernel)


def _greatest(node: fx.Node, rank: int) -> tuple[list[int], list[list[int]], None] | None:
    given: tuple[Any, ...] = (*node.args, *(None, None, [], [0], [1], False)[len(node.args) :])
    _, kernel, stride, padding, dilation, _ = given
    kernel = _each(kernel, rank)
    moves = [_each(stride, rank) or kernel, _each(padding, rank), _each(dilation, rank)]
    return None if node.kwargs else (kernel, moves, None)


def _equal_parts(node: fx.Node, rank: int) -> tuple[list[int], list[list[int]]] | None:
    """Return the windows of an adaptive pool if all have the same size."""
    whole, parts = ([int(size) for size in shape_of(node.args[0])[-rank:]], _each(node.args[1], rank))
    if any(size % part for size, part in zip(whole, parts, strict=True)):
        return None
    kernel = [size // part for size, part in zip(whole, parts, strict=True)]
    return kernel, [kernel, [0] * rank, [1] * rank]


def _adaptive_average(node: fx.Node, rank: int) -> tuple[list[int], list[list[int]], int] | None:
    windows = _equal_parts(node, rank)
    return windows and (*windows, math.prod(windows[0]))


def _adaptive_greatest(node: fx.Node, rank: int) -> tuple[list[int], list[list[int]], None] | None:
    windows = _equal_parts(node, rank)
    return windows and (*windows, None)


# Dimensions of a window, and the reader of a call's arguments: kernel, moves, and the divisor of a sum.
POOLS: dict[Any, tuple[int, Any]] = {
    aten.avg_pool2d.default: (2, _average),
    aten.avg_pool3d.default: (3, _average),
    aten._adaptive_avg_pool2d.default: (2, _adaptive_average),
    aten._adaptive_avg_pool3d.default: (3, _adaptive_average),
    aten.max_pool2d_with_indices.default: (2, _greatest),
    aten.max_pool3d_with_indices.default: (3, _greatest),
    aten.adaptive_max_pool2d.default: (2, _adaptive_greatest),
    aten.adaptive_max_pool3d.default: (3, _adaptive_greatest),
}


def _pool(graph: fx.Graph, node: fx.Node, kernel: list[int], moves: list[list[int]], divisor: int | None) -> None:
    """Rewrite a pool. Averages are float32 until they are rounded. A call whose indices are read stays."""
    value = node.meta["val"] if divisor else node.meta["val"][0]
    indices_read = divisor is None and any(user.args[1] for user in node.users)
    summed = value.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if indices_read or not value.dtype.is_floating_point or (divisor and not summed):
        return
    windows = _windows(graph, node, node.args[0], kernel, moves, 0 if divisor else -math.inf)
    places = shape_of(windows)[: -len(kernel)]
    if places != tuple(map(sympy_size, value.shape)):  # ceil_mode: the last windows have fewer terms
        return
    outer = [_extent(windows, dim) for dim in range(len(places))]
    rows = _reshape(graph, node, windows, [*outer, math.prod(kernel)])
    if divisor is None:
        result = insert(graph, aten.amax.default, (rows, [-1]), node)
        for user in list(node.users):
            replace(user, result)
        graph.erase_node(node)
        return
    total = insert(graph, ours.row_sum.default, (rows, torch.float32), node)
    mean = insert(graph, aten.div.Tensor, (total, divisor), node)
    replace(node, insert(graph, prims.convert_element_type.default, (mean, value.dtype), node))
