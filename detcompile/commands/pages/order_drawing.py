"""Draws a SumOrder as an SVG tree: the sum on top, its addends below from left to right."""

import math
from collections.abc import Callable, Iterator
from html import escape
from typing import NamedTuple

from detcompile.orders import KV, Blocked, EvenOdd, Experts, Row, Sequential, Tree
from detcompile.orders.sum_order import SumOrder

MOST_CHILDREN = 8  # children drawn for a node; more are counted
LEGIBLE = 0.8  # a drawing wider than the page is scaled down to this, then scrolls
LETTER, LINE, PAD, GAP, DROP = 6.7, 15, 8, 14, 26  # pixels; DROP: from a box to its children


class Node(NamedTuple):
    """A box with lines of text; the sum of its children, in order."""

    text: tuple[str, ...]
    children: tuple["Node", ...] = ()


def order_drawing(order: SumOrder) -> str:
    """Render an order as an <svg> element."""
    tree = order_tree(order)
    width, height = _width(tree), _height(tree)
    body = "".join(_draw(tree, 1.0, 1.0))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width + 2:.0f}' height='{height + 2:.0f}' role='img'"
        f" viewBox='0 0 {width + 2:.0f} {height + 2:.0f}' style='min-width: {LEGIBLE * width:.0f}px'"
        f" aria-label='{escape(str(order), quote=True)}'>{body}</svg>"
    )


def order_tree(order: SumOrder) -> Node:
    """Return the tree of an order."""
    if isinstance(order, Tree):
        return _levels(order, order.radices, 0)
    if isinstance(order, Sequential | Blocked | EvenOdd):
        return _leaf(order, 0)
    if isinstance(order, Row):
        return _row(order)
    if isinstance(order, KV):
        chunks = tuple(
            Node((f"keys {i * order.chunk} … {(i + 1) * order.chunk - 1}", f"blocks of {order.block}, upwards"))
            for i in range(3)
        )
        return Node(("chunks of keys, merged upwards", "up to the token itself"), (*chunks, Node(("…",))))
    assert isinstance(order, Experts), order
    ranks = _shown(int(order.num_experts), lambda i: Node((f"rank {i}",)))
    return Node(("experts, added in the router's order",), ranks)


def _levels(order: Tree, radices: tuple[int, ...], first: int) -> Node:
    """Return a subtree whose first leaf has index ``first``."""
    if not radices:
        return _leaf(order.leaf, first * int(order.leaf.k))
    below = math.prod(radices[1:])
    return Node(
        (f"{radices[0]} partial sums, added left to right",),
        _shown(radices[0], lambda i: _levels(order, radices[1:], first + i * below)),
    )


def _leaf(order: Sequential | Blocked | EvenOdd, first: int) -> Node:
    last = first + int(order.k) - 1
    if isinstance(order, Sequential):
        return Node((f"k = {first} … {last}", "one after the other"))
    block = int(order.block)
    starts = range(first, last + 1, block)

    def span(i: int) -> str:
        return f"k = {starts[i]} … {min(starts[i] + block - 1, last)}"

    if isinstance(order, EvenOdd):
        return Node(
            (f"0 and {len(starts)} blocks, left to right",),
            _shown(len(starts), lambda i: Node((span(i), "the even ones + the odd ones", "each one after the other"))),
        )
    if len(starts) == 1:
        return Node((f"k = {first} … {last}", "one after the other"))
    return Node(
        (f"{len(starts)} blocks, left to right",),
        _shown(len(starts), lambda i: Node((span(i),))),
    )


def _row(order: Row) -> Node:
    leaves = math.prod(order.radices)
    step = int(order.lanes) * int(order.vector)
    text: tuple[str, ...] = (
        f"{order.lanes} lanes, combined by halving",
        f"each lane adds terms {step} apart"
        if order.vector == 1
        else f"each lane adds runs of {order.vector}, {step} apart",
    )
    if order.chunk:
        text = (f"chunks of {order.chunk}, combined by halving", *text)
    if leaves == 1:
        return Node((f"{order.length} terms", *text))
    leaf = int(order.leaf_length)
    shown = _shown(leaves, lambda i: Node((f"terms {i * leaf} … {(i + 1) * leaf - 1}",)))
    return Node((f"{leaves} leaves, added as a tree of {'x'.join(map(str, order.radices))}; in each:", *text), shown)


def _shown(count: int, node: Callable[[int], Node]) -> tuple[Node, ...]:
    """Return the children; if there are many, the first ones, a count and the last one."""
    if count <= MOST_CHILDREN:
        return tuple(node(i) for i in range(count))
    first = (node(i) for i in range(MOST_CHILDREN - 2))
    return (*first, Node((f"… {count - MOST_CHILDREN + 1} more",)), node(count - 1))


def _box_width(node: Node) -> float:
    return max(map(len, node.text)) * LETTER + 2 * PAD


def _box_height(node: Node) -> float:
    return len(node.text) * LINE + PAD


def _width_below(node: Node) -> float:
    return sum(map(_width, node.children)) + GAP * max(0, len(node.children) - 1)


def _width(node: Node) -> float:
    return max(_box_width(node), _width_below(node))


def _height(node: Node) -> float:
    return _box_height(node) + max((DROP + _height(child) for child in node.children), default=0)


def _draw(node: Node, left: float, top: float) -> Iterator[str]:
    """Yield the SVG elements of a node and its descendants."""
    middle, box, bottom = left + _width(node) / 2, _box_width(node), top + _box_height(node)
    place = middle - _width_below(node) / 2
    for child in node.children:
        center = place + _width(child) / 2
        yield f"<line x1='{middle:.0f}' y1='{bottom:.0f}' x2='{center:.0f}' y2='{bottom + DROP:.0f}'/>"
        yield from _draw(child, place, bottom + DROP)
        place += _width(child) + GAP
    yield f"<rect x='{middle - box / 2:.0f}' y='{top:.0f}' width='{box:.0f}' height='{bottom - top:.0f}' rx='4'/>"
    for index, line in enumerate(node.text, 1):
        yield f"<text x='{middle:.0f}' y='{top + index * LINE:.0f}' text-anchor='middle'>{escape(line)}</text>"
