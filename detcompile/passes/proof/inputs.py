"""Role: what an input of a graph holds, and what a proof knows of it before the first operation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import shape_of
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import LAYOUT, SIZE, Layout, Rows, created

__all__ = ["Role", "constant_state", "context_of", "input_state"]


@dataclass(frozen=True)
class Role:
    """What a graph input is: 'weight', 'layout', 'rows' with the row space of each dimension that has one, or 'made'.

    Attributes:
        layout: the part of the step that attention is to read there.
        state: what the proof of another graph says of a value that was made there.
    """

    kind: str
    rows: Mapping[int, str] | None = None
    final_gather: bool = False
    layout: Layout = LAYOUT
    state: Any = None


def context_of(
    graph: fx.Graph, roles: Mapping[str, Role], states: dict[fx.Node, Any], backward: bool = False
) -> Context:
    """What is known before the walk: the row spaces of symbols, and what chooses rows."""
    row_symbols: dict[sympy.Expr, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        for dim, name in (roles.get(node.name, Role("weight")).rows or {}).items():
            size = shape_of(node)[dim]
            if size.free_symbols:
                row_symbols[size] = name
    final = {name: role.rows[0] for name, role in roles.items() if role.final_gather and role.rows}
    packed = any(role.kind == "layout" or role.final_gather for role in roles.values())
    return Context(row_symbols, final, packed, states, backward)


def input_state(node: fx.Node, role: Role) -> Any:
    """What the proof knows of an input."""
    if role.kind == "made":
        return role.state
    if not isinstance(node.meta["val"], torch.Tensor):
        return SIZE
    if role.kind == "layout" or role.final_gather:  # which row of the step is wanted tells its place
        return role.layout
    dims = list(created(shape_of(node), {}).dims)
    for dim, name in (role.rows or {}).items():
        dims[dim] = tuple(axis._replace(row=name) for axis in dims[dim])
    return Rows(tuple(dims))


def constant_state(node: fx.Node) -> Rows | None:
    """What the proof knows of a constant; None if it is no tensor."""
    owner = node.graph.owning_module
    value = getattr(owner, str(node.target), None) if owner is not None else None
    if not isinstance(value, torch.Tensor):
        return None  # a submodule: the operation that uses it is refused by name
    return created([sympy.Integer(size) for size in value.shape], {})
