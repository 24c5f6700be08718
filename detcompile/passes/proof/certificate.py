"""The certificate: every operation of a graph belongs to a proven class and keeps rows apart, or the graph is refused.

Classes: *pointwise*, *movement*, *order-free* reductions (max, integer sums), *template* (its SumOrder is pinned and
holds no symbol), *attention* and *recurrence* (sums over the row's prefix, by their contracts) and *collective* (adds
the ranks' values of one row, in the declared tree). Everything else is an UncertifiedOp.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from detcompile.errors import InvalidInput, UncertifiedOp
from detcompile.orders.numerics import Numerics
from detcompile.orders.sum_order import SumOrder
from detcompile.passes.graphs import layer_of, operation_of, place_of, source_of, sympy_size
from detcompile.passes.proof.context import (
    Context,
    Role,
    constant_state,
    context_of,
    input_state,
    require_arguments,
    size_arithmetic,
)
from detcompile.passes.proof.exact import require_exact
from detcompile.passes.proof.gradient_rules import of_token_sums
from detcompile.passes.proof.movement_rules import INDEXING, MOVEMENT
from detcompile.passes.proof.order_free_rules import ORDER_FREE
from detcompile.passes.proof.pointwise import is_pointwise, pointwise, why_not_pointwise
from detcompile.passes.proof.provenance import (
    Dim,
    Layout,
    Refusal,
    Rows,
    Size,
    TokenSum,
    describe,
    is_feature,
    require_apart,
)
from detcompile.passes.proof.template_table import Template, template_of
from detcompile.torch_internals.operators import OpOverload, schema_of


@dataclass(frozen=True)
class Entry:
    """One certified operation.

    Attributes:
        layer: path of the module that it came from; empty if none was recorded.
        holds_for: indices of the layers with the same structure that the proof holds for; empty outside layers.
    """

    op: str
    layer: str
    place: str
    kind: str
    order: str
    proof: str
    holds_for: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of operations that the proof covers: one per layer that shares it."""
        return max(1, len(self.holds_for))

    @property
    def layers(self) -> str:
        """The layers that the proof holds for, as ranges: "0-2, 5"; empty outside layers."""
        runs: list[list[int]] = []
        for number in self.holds_for:
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True)
class Certificate:
    """The proof that a compiled graph keeps rows apart and pins its sums.

    Attributes:
        sums: the distinct orders of its sums, in graph order.
    """

    entries: tuple[Entry, ...]
    numerics: Numerics
    sums: tuple[SumOrder, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of operations of each class, counted in every layer."""
        counts: Counter[str] = Counter()
        for entry in self.entries:
            counts[entry.kind] += entry.count
        return dict(counts)

    @property
    def orders(self) -> tuple[str, ...]:
        """The distinct sum orders of the graph, as text, sorted."""
        return tuple(sorted({str(order) for order in self.sums}))

    def to_json(self) -> str:
        """Return the certificate as one JSON object: numerics, counts, orders, entries."""
        return json.dumps(
            {
                "numerics": str(self.numerics),
                "counts": self.counts,
                "orders": self.orders,
                "entries": [asdict(entry) for entry in self.entries],
            }
        )

    def summary(self) -> str:
        """Return one line with the number of certified operations of each class."""
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))

    def __str__(self) -> str:
        header = ("op", "layer", "place", "class", "order", "proof", "layers")
        rows = [header, *((*list(asdict(entry).values())[:-1], entry.layers) for entry in self.entries)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def certify(
    graph: fx.Graph,
    roles: Mapping[str, Role],
    numerics: Numerics,
    expected_attention: int | None,
    expected_recurrences: int = 0,
    leading: str | None = None,
    states: dict[fx.Node, Any] | None = None,
    backward: bool = False,
) -> Certificate:
    """Prove the graph, or raise UncertifiedOp that names every offender.

    Args:
        graph: ATen graph after all rewrites, with fake tensors in ``meta["val"]``.
        roles: roles of placeholders by name; missing ones count as weights.
        numerics: the declared orders.
        expected_attention: attention calls of the model; None if the graph is not a causal LM.
        expected_recurrences: calls of a causal LM that carry a state from token to token.
        leading: the row space that the first dimension of every output must have; None for no check.
        states: receives the proof's state of each node.
        backward: the graph computes gradients, where templates sum over rows in their orders.
    """
    context, checked = context_of(graph, roles, {} if states is None else states, backward), only_checked(graph)
    entries, offenders, sums = [], [], dict[SumOrder, None]()
    for node in graph.nodes:
        if node.op == "placeholder":
            context.states[node] = input_state(node, roles.get(node.name, Role("weight")))
        elif node.op == "get_attr":
            context.states[node] = constant_state(node)
        elif node in checked:
            context.states[node] = None
        elif node.op == "call_function" and not _reads_offender(node, context):
            try:
                context.states[node], entry, order = _certify_node(node, context, numerics)
            except Refusal as refusal:
                offenders.append(f"{node.target} at {source_of(node)}: {refusal}")
                context.states[node] = None
            else:
                if entry:
                    entries.append(entry)
                if order:
                    sums[order] = None
        elif node.op in ("call_module", "call_method"):
            offenders.append(f"{node.target} at {source_of(node)}: not an ATen operation")
            context.states[node] = None
        elif node.op == "output" and not offenders:
            offenders.extend(output_faults(node, context, leading))
    if not offenders and expected_attention is not None:
        offenders.extend(_miscounted(entries, {"attention": expected_attention, "recurrence": expected_recurrences}))
    if offenders:
        raise UncertifiedOp(_refusal_text(offenders, numerics), tuple(offenders))
    return Certificate(tuple(entries), numerics, tuple(sums))


def _miscounted(entries: Iterable[Entry], expected: Mapping[str, int]) -> Iterator[str]:
    """Yield a message about the first kind of calls whose number differs between model and graph."""
    for kind, number in expected.items():
        count = sum(entry.kind == kind for entry in entries)
        if count != number:
            yield f"the model calls {kind} {number} times, the graph holds {count} {kind} nodes"
            return


def _refusal_text(offenders: list[str], numerics: Numerics) -> str:
    times, machine = Counter(offenders), " or on the machine" if numerics.is_exact else ""
    listed = "\n  ".join(f"{count} × {line}" if count > 1 else line for line, count in list(times.items())[:20])
    listed += f"\n  and {len(times) - 20} other lines" if len(times) > 20 else ""
    return (
        f"{len(offenders)} operation(s) could make a row's bits depend on other rows{machine}:\n  {listed}\n"
        "Rewrite them row by row, or compile a model without them; nothing was compiled."
    )


def _reads_offender(node: fx.Node, context: Context) -> bool:
    """Return whether a node reads an offender, and mark it: only the first offender is reported."""
    if any(
        arg in context.states and context.states[arg] is None for arg in node.all_input_nodes if arg.op != "get_attr"
    ):
        context.states[node] = None
        return True
    return False


def _certify_node(node: fx.Node, context: Context, numerics: Numerics) -> tuple[Any, Entry | None, SumOrder | None]:
    size = size_arithmetic(node, context)
    if size is not None:
        return size, None, None
    target = node.target
    if is_assertion(node):
        return None, None, None
    if any(isinstance(context.states[arg], TokenSum) for arg in node.all_input_nodes):
        return (summed := of_token_sums(node, context)), _entry(node, "movement", "", _proof("", summed, None)), None
    template = template_of(node)
    kind, rule = ("", None) if template is None else (template.kind, template.rows)
    for of_table, table in (("movement", MOVEMENT), ("movement", INDEXING), ("order-free", ORDER_FREE)):
        if target in table:
            kind, rule = of_table, table[target]
    if numerics.is_exact:
        require_exact(node, kind or ("pointwise" if is_pointwise(target) else ""))
    if rule is not None:
        require_arguments(node, context)
        state = rule(node, context)
        _require_apart(node, state, context)
        order = None if template is None else _order_of(node, template, numerics)
        return state, _entry(node, kind, str(order or ""), _proof(kind, state, order)), order
    if is_pointwise(target):
        if isinstance(node.meta.get("val"), torch.Tensor):
            require_arguments(node, context)
            state = pointwise(node, context)
            _require_apart(node, state, context)
            return state, _entry(node, "pointwise", "", _proof("pointwise", state, None)), None
    raise Refusal(why_not_pointwise(target) or reason_of(target))


def _entry(node: fx.Node, kind: str, order: str, proof: str) -> Entry:
    return Entry(_name(node), layer_of(node), place_of(node), kind, order, proof)


def _require_apart(node: fx.Node, state: Any, context: Context) -> None:
    states, values = (state, node.meta["val"]) if isinstance(state, tuple) else ((state,), (node.meta["val"],))
    for part, value in zip(states, values, strict=False):
        if isinstance(part, Rows):
            require_apart(part, tuple(map(sympy_size, value.shape)), context.final_gather.values())


def _order_of(node: fx.Node, template: Template, numerics: Numerics) -> SumOrder | None:
    """Return the pinned order of a template. It may not contain a symbol."""
    try:
        order = template.order(node, numerics)
    except InvalidInput as error:  # these operands have no order
        raise Refusal(str(error)) from error
    if order is not None and order.symbols:
        raise Refusal(f"the order {order} depends on {sorted(map(str, order.symbols))}")
    return order


def _proof(kind: str, state: Any, order: SumOrder | None) -> str:
    if kind == "attention":
        return "row t of tokens reads keys of its own prefix"
    if kind == "recurrence":
        return "row t of tokens reads its own prefix, token by token"
    if isinstance(state, Layout):
        return "each row writes only its KV slots"
    if isinstance(state, TokenSum):
        return "sums every token once, exactly; no row reads it"
    results = state if isinstance(state, tuple) else (state,)
    spaces = dict.fromkeys(row for rows in results if isinstance(rows, Rows) for row in rows.row_spaces)
    reads = f"row t of {', '.join(spaces)} reads row t" if spaces else "depends on no row"
    return f"{reads}; order holds no symbol" if order else reads


def _name(node: fx.Node) -> str:
    target = operation_of(node)
    return str(target if isinstance(target, OpOverload) else getattr(target, "__name__", target))


def only_checked(graph: fx.Graph) -> set[fx.Node]:
    """Return operations that only assertions read: they may stop a step, but enter no value."""
    checked: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        pure = isinstance(node.target, OpOverload) and not schema_of(node.target).is_mutable
        if pure and node.users and all(user in checked or is_assertion(user) for user in node.users):
            checked.add(node)
    return checked


def is_assertion(node: fx.Node) -> bool:
    return str(node.target).startswith(("aten._assert", "aten.sym_constrain"))


def output_faults(output: fx.Node, context: Context, leading: str | None = None) -> list[str]:
    """Return faults of the outputs: logits outside the chosen rows, unsaved caches, sizes that are not row counts.

    Args:
        leading: the row space that the first dimension of every output must have, unless the output reads no row.
    """
    faults = []
    for place, arg in enumerate(output.all_input_nodes):
        state = context.states[arg]
        if isinstance(state, Size) and leading is not None:
            faults.append(f"output {place}: is computed from a token or batch count")
        if not isinstance(state, Rows):
            continue
        shown = f"output {place} of {source_of(arg)}: holds {' '.join(map(describe, state.dims))}"
        if context.final_gather and not _is_chosen(state, context):
            faults.append(f"{shown}, not the rows that the caller chose")
        elif any(axis.row is None and axis.size.free_symbols for dim in state.dims for axis in dim):
            faults.append(f"{shown}, a size computed from a token or batch count that is not a number of rows")
        elif leading is not None and state.row_spaces and not _is_row(state.dims[:1], leading):
            faults.append(f"{shown}, and its first dimension is not the {leading}")
    for cache in context.caches:
        if cache not in context.kept:
            faults.append(f"{cache.part}[{cache.index}]: keys or values of attention are not saved for the next step")
    return faults


def _is_row(dims: Sequence[Dim], name: str) -> bool:
    return [axis.row for dim in dims for axis in dim] == [name]


def _is_chosen(state: Rows, context: Context) -> bool:
    first, *others = state.dims
    rows = [axis.row for axis in first]
    return len(rows) == 1 and rows[0] in context.final_gather.values() and all(map(is_feature, others))


# The first entry that is part of the operation's name applies.
REASONS = {
    "dropout": "dropout draws from a generator that the batch shares: call model.eval()",
    "seeds": "random numbers inside the graph (dropout? call model.eval())",
    "rand": "random numbers inside the graph",
    "bernoulli": "random numbers inside the graph",
    "cumsum": "a running sum whose order is not pinned",
    "bmm": "a batched matrix product without a pinned order (attention outside the attention interface?)",
    "convolution": "a convolution that is transposed, or over a length that is not fixed",
    "pool": "a pool with windows of different sizes, with indices that are read, or over a length that is not fixed",
    "prod": "a product of floating-point numbers whose order is not pinned",
    "empty": "reads uninitialized memory",
    "as_strided": "a view whose rows cannot be tracked",
    "c10d": (
        "a collective of torch.distributed, whose sum order is not pinned (compile(tp=...) shards the model; an "
        "all_reduce of a plain matrix product, over a declared number of ranks, becomes the declared tree)"
    ),
}


def reason_of(target: Any) -> str:
    """Return why an operation without a rule is refused, and what to do, by its name."""
    for name, reason in REASONS.items():
        if name in str(target):
            return reason
    return "no rule proves this operation independent of the batch"
