"""What the certificate asks of a graph as a whole: where its results are, and what only an assertion reads."""

from torch import fx

from detcompile.passes.context import Context
from detcompile.passes.provenance import Rows, describe, is_feature

__all__ = ["is_assertion", "lost_of", "only_checked"]


def only_checked(graph: fx.Graph) -> set[fx.Node]:
    """Operations that nothing but an assertion reads: they may stop a step, and enter no value of it."""
    checked: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        pure = node.op == "call_function" and not getattr(getattr(node.target, "_schema", None), "is_mutable", True)
        if pure and node.users and all(user in checked or is_assertion(user) for user in node.users):
            checked.add(node)
    return checked


def is_assertion(node: fx.Node) -> bool:
    return str(node.target).startswith(("aten._assert", "aten.sym_constrain"))


def lost_of(output: fx.Node, context: Context) -> list[str]:
    """What the caller of the graph would not find: logits in the rows it asked for, keys and values in their caches.

    Nor a result with a copy of all rows for each of as many places as a count says, which look like rows themselves.
    """
    lost = []
    for place, state in enumerate(context.states[arg] for arg in output.all_input_nodes):
        if not isinstance(state, Rows):
            continue
        shown = f"output {place}: holds {' '.join(map(describe, state.dims))}"
        if context.final_gather and not _is_chosen(state, context):
            lost.append(f"{shown}, not the rows that the caller chose")
        elif any(axis.row is None and axis.size.free_symbols for dim in state.dims for axis in dim):
            lost.append(f"{shown}, an extent computed from a token or batch count that is no row")
    for cache in context.caches:
        if cache not in context.kept:
            lost.append(f"{cache.part}[{cache.index}]: what attention wrote is not kept for the next step")
    return lost


def _is_chosen(state: Rows, context: Context) -> bool:
    first, *others = state.dims
    rows = [axis.row for axis in first]
    return len(rows) == 1 and rows[0] in context.final_gather.values() and all(map(is_feature, others))
