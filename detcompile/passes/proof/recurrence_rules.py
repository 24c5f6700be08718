"""What the templates that carry a state do to rows: row t reads its own sequence up to t, by their contract."""

from typing import Any

from torch import fx

from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import (
    Layout,
    Refusal,
    Rows,
    Rule,
    describe,
    is_feature,
    require_weight,
)
from detcompile.torch_internals.graph_nodes import BASES, base_index
from detcompile.torch_internals.operators import schema_of

__all__ = ["AVERAGE", "CONV", "GREATEST", "SCAN", "dense_recurrence", "packed_recurrence"]

METADATA = ("state_slots", "cu_seqlens", "seq_lens")
OF_STATE = {BASES, base_index("state")}  # what functionalization adds
CONV: dict[str, tuple[str, ...]] = {"rows": ("x",), "weights": ("weight", "bias")}
SCAN: dict[str, tuple[str, ...]] = {"rows": ("v", "q", "k", "decay", "beta"), "weights": ("rates",)}
AVERAGE: dict[str, tuple[str, ...]] = {"rows": ("v", "k"), "weights": ("decay", "bonus")}
GREATEST: dict[str, tuple[str, ...]] = {"rows": ("x", "decay"), "weights": ()}


def packed_recurrence(operands: dict[str, tuple[str, ...]]) -> Rule:
    def rule(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
        kwargs = node.kwargs
        for name in METADATA:
            if ctx.states[kwargs[name]] != Layout(name):
                raise Refusal(f"the recurrence's {name} is not the step's own")
        out = _rows(kwargs, operands, ctx, 0)
        return out, _written_state(node, ctx)

    return rule


def _written_state(node: fx.Node, ctx: Context) -> Layout:
    """The state that a functionalized operation writes: whole, of the step, and written here alone."""
    kwargs = node.kwargs
    unknown = set(kwargs) - {argument.name for argument in schema_of(node.args[0]).arguments} - OF_STATE
    (base,) = kwargs[BASES]
    state = ctx.states[base]
    if unknown or not isinstance(state, Layout) or state.part != "states":
        raise Refusal("the recurrence's state is not one of the step's own")
    if state in ctx.caches:
        raise Refusal(f"{state.part}[{state.index}] is written twice in a step")
    ctx.caches[state] = node
    return state


def dense_recurrence(operands: dict[str, tuple[str, ...]]) -> Rule:
    def rule(node: fx.Node, ctx: Context) -> Rows:
        if ctx.packed:
            raise Refusal("a recurrence without a step reads the step's tokens as one sequence")
        names = [argument.name for argument in schema_of(node.target).arguments]
        return _rows(dict(zip(names, node.args, strict=False)), operands, ctx, 1)

    return rule


def _rows(given: dict[str, Any], operands: dict[str, tuple[str, ...]], ctx: Context, tokens: int) -> Rows:
    """The state of the first operand, which the result shares; ``tokens`` is the dimension that they are in."""
    for name in operands["weights"]:
        if given.get(name) is not None:
            require_weight(ctx.rows(given[name]), f"the recurrence's {name}")
    values = [ctx.rows(given[name]) for name in operands["rows"] if given.get(name) is not None]
    for value in values:
        in_order = is_feature(value.dims[tokens]) if tokens else False
        in_order |= [axis.row for axis in value.dims[tokens]] == ["tokens"]
        if not in_order or not all(is_feature(dim) for dim in value.dims[tokens + 1 :]):
            raise Refusal(f"a recurrence over {[describe(dim) for dim in value.dims]}: its tokens are out of place")
        if value.dims[: tokens + 1] != values[0].dims[: tokens + 1]:
            raise Refusal("the recurrence's operands are of different rows")
    return values[0]
