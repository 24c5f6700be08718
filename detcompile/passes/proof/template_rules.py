"""Proof rules of the templates: each operation may sum over features only, or over tokens in its documented order.

A rule takes (node, context) and returns the state of the node's value, or raises Refusal with the reason.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from detcompile.passes.graphs import arguments_of, shape_of, sympy_size
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import (
    Axis,
    Layout,
    Refusal,
    Rows,
    Rule,
    created,
    describe,
    is_feature,
    join,
    require_feature,
    require_weight,
)
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import BASES, FUNCTIONALIZED, base_index
from detcompile.torch_internals.operators import schema_of


def matmul(node: fx.Node, ctx: Context) -> Rows:
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    require_weight(w, "the second matrix")
    require_feature(x, 1, "the sum of a matrix product")
    bias = node.args[2] if len(node.args) > 2 else None
    residual = node.args[3] if len(node.args) > 3 else None
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = Rows((x.dims[0], w.dims[0]))
    return out if residual is None else join([out, ctx.rows(residual)], 2)


def batched_matmul(node: fx.Node, ctx: Context) -> Rows:
    """Each row of the result reads one row of the first operand and one whole matrix of the second."""
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    require_feature(x, -1, "the sum of a matrix product")
    require_feature(w, -1, "the sum of a matrix product")
    if not is_feature(w.dims[-2]):
        advice = "fix the number of tokens of a sequence: torch._dynamo.mark_static(tensor, 1)"
        raise Refusal(f"every row of the product reads {describe(w.dims[-2])}; if all belong to one sequence, {advice}")
    batch = join([Rows(x.dims[:-2]), Rows(w.dims[:-2])], len(x.dims) - 2)
    return Rows((*batch.dims, x.dims[-2], w.dims[-2]))


def dequant_matmul(node: fx.Node, ctx: Context) -> Rows:
    """A matmul whose weights are dequantized element by element."""
    out, (bias, residual) = _of_quantized(node, ctx), node.args[5:7]
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    return out if residual is None else join([out, ctx.rows(residual)], 2)


def dequant_matmul_partial(node: fx.Node, ctx: Context) -> Rows:
    _require_tree_above(node)
    return _of_quantized(node, ctx)


def _of_quantized(node: fx.Node, ctx: Context) -> Rows:
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    require_feature(x, 1, "the sum of a matrix product")
    _require_quantized(node.args[1:5], ctx)
    return Rows((x.dims[0], w.dims[0]))


def _require_quantized(parts: Sequence[fx.Node | None], ctx: Context) -> None:
    for part, what in zip(parts, ("the weights", "their scales", "their zeros", "their minima"), strict=True):
        if part is not None:
            require_weight(ctx.rows(part), what)


def dequant_expert_matmul(node: fx.Node, ctx: Context) -> Rows:
    """A product with each row's experts, whose weights are dequantized element by element."""
    if node.args[6] is not None:
        require_weight(ctx.rows(node.args[6]), "the experts' bias")
    return _of_quantized_experts(node, ctx)


def dequant_expert_matmul_partial(node: fx.Node, ctx: Context) -> Rows:
    _require_tree_above(node)
    return _of_quantized_experts(node, ctx)


def _of_quantized_experts(node: fx.Node, ctx: Context) -> Rows:
    x, ids = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    _require_quantized(node.args[2:6], ctx)
    require_feature(x, -1, "the sum of a matrix product")
    rows_of_x = Rows((*x.dims[:-1], *((),) * (len(ids.dims) - len(x.dims) + 1)))
    return Rows((*join([rows_of_x, ids], len(ids.dims)).dims, created([shape_of(node)[-1]], {}).dims[0]))


def exact_linear(node: fx.Node, ctx: Context) -> Rows:
    """A product with a quantized weight [digits, N, K]; each row of x is quantized alone."""
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    require_feature(x, 1, "the sum of a matrix product")
    for part, what in zip(node.args[1:4], ("the weights", "their scales", "the bias"), strict=True):
        if part is not None:
            require_weight(ctx.rows(part), what)
    return Rows((x.dims[0], w.dims[1]))


def exact_fused_linear(node: fx.Node, ctx: Context) -> Rows:
    """The same between a gate or a norm of each row, and a residual sum."""
    given = arguments_of(node)
    x, w = (ctx.rows(given[name]) for name in ("x", "w"))
    if given["up"] is not None:
        x = join([x, ctx.rows(given["up"])], 2)
    require_feature(x, 1, "the sum of a matrix product")
    for name in ("norm", "w", "w_scale", "bias"):
        if given[name] is not None:
            require_weight(ctx.rows(given[name]), f"the {name}")
    out = Rows((x.dims[0], w.dims[1]))
    return out if given["residual"] is None else join([out, ctx.rows(given["residual"])], 2)


