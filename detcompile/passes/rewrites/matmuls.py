"""Matrix products become the matmul templates: with bias, residual or gate as epilogue, and in batches."""

from typing import Any

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, insert, replace, shape_of, sympy_size
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import set_source_trace

aten, prims = torch.ops.aten, torch.ops.prims
convert = prims.convert_element_type.default
MAX_TERMS = 8  # longest K of a product that becomes an elementwise sum
MAX_MATRICES = 32  # each becomes a separate product
GATE_DEVICES = ("cuda",)  # on a CPU Inductor's loop is as fast
# Index of the residual argument.
RESIDUAL_OF = {
    ours.matmul.default: 3,
    ours.dequant_matmul.default: 6,
    ours.matmul_all_reduce.default: 3,
    ours.tree_all_reduce.default: 2,
}


def pin_matmuls(gm: fx.GraphModule) -> fx.GraphModule:
    """mm(x, w_KN)  ->  matmul(x, w_NK, None, None, [])         addmm(b, x, w_KN)  ->  matmul(x, w_NK, b, None, [])

    Both sum in the order of matmul_order. Row-parallel linears call the template with their tree.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        _pin(gm.graph, node, node.args[0], node.args[1], None)
    for node in gm.graph.find_nodes(op="call_function", target=aten.addmm.default):
        if not node.kwargs and len(shape_of(node.args[0])) == 1:
            _pin(gm.graph, node, node.args[1], node.args[2], node.args[0])
    return gm


def _pin(graph: fx.Graph, node: fx.Node, x: fx.Node, w_KN: fx.Node, bias: fx.Node | None) -> None:
    w_NK = transposed_weight(graph, w_KN, node)
    pinned = insert(graph, ours.matmul.default, (x, w_NK, bias, None, []), node)
    replace(node, pinned)


def transposed_weight(graph: fx.Graph, w_KN: fx.Node, product: fx.Node) -> fx.Node:
    """Return the second operand of a product as [N, K], which the template takes."""
    return w_KN.args[0] if _is_transpose(w_KN) else insert(graph, aten.permute.default, (w_KN, [1, 0]), product)


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0])


def fuse_residuals(gm: fx.GraphModule) -> fx.GraphModule:
    """add(r, view(matmul(x, w, b, None)))  ->  view(matmul(x, w, b, view(r)))          also for all-reduces

    The template rounds the product before the addition, as the two operations do.
    """
    for add in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if add.kwargs or not all(isinstance(arg, fx.Node) for arg in add.args):
            continue
        for y, r in (add.args, add.args[::-1]):
            product = y.args[0] if y.target in VIEWS else y
            if _takes_residual(product, y, r, add):
                _fuse_residual(gm.graph, add, product, y, r)
                break
    return gm


def _takes_residual(product: fx.Node, y: fx.Node, r: fx.Node, add: fx.Node) -> bool:
    return (
        product.target in RESIDUAL_OF
        and product.args[RESIDUAL_OF[product.target]] is None
        and len(shape_of(product)) == 2
        and len(product.users) == 1
        and len(y.users) == 1
        and shape_of(r) == shape_of(add) == shape_of(y)
        and r.meta["val"].dtype == product.meta["val"].dtype
        and r is not y
    )


def _fuse_residual(graph: fx.Graph, add: fx.Node, product: fx.Node, y: fx.Node, r: fx.Node) -> None:
    flat = r
    if y is not product:  # [-1, N] avoids a symbolic size
        flat = insert(graph, aten.reshape.default, (r, [-1, int(product.meta["val"].shape[1])]), add)
    index = RESIDUAL_OF[product.target]
    fused = insert(graph, product.target, (*product.args[:index], flat, *product.args[index + 1 :]), add)
    set_source_trace(fused, product)
    if y is not product:
        fused = insert(graph, y.target, (fused, *y.args[1:]), add)
    add.replace_all_uses_with(fused)
    for dead in dict.fromkeys((add, y, product)):
        graph.erase_node(dead)


def pin_batched_products(gm: fx.GraphModule) -> fx.GraphModule:
    """bmm(a_GMK, w_GKN)  ->  cat([mm(a_GMK[0], w_GKN[0]), ...])      if w's sizes are known: einsum, grouped linears
    bmm(a_RMK, b_RKN)  ->  row_sum(a_RM1K * b_R1NK)             if K is small and M, N are known: gemma3n
    bmm(a_RMK, b_RKN)  ->  batched_matmul(a_RMK, b_RNK)         if K is known, and M or N: an encoder's attention
    baddbmm(c, a, b)  ->  c + bmm(a, b)
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.baddbmm.default):
        _split_baddbmm(gm.graph, node)
    for node in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        known = [[not size.free_symbols for size in shape_of(operand)] for operand in node.args]
        (_, M, K), (_, _, N) = known
        static = all(known[0] + known[1])  # then nothing tells rows from weights
        if all(known[1]) and not static and int(shape_of(node.args[1])[0]) <= MAX_MATRICES:
            _pin_each(gm.graph, node, int(shape_of(node.args[1])[0]))
        elif M and K and N and int(shape_of(node.args[1])[1]) <= MAX_TERMS:
            _pin_sum(gm.graph, node)
        elif K and (M or N):
            _pin_batch(gm.graph, node)
    return gm


