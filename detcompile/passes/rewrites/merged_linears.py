"""Linears that read one input become one matrix product over their concatenated weights: q, k and v; gate and up.

Every element of a product is a separate sum, in an order that depends on K only, so the bits stay the same. Two steps:
`merge_linears` writes the concatenation of the weights into the graph. `lift_weights` makes it an input, which the
caller of the graph concatenates once (`joined`), so that no step pays for it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of
from detcompile.passes.programs.async_weights import wait_for_weights
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import forget_eager_inputs, set_source_trace

aten = torch.ops.aten


def merge_linears(gm: fx.GraphModule) -> fx.GraphModule:
    """matmul(x, w_q), matmul(x, w_k)  ->  y = matmul(x, cat([w_q, w_k])), y[:, :Nq], y[:, Nq:]

    Only if each weight and bias is a contiguous input of the graph without other readers, all or none of the linears
    have a bias, and no sum takes a tree or a residual.
    """
    gm.graph.eliminate_dead_code()  # an unused transpose would count as a reader of its weight
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="call_function", target=ours.matmul.default):
        if _is_plain(node):
            groups[_kind(node)].append(node)
    for products in groups.values():
        if len(products) > 1:
            _fuse(gm.graph, products)
    for node in gm.graph.nodes:  # outdated strides; our operations take any
        forget_eager_inputs(node)
    return gm


def _is_plain(product: fx.Node) -> bool:
    x, w, bias, residual, radices = product.args[:5]
    inputs = [w] if bias is None else [w, bias]
    alone = all(node.op == "placeholder" and len(node.users) == 1 and node is not x for node in inputs)
    alone &= all(node.meta["val"].is_contiguous() for node in inputs)  # as a view of the whole is
    return alone and residual is None and not radices and len(product.args) == 5 and not product.kwargs


def _kind(product: fx.Node) -> tuple:
    """Return what merged linears share: the rows that they read, through any view, and dtypes."""
    x, w, bias = product.args[:3]
    sizes = shape_of(x)
    while x.target in VIEWS:
        x = x.args[0]
    return x, sizes, w.meta["val"].dtype, None if bias is None else bias.meta["val"].dtype


def _fuse(graph: fx.Graph, products: list[fx.Node]) -> None:
    """Fuse products, given in graph order, at the first of them."""
    first = products[0]
    x, _, bias = first.args[:3]
    weight = insert(graph, aten.cat.default, ([product.args[1] for product in products],), first)
    if bias is not None:
        bias = insert(graph, aten.cat.default, ([product.args[2] for product in products],), first)
    fused = insert(graph, ours.matmul.default, (x, weight, bias, None, []), first)
    widths = [int(product.meta["val"].shape[1]) for product in products]
    parts = []
    for end, width, product in zip(itertools.accumulate(widths), widths, products, strict=True):
        part = insert(graph, aten.slice.Tensor, (fused, 1, end - width, end), first)
        if _mixes_rows(product):  # the view needs contiguous rows
            part = insert(graph, aten.clone.default, (part,), first)
        set_source_trace(part, product)
        parts.append(part)
    for part, product in zip(parts, products, strict=True):
        replace(product, part)


def _mixes_rows(product: fx.Node) -> bool:
    """Return whether a view of the product joins rows and features in one dimension."""
    rows = shape_of(product)[0]
    views = [user for user in product.users if user.target in VIEWS]
    while views:
        view = views.pop()
        if not any(math.prod(shape_of(view)[:i]) == rows for i in range(len(shape_of(view)) + 1)):
            return True
        views += [user for user in view.users if user.target in VIEWS]
    return False


def lift_weights(gm: fx.GraphModule, weights: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """cat([w_q, w_k]) of weights that only it reads  ->  the input w_q, which is now as long as both

    w_k stays an input without readers. Return the input positions of each concatenation.

    Args:
        weights: positions of the inputs that are the same tensors at every call.
    """
    position = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if i in weights}
    lifted = []
    for cat in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        inputs = cat.args[0]
        alone = len(cat.args) == 1 and len(set(inputs)) == len(inputs)  # a tensor cannot be a view of two places
        if not alone or not all(node in position and len(node.users) == 1 for node in inputs):
            continue
        lifted.append(tuple(position[node] for node in inputs))
        whole = inputs[0]
        whole.meta = {**whole.meta, "val": cat.meta["val"], "tensor_meta": None}
        replace(cat, whole)
    gm.recompile()
    return tuple(lifted)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate ``parts`` [N, ...] and make them views of the result, so that memory is not held twice.

    Parts that another program has already placed one after the other stay where they are.
    """
    wait_for_weights()
    first, ends = parts[0], itertools.accumulate(part.numel() * part.element_size() for part in parts)
    places = [first.data_ptr(), *(first.data_ptr() + end for end in ends)]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and all(p.is_contiguous() and p.data_ptr() == at for p, at in zip(parts, places)):
        return first.detach().as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return whole


def fed(run: Callable[..., Any], weights: Mapping[int, Tensor]) -> Callable[..., Any]:
    """Return ``run`` with these tensors in place of its inputs at these positions."""
    if not weights:
        return run

    def called(*given: Any) -> Any:
        return run(*(weights.get(i, value) for i, value in enumerate(given)))

    return called
