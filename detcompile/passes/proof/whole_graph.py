"""What the certificate asks of a graph as a whole: where its results are, and what only an assertion reads."""

from collections.abc import Sequence

from torch import fx

from detcompile.passes.graphs import source_of
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import Dim, Rows, Size, describe, is_feature
from detcompile.torch_internals.operators import OpOverload, schema_of

__all__ = ["is_assertion", "lost_of", "only_checked"]


def only_checked(graph: fx.Graph) -> set[fx.Node]:
    """Operations that nothing but an assertion reads: they may stop a step, and enter no value of it."""
    checked: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        pure = isinstance(node.target, OpOverload) and not schema_of(node.target).is_mutable
        if pure and node.users and all(user in checked or is_assertion(user) for user in node.users):
            checked.add(node)
    return checked


def is_assertion(node: fx.Node) -> bool:
    return str(node.target).startswith(("aten._assert", "aten.sym_constrain"))


def lost_of(output: fx.Node, context: Context, leading: str | None = None) -> list[str]:
    """What the caller of the graph would not find: logits in the rows it asked for, keys and values in their caches.

    Nor a result with a copy of all rows for each of as many places as a count says, which look like rows themselves.

    Args:
        leading: the row space that the first dimension of every output has to be, unless the output reads no row.
    """
    lost = []
    for place, arg in enumerate(output.all_input_nodes):
        state = context.states[arg]
        if isinstance(state, Size) and leading is not None:
            lost.append(f"output {place}: is computed from a token or batch count")
        if not isinstance(state, Rows):
            continue
        shown = f"output {place} of {source_of(arg)}: holds {' '.join(map(describe, state.dims))}"
        if context.final_gather and not _is_chosen(state, context):
            lost.append(f"{shown}, not the rows that the caller chose")
        elif any(axis.row is None and axis.size.free_symbols for dim in state.dims for axis in dim):
            lost.append(f"{shown}, an extent computed from a token or batch count that is no row")
        elif leading is not None and state.row_spaces and not _is_row(state.dims[:1], leading):
            lost.append(f"{shown}, and its first dimension is not the {leading}")
    for cache in context.caches:
        if cache not in context.kept:
            lost.append(f"{cache.part}[{cache.index}]: what attention wrote is not kept for the next step")
    return lost


def _is_row(dims: Sequence[Dim], name: str) -> bool:
    return [axis.row for dim in dims for axis in dim] == [name]


def _is_chosen(state: Rows, context: Context) -> bool:
    first, *others = state.dims
    rows = [axis.row for axis in first]
    return len(rows) == 1 and rows[0] in context.final_gather.values() and all(map(is_feature, others))
