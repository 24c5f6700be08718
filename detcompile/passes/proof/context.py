"""What is known while the certificate walks a graph, and what it asks of every operation before its own rule."""

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from detcompile.passes.graphs import VIEWS
from detcompile.passes.proof.provenance import SIZE, Layout, Refusal, Rows, Size
from detcompile.torch_internals.operators import OpOverload, schema_of

__all__ = ["Context", "require_arguments", "size_arithmetic"]

aten = torch.ops.aten


class Context:
    """The states of the nodes seen so far, and the row spaces that extents stand for."""

    def __init__(
        self,
        row_symbols: dict[sympy.Expr, str],
        final_gather: Mapping[str, str],
        packed: bool,
        states: dict[fx.Node, Any] | None = None,
        backward: bool = False,
    ) -> None:
        self.row_symbols = row_symbols
        self.final_gather = final_gather  # placeholders that choose the rows of the logits, and the space of those rows
        self.packed = packed  # the tokens are of several sequences
        self.backward = backward  # gradients are computed, of rows and, as sums over tokens, of weights
        self.states: dict[fx.Node, Any] = {} if states is None else states
        self.caches: dict[Layout, fx.Node] = {}  # written in this step, and by which attention
        self.kept: set[Layout] = set()  # of these, the ones that the graph's inputs hold when it ends

    def rows(self, arg: Any, what: str = "the operation") -> Rows:
        """The state of a tensor argument; metadata and sizes are refused."""
        state = self.states[arg]
        if isinstance(state, Layout):
            raise Refusal(f"{what} reads step metadata, which holds the layout of the batch")
        if isinstance(state, Size):
            raise Refusal(f"{what} takes a value computed from a token or batch count")
        if not isinstance(state, Rows):
            raise Refusal(f"{what} reads {arg}, which is no tensor")
        return state


EXTENTS = (
    *VIEWS,
    aten.expand.default,
    aten.full.default,
    aten.repeat.default,
)


def require_arguments(node: fx.Node, ctx: Context) -> None:
    """Refuse what no rule looks at: counts that are not the extents of a view, keywords out of place, writes.

    A start of a slice or a scale that follows the token count leaves every axis where it is, and changes every bit.
    """
    counts = {arg for arg in node.all_input_nodes if isinstance(ctx.states[arg], Size)}
    if node.target in EXTENTS:  # they come in a list
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
    """The state of a node whose value is a number, None for tensors."""
    if node.target is aten.sym_size.int:
        return SIZE
    if not isinstance(node.meta.get("val"), NUMBERS):
        return None
    if node.target not in SIZES and not all(isinstance(ctx.states[arg], Size) for arg in node.all_input_nodes):
        raise Refusal("a number read out of a tensor")
    return SIZE