def _split_baddbmm(graph: fx.Graph, node: fx.Node) -> None:
    """Split an unscaled baddbmm into a product, which is rounded, and an addition."""
    if not node.kwargs:
        c, a, b = node.args
        product = insert(graph, aten.bmm.default, (a, b), node)
        replace(node, insert(graph, aten.add.Tensor, (c, product), node))


def _pin_batch(graph: fx.Graph, node: fx.Node) -> None:
    a, b = node.args
    turned = insert(graph, aten.permute.default, (b, [0, 2, 1]), node)
    replace(node, insert(graph, ours.batched_matmul.default, (a, turned), node))


def _pin_each(graph: fx.Graph, node: fx.Node, matrices: int) -> None:
    products = []
    for place in range(matrices):
        a, w = (insert(graph, aten.select.int, (operand, 0, place), node) for operand in node.args)
        products.append(insert(graph, aten.unsqueeze.default, (insert(graph, aten.mm.default, (a, w), node), 0), node))
    whole = products[0] if matrices == 1 else insert(graph, _cat, tuple(products), node)
    if matrices > 1:
        whole.target, whole.args = aten.cat.default, (products,)
    replace(node, whole)


def _cat(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def _pin_sum(graph: fx.Graph, node: fx.Node) -> None:
    """Multiply and sum in fp32, and round once."""
    a, b = (
        value if value.meta["val"].dtype == torch.float32 else insert(graph, convert, (value, torch.float32), node)
        for value in node.args
    )
    a = insert(graph, aten.unsqueeze.default, (a, 2), node)
    b = insert(graph, aten.unsqueeze.default, (insert(graph, aten.permute.default, (b, [0, 2, 1]), node), 1), node)
    product = insert(graph, aten.mul.Tensor, (a, b), node)
    replace(node, insert(graph, ours.row_sum.default, (product, node.meta["val"].dtype), node))


def fuse_gates(gm: fx.GraphModule) -> fx.GraphModule:
    """mul(round(g / (exp(-g) + 1)), u)  ->  silu_mul(g, u)          g and u have one shape and dtype

    On GPUs only, where Inductor's kernel spends a 64-bit division per element to find its row. Not if the silu has
    other readers, or if the product broadcasts or is not contiguous (later views were traced with its strides). Float32
    bits stay the same; 16-bit results are those of silu_mul.
    """
    for mul in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        value = mul.meta["val"]
        if mul.kwargs or value.device.type not in GATE_DEVICES or not _is_contiguous(value):
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

    Only if nothing else reads the product. Runs after merge_linears. The bits stay the same.
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
    """Return the product whose first half of columns is ``gate`` and second half ``up``, through any views."""
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


def _is_contiguous(value: torch.Tensor) -> bool:
    step = sympy.Integer(1)
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if sympy_size(size) != 1 and sympy_size(stride) != step:
            return False
        step *= sympy_size(size)
    return True


def _match_silu(node: Any) -> fx.Node | None:
    """Match round(float32(g) / (exp(-float32(g)) + 1)), the decomposition of aten.silu, and return g."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    rounded = node.meta["val"].dtype
    quotient = node.args[0] if node.target is convert else node
    if not _calls(quotient, aten.div.Tensor):
        return None
    g, total = quotient.args
    if not _calls(total, aten.add.Tensor) or total.args[1] != 1 or not _calls(total.args[0], aten.exp.default):
        return None
    negative = total.args[0].args[0]
    if not _calls(negative, aten.neg.default) or negative.args[0] is not g or not isinstance(g, fx.Node):
        return None
    if rounded is torch.float32:
        return g
    return g.args[0] if g.target is convert and g.meta["val"].dtype is torch.float32 else None


def _calls(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target and not node.kwargs
