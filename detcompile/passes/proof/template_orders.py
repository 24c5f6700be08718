"""The order in which each template sums, as the certificate states it: one function a kind of sum.

Each takes (node, numerics) and returns the order, or None where this call sums nothing; a template that never sums has
`sums_nothing`. It raises Refusal for an order that was not declared or whose extent is not fixed.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import sympy
from torch import fx

from detcompile.orders import Sequential
from detcompile.orders.numerics import Numerics, kv_order, matmul_order, row_order, state_order
from detcompile.orders.sum_order import SumOrder
from detcompile.passes.graphs import arguments_of, shape_of
from detcompile.passes.proof.provenance import Refusal
from detcompile.templates.cpu.library import isa_of

__all__ = [
    "Order",
    "order_of_attention",
    "order_of_convolution",
    "order_of_head_norm",
    "order_of_partial",
    "order_of_product",
    "order_of_ranks",
    "order_of_row",
    "order_of_state",
    "sums_nothing",
]

Order: TypeAlias = Callable[[fx.Node, Numerics], SumOrder | None]


def sums_nothing(node: fx.Node, numerics: Numerics) -> None:
    """No order: the template moves values, or its sums have two terms, each an operation of its own."""


def order_of_product(node: fx.Node, numerics: Numerics) -> SumOrder:
    """A matrix product: over the last dimension of its first operand, in the declared tree where it has one."""
    given = arguments_of(node)
    value = given["x"].meta["val"]
    radices = _declared(given.get("radices") or (), numerics)
    return matmul_order(_static(shape_of(given["x"])[-1]), value.dtype, radices, isa_of(value.device))


def order_of_row(node: fx.Node, numerics: Numerics) -> SumOrder:
    """A reduction of rows: over the last dimension, whole or in the declared leaves."""
    given = arguments_of(node)
    value = given["x"].meta["val"]
    radices = _declared(given.get("radices") or (), numerics)
    return row_order(_static(shape_of(given["x"])[-1]), value.device.type, radices, value.dtype)


def order_of_head_norm(node: fx.Node, numerics: Numerics) -> SumOrder | None:
    """rope_cache's norm of a head, where it has one."""
    given = arguments_of(node)
    if given["eps"] is None:
        return None
    value = given["q"].meta["val"]
    return row_order(_static(shape_of(given["q"])[-1]), value.device.type, (), value.dtype)


def order_of_attention(node: fx.Node, numerics: Numerics) -> SumOrder:
    """The sum over the keys of one sequence, in the declared chunks."""
    chunk = arguments_of(node)["kv_chunk"]
    if chunk != numerics.kv_chunk:
        raise Refusal(f"attention in chunks of {chunk}, declared are {numerics.kv_chunk}")
    return kv_order(numerics)


def order_of_convolution(node: fx.Node, numerics: Numerics) -> SumOrder:
    """A causal convolution: over its taps."""
    return Sequential(_static(shape_of(arguments_of(node)["weight"])[1]))


def order_of_state(node: fx.Node, numerics: Numerics) -> SumOrder:
    """A matrix state that a query reads: over its keys."""
    q = arguments_of(node)["q"]
    return state_order(_static(shape_of(q)[-1]), q.meta["val"].device.type)


def order_of_ranks(node: fx.Node, numerics: Numerics) -> SumOrder:
    """The whole sum of a product and of the tree over its ranks."""
    given = arguments_of(node)
    above = given["radices_above"]
    return _shared(given["x"], given["radices"], math.prod(above), [above], numerics)


def order_of_partial(node: fx.Node, numerics: Numerics) -> SumOrder:
    """The whole sum of which a rank holds its share, which the trees of its users finish."""
    given = arguments_of(node)
    trees = [arguments_of(user)["radices"] for user in node.users]
    return _shared(given["x"], given["radices"], given["tp"], trees, numerics)


def _shared(
    x: fx.Node, radices: Sequence[int], tp: int, trees: Sequence[Sequence[int]], numerics: Numerics
) -> SumOrder:
    if tp not in numerics.tp_sizes or tuple(radices) != numerics.split_radices(tp)[1]:
        raise Refusal(f"a subtree {tuple(radices)} on each of {tp} ranks, declared is {numerics.radices}")
    if any(tuple(above) != numerics.split_radices(tp)[0] for above in trees):
        raise Refusal(f"{tp} ranks added in the tree {tuple(trees[0])}, declared is {numerics.radices}")
    value = x.meta["val"]
    return matmul_order(_static(shape_of(x)[-1]) * tp, value.dtype, numerics.radices, isa_of(value.device))


def _declared(radices: Sequence[int], numerics: Numerics) -> tuple[int, ...]:
    if radices and tuple(radices) != numerics.radices:
        raise Refusal(f"a sum over the tree {tuple(radices)}, declared is {numerics.radices}")
    return tuple(radices)


def _static(size: sympy.Expr) -> int:
    if size.free_symbols:
        raise Refusal(f"a sum over {size}, which is not fixed")
    return int(size)
