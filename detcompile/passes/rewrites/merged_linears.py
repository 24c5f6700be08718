"""Merge linears that read one input (q, k and v; gate and up) into one product with concatenated weights.

Every element of a product is a separate sum, in an order that depends on K only, so bits do not change. There are two
steps. `merge_linears` inserts the concatenation into the graph. `lift_weights` replaces it by a graph input that the
caller concatenates once (`joined`), so steps do not repeat it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from detcompile.passes.graphs import VIEWS, arguments_of, insert, replace, shape_of
from detcompile.passes.programs.async_weights import wait_for_weights
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import forget_eager_inputs, set_source_trace

aten = torch.ops.aten
# Argument positions of weights, scales and biases.
_JOINED = {ours.matmul.default: (1, 2), ours.exact_linear.default: (1, 2, 3)}


def merge_linears(gm: fx.GraphModule) -> fx.GraphModule:
    """matmul(x, w_q), matmul(x, w_k)  ->  y = matmul(x, cat([w_q, w_k])), y[:, :Nq], y[:, Nq:]

    Each weight and bias must be a contiguous graph input without other readers. All or none of the linears have a bias,
    and no sum has a tree or a residual. exact_linear is merged the same way if weights have one digit.
    """
    gm.graph.eliminate_dead_code()  # an unused transpose would count as a reader of its weight
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for target in (ours.matmul.default, ours.exact_linear.default):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if _is_plain(node):
                groups[_kind(node)].append(node)
    for products in groups.values():
        if len(products) > 1:
            _fuse(gm.graph, products)
    for node in gm.graph.nodes:  # their strides are outdated; our operations accept any
        forget_eager_inputs(node)
    return gm


def _is_plain(product: fx.Node) -> bool:
    x, w, *others = product.args
    inputs = [product.args[place] for place in _JOINED[product.target] if product.args[place] is not None]
    alone = all(node.op == "placeholder" and len(node.users) == 1 and node is not x for node in inputs)
    alone &= all(node.meta["val"].is_contiguous() for node in inputs)  # views of the concatenation are contiguous, too
    if product.target is ours.exact_linear.default:
        return alone and w.meta["val"].shape[0] == 1
    return alone and others[1] is None and not others[2] and len(product.args) == 5 and not product.kwargs


def _kind(product: fx.Node) -> tuple:
    """Return what merged linears have in common: the operation, the rows under any views, sizes and dtypes."""
    x = product.args[0]
    sizes = shape_of(x)
    while x.target in VIEWS:
        x = x.args[0]
    joined = [product.args[place] for place in _JOINED[product.target]]
    dtypes = [None if node is None else node.meta["val"].dtype for node in joined]
    return product.target, x, sizes, str(product.args[4]), *dtypes


def _fuse(graph: fx.Graph, products: list[fx.Node]) -> None:
    """Replace products, given in graph order, by one product in place of the first."""
    first = products[0]
    args = list(first.args)
    for place in _JOINED[first.target]:
        if args[place] is not None:
            parts = [product.args[place] for product in products]
            args[place] = insert(graph, aten.cat.default, (parts, joined_dim(parts[0].meta["val"])), first)
    fused = insert(graph, first.target, tuple(args), first)
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
    """cat([w_q, w_k])  ->  the input w_q, which becomes the concatenation

    Only the concatenation may read the weights. w_k stays an input without readers. Return the input positions of each
    concatenation.

    Args:
        weights: positions of the inputs that are the same tensors at every call.
    """
    position = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if i in weights}
    lifted = []
    for cat in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        inputs = cat.args[0]
        alone = len(set(inputs)) == len(inputs)  # a tensor cannot be two parts of the concatenation
        alone &= arguments_of(cat)["dim"] == joined_dim(inputs[0].meta["val"])
        if not alone or not all(node in position and len(node.users) == 1 for node in inputs):
            continue
        lifted.append(tuple(position[node] for node in inputs))
        whole = inputs[0]
        whole.meta = {**whole.meta, "val": cat.meta["val"], "tensor_meta": None}
        replace(cat, whole)
    gm.recompile()
    return tuple(lifted)


def joined_dim(part: Tensor) -> int:
    """Return the dimension in which weights [N, ...] are joined; [1, N, K] are weights of one digit."""
    return int(part.dim() == 3 and part.shape[0] == 1)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate ``parts`` [N, ...] or [1, N, K] and make them views of the result, to save memory.

    Parts that another program has already concatenated are not copied again.
    """
    wait_for_weights()
    first, dim = parts[0], joined_dim(parts[0])
    sizes = (*first.shape[:dim], sum(part.shape[dim] for part in parts), *first.shape[dim + 1 :])
    ends = itertools.accumulate(part.numel() * part.element_size() for part in parts)
    places = [first.data_ptr(), *(first.data_ptr() + end for end in ends)]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and all(p.is_contiguous() and p.data_ptr() == at for p, at in zip(parts, places)):
        return first.detach().as_strided((math.prod(sizes),), (1,)).view(sizes)
    whole = torch.cat([part.detach() for part in parts], dim)
    for part, elements in zip(parts, whole.view(-1).split([part.numel() for part in parts]), strict=True):
        part.data = elements.view(part.shape)
    return whole


def fed(run: Callable[..., Any], weights: Mapping[int, Tensor]) -> Callable[..., Any]:
    """Return ``run`` with its inputs at these positions replaced by these tensors."""
    if not weights:
        return run

    def called(*given: Any) -> Any:
        return run(*(weights.get(i, value) for i, value in enumerate(given)))

    return called