def exact_expert_linear(node: fx.Node, ctx: Context) -> Rows:
    """A product with each row's experts, whose weights [digits, E, N, K] are quantized."""
    x, ids, w = (ctx.rows(arg) for arg in node.args[:3])
    require_feature(x, -1, "the sum of a matrix product")
    for part, what in zip(node.args[2:5], ("the weights", "their scales", "the bias"), strict=True):
        if part is not None:
            require_weight(ctx.rows(part), what)
    rows_of_x = Rows((*x.dims[:-1], *((),) * (len(ids.dims) - len(x.dims) + 1)))
    return Rows((*join([rows_of_x, ids], len(ids.dims)).dims, w.dims[2]))


def quantize_rows(node: fx.Node, ctx: Context) -> tuple[Rows, Rows]:
    """Each row, along the last dimension, gives a row of each digit and a scale."""
    value = ctx.rows(node.args[0])
    require_feature(value, -1, "the largest magnitude of a row")
    digits = (Axis(sympy.Integer(2)),) if node.args[1] == 2 else ()
    return Rows((digits, *value.dims)), Rows(value.dims[:-1])


def gated_matmul(node: fx.Node, ctx: Context) -> Rows:
    """Feature f of a row depends on features f and F + f of the product."""
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    require_weight(w, "the second matrix")
    require_feature(x, 1, "the sum of a matrix product")
    return Rows((x.dims[0], (Axis(shape_of(node)[1]),)))


def expert_matmul(node: fx.Node, ctx: Context) -> Rows:
    if node.args[3] is not None:
        require_weight(ctx.rows(node.args[3]), "the experts' bias")
    return of_experts(node, ctx)


def of_experts(node: fx.Node, ctx: Context) -> Rows:
    """Each row of x is multiplied by the weights of the experts that the same row chose."""
    x, ids, w = (ctx.rows(arg) for arg in node.args[:3])
    require_weight(w, "the experts' weights")
    require_feature(x, -1, "the sum of a matrix product")
    rows_of_x = Rows((*x.dims[:-1], *((),) * (len(ids.dims) - len(x.dims) + 1)))
    return Rows((*join([rows_of_x, ids], len(ids.dims)).dims, w.dims[1]))


def row_by_row(node: fx.Node, ctx: Context) -> Rows:
    """Each row along the last dimension becomes a row. Weights may span several trailing feature dimensions."""
    value = ctx.rows(node.args[0])
    require_feature(value, -1, "a row reduction")
    for weight in node.args[1:3]:
        if isinstance(weight, fx.Node):
            require_weight(ctx.rows(weight), "the weight of a norm")
            _require_features_of(weight, value, shape_of(node.args[0]))
    return value


def _require_features_of(weight: fx.Node, value: Rows, sizes: tuple[sympy.Expr, ...]) -> None:
    """Require features in the trailing dimensions that the norm's weight covers."""
    extent, covered, dim = math.prod(shape_of(weight)), sizes[-1], -1
    while covered != extent:
        dim -= 1
        if -dim > len(sizes):
            raise Refusal(f"the norm's weight has {extent} elements, unlike trailing dimensions of {list(sizes)}")
        require_feature(value, dim, f"a norm's weight of {extent} elements")
        covered *= sizes[dim]


def row_reduced(node: fx.Node, ctx: Context) -> Rows | tuple[Rows, ...]:
    """Each row along the last dimension becomes one value in each result."""
    result = Rows(row_by_row(node, ctx).dims[:-1])
    return (result,) * len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else result


# Argument of attention -> field of StepInputs.
METADATA = {
    "slot_mapping": "slot_mappings",
    "cu_seqlens": "cu_seqlens",
    "seq_lens": "seq_lens",
    "block_table": "block_tables",
}


def _require_step(given: Mapping[str, fx.Node], group: int | None, ctx: Context) -> None:
    """Require that attention reads the right parts of the step, for the KV group of its cache."""
    for name, arg in given.items():
        state = ctx.states[arg]
        if not isinstance(state, Layout) or state.part != METADATA[name] or state.group not in (None, group):
            raise Refusal(f"attention's {name} is not the step's")


