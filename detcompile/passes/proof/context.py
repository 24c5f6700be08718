"""Role and Context: the meaning of a graph's inputs, and the state of the proof while it walks the graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, shape_of
from detcompile.passes.proof.provenance import LAYOUT, SIZE, Layout, Refusal, Rows, Size, created
from detcompile.torch_internals.operators import OpOverload, schema_of

aten = torch.ops.aten


class Context:
    """The states of the nodes seen so far, and the row space of each symbolic extent."""

    def __init__(
        self,
        row_symbols: dict[sympy.Expr, str],
        final_gather: Mapping[str, str],
        packed: bool,
        states: dict[fx.Node, Any] | None = None,
        backward: bool = False,
    ) -> None:
        self.row_symbols = row_symbols
        self.final_gather = final_gather  # placeholders that choose logit rows -> their row space
        self.packed = packed  # the tokens belong to several sequences
        self.backward = backward  # the graph computes gradients of rows and of weights
        self.states: dict[fx.Node, Any] = {} if states is None else states
        self.caches: dict[Layout, fx.Node] = {}  # written in this step -> the node that writes
        self.kept: set[Layout] = set()  # written back into the graph's inputs

    def rows(self, arg: Any, what: str = "the operation") -> Rows:
        """Return the state of a tensor argument. Refuse metadata and sizes."""
        state = self.states[arg]
        if isinstance(state, Layout):
            raise Refusal(f"{what} reads step metadata, which holds the layout of the batch")
        if isinstance(state, Size):
            raise Refusal(f"{what} takes a value computed from a token or batch count")
        if not isinstance(state, Rows):
            raise Refusal(f"{what} reads {arg}, which is not a tensor")
        return state


EXTENTS = (
    *VIEWS,
    aten.expand.default,
    aten.full.default,
    aten.repeat.default,
)


def require_arguments(node: fx.Node, ctx: Context) -> None:
    """Refuse what no rule checks: counts other than extents of views, positional arguments by keyword, and writes.

    A slice start or a scale computed from the token count leaves all axes in place, but changes every bit.
    """
    counts = {arg for arg in node.all_input_nodes if isinstance(ctx.states[arg], Size)}
    if node.target in EXTENTS:  # extents come in a list
        counts &= {*node.args, *node.kwargs.values()} if counts else set()
    if counts and node.target is not aten.slice.Tensor:
        raise Refusal("takes a value computed from a token or batch count")
    if isinstance(node.target, OpOverload):
        schema = schema_of(node.target)
        if schema.is_mutable and node.target is not aten.copy_.default:
            raise Refusal("writes into its arguments")
        moved = [arg.name for arg in schema.arguments if arg.name in node.kwargs and not arg.kwarg_only]
        if moved:
            raise Refusal(f"{', '.join(moved)} by keyword, where rules read positions")


SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def size_arithmetic(node: fx.Node, ctx: Context) -> Size | None:
    """Return the state of a node whose value is a number; None for tensors."""
    if node.target is aten.sym_size.int:
        return SIZE
    if not isinstance(node.meta.get("val"), NUMBERS):
        return None
    if node.target not in SIZES and not all(isinstance(ctx.states[arg], Size) for arg in node.all_input_nodes):
        raise Refusal("a number read out of a tensor")
    return SIZE


@dataclass(frozen=True)
class Role:
    """Content of a graph input.

    Attributes:
        kind: 'weight', 'layout', 'rows', 'handle' (a gradient handle), or 'made' (computed by another graph).
        rows: the row space of each dimension that has one.
        layout: the part of the step that attention may read there.
        state: the state of a 'made' value in the other graph's proof.
    """

    kind: str
    rows: Mapping[int, str] | None = None
    final_gather: bool = False
    layout: Layout = LAYOUT
    state: Any = None


def context_of(
    graph: fx.Graph, roles: Mapping[str, Role], states: dict[fx.Node, Any], backward: bool = False
) -> Context:
    """Return the context at the start: row spaces of symbols, and inputs that choose rows."""
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
    """Return the state of an input."""
    if role.kind == "made":
        return role.state
    if not isinstance(node.meta["val"], torch.Tensor):
        return SIZE
    if role.kind == "layout" or role.final_gather:  # an index of a step's row reveals its place
        return role.layout
    dims = list(created(shape_of(node), {}).dims)
    for dim, name in (role.rows or {}).items():
        dims[dim] = tuple(axis._replace(row=name) for axis in dims[dim])
    return Rows(tuple(dims))


def constant_state(node: fx.Node) -> Rows | None:
    """Return the state of a constant; None if it is not a tensor."""
    owner = node.graph.owning_module
    value = getattr(owner, str(node.target), None) if owner is not None else None
    if not isinstance(value, torch.Tensor):
        return None  # a submodule: the operation that uses it is refused by name
    return created([sympy.Integer(size) for size in value.shape], {})