def _written_caches(node: fx.Node, ctx: Context) -> tuple[Layout, Layout]:
    """Return the caches that a functionalized operation writes. They belong to one layer and are written only here."""
    kwargs = node.kwargs
    arguments = {arg.name for arg in schema_of(node.args[0]).arguments}
    unknown = set(kwargs) - arguments - {BASES, base_index("k_cache"), base_index("v_cache")}
    if unknown:
        raise Refusal(f"writes a view of a cache ({', '.join(sorted(unknown))})")
    bases = kwargs[BASES]
    k, v = (ctx.states[bases[kwargs[base_index(name)]]] for name in ("k_cache", "v_cache"))
    if not isinstance(k, Layout) or not isinstance(v, Layout) or len(bases) != 2:
        raise Refusal("the cache that is written is not a graph input")
    if (k.part, v.part) != ("k_caches", "v_caches") or k.index != v.index:
        raise Refusal(f"keys are written into {k.part}[{k.index}], values into {v.part}[{v.index}]")
    if k in ctx.caches:
        raise Refusal(f"{k.part}[{k.index}] is written twice in a step")
    ctx.caches |= {k: node, v: node}
    return k, v


def paged_attention(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
    """By the template's contract, row t reads the keys of its sequence up to its position."""
    kwargs = node.kwargs
    cache, _ = _written_caches(node, ctx)
    _require_step({name: kwargs[name] for name in METADATA}, cache.group, ctx)
    require_per_head(kwargs.get("sinks"), kwargs.get("alibi_slopes"), ctx=ctx)
    heads = [ctx.rows(kwargs[name]) for name in ("q", "k", "v")]
    for value in heads:
        require_heads_of_tokens(value)
    if kwargs.get("relative_bias") is not None:
        require_heads_of_tokens(ctx.rows(kwargs["relative_bias"]))
    out = Rows((heads[0].dims[0], heads[0].dims[1], heads[2].dims[2]))
    return (out, *(ctx.states[base] for base in kwargs[BASES]))


def require_heads_of_tokens(value: Rows) -> None:
    """Refuse values that are not [tokens, heads, features]."""
    if [axis.row for axis in value.dims[0]] != ["tokens"] or not all(is_feature(dim) for dim in value.dims[1:]):
        raise Refusal(f"attention over {[describe(dim) for dim in value.dims]} instead of [tokens, heads, features]")


def require_per_head(sinks: Any = None, alibi_slopes: Any = None, *, ctx: Context) -> None:
    """Require that sinks and slopes depend on the head only, not on rows."""
    for name, values in (("sinks", sinks), ("slopes", alibi_slopes)):
        if values is not None:
            require_weight(ctx.rows(values), f"attention's {name}")


def exact_rotated_attention(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
    """The same of heads that are normed and rotated independently, by the row's tables."""
    kwargs = node.kwargs
    require_per_head(kwargs["q_weight"], kwargs["k_weight"], ctx=ctx)
    _require_tokens(kwargs, ("cos", "sin"), ctx)
    return paged_attention(node, ctx)


def rope_cache(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
    """Row t of q, k and v is normed and rotated independently. k and v go to the row's slot."""
    kwargs = node.kwargs
    cache, _ = _written_caches(node, ctx)
    _require_step({"slot_mapping": kwargs["slot_mapping"]}, cache.group, ctx)
    require_per_head(kwargs["q_weight"], kwargs["k_weight"], ctx=ctx)
    _require_tokens(kwargs, ("q", "k", "v", "cos", "sin"), ctx)
    return (ctx.rows(kwargs["q"]), *(ctx.states[base] for base in kwargs[BASES]))


def _require_tokens(given: Mapping[str, Any], names: Sequence[str], ctx: Context) -> None:
    for name in names:
        dims = ctx.rows(given[name]).dims
        if [axis.row for axis in dims[0]] != ["tokens"] or not all(is_feature(dim) for dim in dims[1:]):
            raise Refusal(f"{name} is {[describe(dim) for dim in dims]} instead of a row for each of tokens")


def cached_attention(node: fx.Node, ctx: Context) -> Rows:
    """Row t reads the keys of its sequence up to its position, which the same step has written."""
    for cache in node.args[1:3]:
        written = cache.args[0] if cache.target is operator.getitem else None
        if not isinstance(written, fx.Node) or written.target is not FUNCTIONALIZED:
            raise Refusal("attention's cache was not written in this step")
        if written.args[0] is not ours.rope_cache.default or not isinstance(ctx.states[cache], Layout):
            raise Refusal("attention's cache was not written by rope_cache")
    k, v = (ctx.states[cache] for cache in node.args[1:3])
    if (k.part, v.part) != ("k_caches", "v_caches") or k.index != v.index:
        raise Refusal(f"keys are read from {k.part}[{k.index}], values from {v.part}[{v.index}]")
    _require_step(dict(zip(list(METADATA)[1:], node.args[3:6], strict=True)), k.group, ctx)
    require_per_head(*node.args[10:12], ctx=ctx)
    q = ctx.rows(node.args[0])
    require_heads_of_tokens(q)
    if len(node.args) > 13 and node.args[13] is not None:
        require_heads_of_tokens(ctx.rows(node.args[13]))
    return Rows((*q.dims[:2], created([sympy_size(node.meta["val"].shape[2])], {}).dims[0]))


def dense_attention(node: fx.Node, ctx: Context) -> Rows:
    """By the template's contract, row t of a sequence reads its rows up to t, if tokens are in order."""
    if ctx.packed:
        raise Refusal("attention outside the attention interface reads the step's tokens as one sequence")
    require_per_head(*node.args[7:9], ctx=ctx)
    q, k, v = (ctx.rows(arg) for arg in node.args[:3])
    biases = [ctx.rows(arg) for arg in node.args[10:11] if arg is not None]
    for value in (q, k, v, *biases):
        if not is_feature(value.dims[1]) or not is_feature(value.dims[3]):
            raise Refusal("attention's heads or features hold rows")
        in_order = is_feature(value.dims[2]) or [axis.row for axis in value.dims[2]] == ["tokens"]
        if not in_order or value.dims[0] != q.dims[0] or value.dims[2] != q.dims[2]:
            raise Refusal("attention's batch and tokens are out of place")
    return Rows((q.dims[0], q.dims[1], q.dims[2], v.dims[3]))


def matmul_all_reduce(node: fx.Node, ctx: Context) -> Rows:
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    bias, residual = node.args[2:4]
    require_weight(w, "the second matrix")
    require_feature(x, 1, "the sum of a matrix product")
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = Rows((x.dims[0], w.dims[0]))
    return out if residual is None else join([out, ctx.rows(residual)], len(out.dims))


PARTIALS = (
    ours.dequant_expert_matmul_partial.default,
    ours.dequant_matmul_partial.default,
    ours.expert_matmul_partial.default,
)


def expert_matmul_partial(node: fx.Node, ctx: Context) -> Rows:
    _require_tree_above(node)
    return of_experts(node, ctx)


def _require_tree_above(node: fx.Node) -> None:
    """Require that only tree_all_reduce reads a sum over a rank's share of K."""
    for user in node.users:
        if user.target is not ours.tree_all_reduce.default or user.args[0] is not node or node in user.args[1:]:
            raise Refusal(f"a rank's partial sum is read by {user.target}, not by the tree over the ranks")


def tree_all_reduce(node: fx.Node, ctx: Context) -> Rows:
    partial, bias, residual, radices = node.args[:4]
    if partial.target not in PARTIALS:
        raise Refusal("adds values of ranks that are not partial sums of a matrix product")
    tp = partial.args[-1]
    if math.prod(radices) != tp:
        raise Refusal(f"a tree over {math.prod(radices)} ranks adds the partial sums of {tp}")
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = ctx.rows(partial)
    return out if residual is None else join([out, ctx.rows(residual)], len(out.dims))


def columns_gathered(node: fx.Node, ctx: Context) -> Rows:
    x = ctx.rows(node.args[0])
    require_feature(x, 1, "a gather of columns")
    return Rows((x.dims[0], created([shape_of(node)[1]], {}).dims[0]))


STEP_OF_STATE = ("state_slots", "cu_seqlens", "seq_lens")
OF_STATE = {BASES, base_index("state")}  # keywords that functionalization adds
CONV: dict[str, tuple[str, ...]] = {"rows": ("x",), "weights": ("weight", "bias")}
SCAN: dict[str, tuple[str, ...]] = {"rows": ("v", "q", "k", "decay", "beta"), "weights": ("rates",)}
AVERAGE: dict[str, tuple[str, ...]] = {"rows": ("v", "k"), "weights": ("decay", "bonus")}
GREATEST: dict[str, tuple[str, ...]] = {"rows": ("x", "decay"), "weights": ()}


def packed_recurrence(operands: dict[str, tuple[str, ...]]) -> Rule:
    def rule(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
        kwargs = node.kwargs
        for name in STEP_OF_STATE:
            if ctx.states[kwargs[name]] != Layout(name):
                raise Refusal(f"the recurrence's {name} is not the step's")
        out = _rows(kwargs, operands, ctx, 0)
        return out, _written_state(node, ctx)

    return rule


def _written_state(node: fx.Node, ctx: Context) -> Layout:
    """Return the state that a functionalized operation writes: a whole state of the step, written once."""
    kwargs = node.kwargs
    unknown = set(kwargs) - {argument.name for argument in schema_of(node.args[0]).arguments} - OF_STATE
    (base,) = kwargs[BASES]
    state = ctx.states[base]
    if unknown or not isinstance(state, Layout) or state.part != "states":
        raise Refusal("the recurrence's state is not a state of the step")
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
    """Return the result's rows: those of the first operand. ``tokens`` is the index of the token dimension."""
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
            raise Refusal("the recurrence's operands have different rows")
    return values[0]
