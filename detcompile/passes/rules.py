"""What each operation does to rows: one rule an operation, and nothing for an operation without a rule.

A rule takes (node, states) and returns the state of the node's value; it raises Refusal with the reason otherwise.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

import detcompile.templates.ops  # noqa: F401 (registers torch.ops.detcompile)
from detcompile.passes.provenance import (
    LAYOUT,
    SIZE,
    Layout,
    Refusal,
    Rows,
    Rule,
    Size,
    created,
    describe,
    drop,
    expand,
    gather,
    index,
    is_feature,
    join,
    permute,
    require_feature,
    require_weight,
    shape_of,
    sympy_size,
    view,
)

__all__ = ["ATTENTION", "Context", "MOVEMENT", "ORDER_FREE", "TEMPLATES", "is_pointwise", "pointwise", "size_arithmetic"]

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.detcompile
FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2


class Context:
    """The states of the nodes seen so far, and the row spaces that extents stand for."""

    def __init__(self, row_symbols: dict[sympy.Expr, str], final_gather: frozenset[str]) -> None:
        self.row_symbols = row_symbols
        self.final_gather = final_gather  # names of the placeholders that choose the rows of the logits
        self.states: dict[fx.Node, Any] = {}

    def rows(self, arg: Any, what: str = "the operation") -> Rows:
        """The state of a tensor argument; metadata and sizes are refused."""
        state = self.states[arg]
        if isinstance(state, Layout):
            raise Refusal(f"{what} reads step metadata, which holds the layout of the batch")
        if isinstance(state, Size):
            raise Refusal(f"{what} takes a value computed from a token or batch count")
        return state


def is_pointwise(target: Any) -> bool:
    """Whether element i of the result depends on element i of each operand alone."""
    if target in (prims.convert_element_type.default, aten._to_copy.default, aten.copy.default, aten.clone.default):
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def pointwise(node: fx.Node, ctx: Context) -> Rows:
    operands = [ctx.rows(arg, "arithmetic") for arg in node.all_input_nodes]
    return join(operands, len(shape_of(node)))


def _sizes(args: Sequence[Any]) -> list[sympy.Expr]:
    return [sympy_size(arg.meta["val"]) if isinstance(arg, fx.Node) else sympy.Integer(arg) for arg in args]


def _view(node: fx.Node, ctx: Context) -> Rows:
    return view(ctx.rows(node.args[0]), shape_of(node))


def _permute(node: fx.Node, ctx: Context) -> Rows:
    return permute(ctx.rows(node.args[0]), node.args[1])


def _transpose(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    order = list(range(len(value.dims)))
    a, b = (node.args[1], node.args[2]) if len(node.args) > 2 else (-2, -1)
    order[a], order[b] = order[b], order[a]
    return permute(value, order)


def _expand(node: fx.Node, ctx: Context) -> Rows:
    return expand(ctx.rows(node.args[0]), shape_of(node), ctx.row_symbols)


def _slice(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    before, after = shape_of(node.args[0])[dim], shape_of(node)[dim]
    if before == after and step == 1 and start in (0, None):
        return value
    require_feature(value, dim, "a slice")
    return Rows((*value.dims[:dim], *created([after], {}).dims, *value.dims[dim:][1:]))


def _select(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    dim = node.args[1] % len(value.dims)
    require_feature(value, dim, "a choice of one element")
    return Rows(value.dims[:dim] + value.dims[dim + 1 :])


def _unsqueeze(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    dim = node.args[1] % (len(value.dims) + 1)
    return Rows((*value.dims[:dim], (), *value.dims[dim:]))


def _cat(node: fx.Node, ctx: Context) -> Rows:
    values = [ctx.rows(arg) for arg in node.args[0]]
    rank = len(values[0].dims)
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    for value in values:
        require_feature(value, dim, "a concatenation")
    others = join([Rows(value.dims[:dim] + value.dims[dim + 1 :]) for value in values], rank - 1)
    return Rows((*others.dims[:dim], *created([shape_of(node)[dim]], {}).dims, *others.dims[dim:]))


def _split(node: fx.Node, ctx: Context) -> tuple[Rows, ...]:
    value = ctx.rows(node.args[0])
    dim = (node.args[2] if len(node.args) > 2 else 0) % len(value.dims)
    require_feature(value, dim, "a split")
    parts = [sympy_size(part.shape[dim]) for part in node.meta["val"]]
    return tuple(Rows((*value.dims[:dim], *created([part], {}).dims, *value.dims[dim + 1 :])) for part in parts)


def _unbind(node: fx.Node, ctx: Context) -> tuple[Rows, ...]:
    value = ctx.rows(node.args[0])
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(value.dims)
    require_feature(value, dim, "an unbind")
    return (Rows(value.dims[:dim] + value.dims[dim + 1 :]),) * len(node.meta["val"])


def _flip(node: fx.Node, ctx: Context) -> Rows:
    value = ctx.rows(node.args[0])
    for dim in node.args[1]:
        require_feature(value, dim, "a flip")
    return value


def _pad(node: fx.Node, ctx: Context) -> Rows:
    value, padding = ctx.rows(node.args[0]), node.args[1]
    dims = list(value.dims)
    for i in range(len(padding) // 2):
        if padding[2 * i] or padding[2 * i + 1]:
            require_feature(value, -1 - i, "padding")
            dims[-1 - i] = created([shape_of(node)[-1 - i]], {}).dims[0]
    return Rows(tuple(dims))


def _index(node: fx.Node, ctx: Context) -> Rows:
    indices = [None if arg is None else ctx.rows(arg, "an index") for arg in node.args[1]]
    final = any(arg is not None and arg.name in ctx.final_gather for arg in node.args[1])
    return index(ctx.rows(node.args[0]), indices, len(shape_of(node)), final)


def _gather(node: fx.Node, ctx: Context) -> Rows:
    return gather(ctx.rows(node.args[0]), node.args[1], ctx.rows(node.args[2], "an index"))


def _index_select(node: fx.Node, ctx: Context) -> Rows:
    value, dim = ctx.rows(node.args[0]), node.args[1]
    indices = [None] * (dim % len(value.dims)) + [ctx.rows(node.args[2], "an index")]
    return index(value, indices, len(value.dims), node.args[2].name in ctx.final_gather)


def _embedding(node: fx.Node, ctx: Context) -> Rows:
    weight, ids = ctx.rows(node.args[0]), ctx.rows(node.args[1], "an index")
    require_weight(weight, "the embedding table")
    return Rows((*ids.dims, weight.dims[1]))


def _constant(node: fx.Node, ctx: Context) -> Rows:
    """full, zeros, ...: rows may shape the value, their number may not be the value."""
    fill = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]  # extents come in lists
    if any(isinstance(ctx.states[arg], Size) for arg in fill):
        raise Refusal("the value is computed from a token or batch count")
    return created(shape_of(node), ctx.row_symbols)


def _iota(node: fx.Node, ctx: Context) -> Rows:
    (length,) = shape_of(node)
    if length.free_symbols or node.all_input_nodes:
        raise Refusal("numbers the rows of the batch (a value computed from a token or batch count)")
    return created([length], {})


def _getitem(node: fx.Node, ctx: Context) -> Any:
    return ctx.states[node.args[0]][node.args[1]]


def _keep(node: fx.Node, ctx: Context) -> Any:
    return ctx.states[node.args[0]]


def _squeeze(node: fx.Node, ctx: Context) -> Rows:
    return view(ctx.rows(node.args[0]), shape_of(node))


def _write_back(node: fx.Node, ctx: Context) -> Layout:
    """copy_ of an updated cache into its graph input."""
    if not all(isinstance(ctx.states[arg], Layout) for arg in node.args[:2]):
        raise Refusal("writes rows into an input of the graph")
    return LAYOUT


MOVEMENT: Mapping[Any, Rule] = {
    aten._unsafe_view.default: _view,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.permute.default: _permute,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.flip.default: _flip,
    prims.rev.default: _flip,
    aten.constant_pad_nd.default: _pad,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.embedding.default: _embedding,
    aten.full.default: _constant,
    aten.full_like.default: _constant,
    aten.scalar_tensor.default: _constant,
    aten.empty.memory_format: _constant,
    prims.iota.default: _iota,
    aten.arange.start_step: _iota,
    aten.alias.default: _keep,
    aten.detach.default: _keep,
    aten.lift_fresh_copy.default: _keep,
    aten.copy_.default: _write_back,
    operator.getitem: _getitem,
}


def _reduced_dims(node: fx.Node, position: int = 1) -> list[int]:
    rank = len(shape_of(node.args[0]))
    dims = node.args[position] if len(node.args) > position else None
    if dims is None or dims == []:
        return list(range(rank))
    return [dims] if isinstance(dims, int) else list(dims)


def _exact_reduction(node: fx.Node, ctx: Context) -> Rows | tuple[Rows, ...]:
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    result = drop(ctx.rows(node.args[0]), _reduced_dims(node), keepdim, "a reduction")
    return (result,) * len(node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else result


def _integer_sum(node: fx.Node, ctx: Context) -> Rows | tuple[Rows, ...]:
    if node.args[0].meta["val"].dtype.is_floating_point:
        raise Refusal("a floating-point sum whose order is not pinned")
    return _exact_reduction(node, ctx)


def _ranked(dim_position: int) -> Rule:
    def rule(node: fx.Node, ctx: Context) -> tuple[Rows, ...]:
        value = ctx.rows(node.args[0])
        dim = node.args[dim_position] if len(node.args) > dim_position else -1
        require_feature(value, dim, "an ordering")
        after = [created([sympy_size(part.shape[dim])], {}).dims[0] for part in node.meta["val"]]
        dim %= len(value.dims)
        return tuple(Rows((*value.dims[:dim], part, *value.dims[dim + 1 :])) for part in after)

    return rule


ORDER_FREE: Mapping[Any, Rule] = {
    aten.amax.default: _exact_reduction,
    aten.amin.default: _exact_reduction,
    aten.max.dim: _exact_reduction,
    aten.min.dim: _exact_reduction,
    aten.argmax.default: _exact_reduction,
    aten.argmin.default: _exact_reduction,
    aten.any.dim: _exact_reduction,
    aten.any.dims: _exact_reduction,
    aten.any.default: _exact_reduction,
    aten.all.dim: _exact_reduction,
    aten.all.default: _exact_reduction,
    aten.sum.dim_IntList: _integer_sum,
    aten.sum.default: _integer_sum,
    aten.topk.default: _ranked(2),
    aten.sort.default: _ranked(1),
    aten.sort.stable: _ranked(2),
}


def _matmul(node: fx.Node, ctx: Context) -> Rows:
    x, w = ctx.rows(node.args[0]), ctx.rows(node.args[1])
    require_weight(w, "the second matrix")
    require_feature(x, 1, "the sum of a matrix product")
    bias = node.args[2] if len(node.args) > 2 else None
    residual = node.args[3] if len(node.args) > 3 else None
    if bias is not None:
        require_weight(ctx.rows(bias), "the bias")
    out = Rows((x.dims[0], w.dims[0]))
    return out if residual is None else join([out, ctx.rows(residual)], 2)


def _last_dim(keep: bool) -> Rule:
    def rule(node: fx.Node, ctx: Context) -> Rows | tuple[Rows, ...]:
        value = ctx.rows(node.args[0])
        require_feature(value, -1, "a row reduction")
        for weight in node.args[1:3]:
            if isinstance(weight, fx.Node):
                require_weight(ctx.rows(weight), "the weight of a norm")
        result = value if keep else Rows(value.dims[:-1])
        return (result, result) if isinstance(node.meta["val"], (tuple, list)) else result

    return rule


TEMPLATES: Mapping[Any, Rule] = {
    ours.matmul.default: _matmul,
    ours.row_sum.default: _last_dim(keep=False),
    ours.row_var_mean.default: _last_dim(keep=False),
    ours.logsumexp.default: _last_dim(keep=False),
    ours.softmax.default: _last_dim(keep=True),
    ours.log_softmax.default: _last_dim(keep=True),
    ours.rms_norm.default: _last_dim(keep=True),
    ours.layer_norm.default: _last_dim(keep=True),
    ours.embedding.default: _embedding,
}

METADATA = ("slot_mapping", "cu_seqlens", "seq_lens", "block_table")


def _paged_attention(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
    """Row t reads the keys of its own sequence up to its own position: by the template's contract."""
    kwargs = node.kwargs
    for name in METADATA:
        if not isinstance(ctx.states[kwargs[name]], Layout):
            raise Refusal(f"attention's {name} is not the step's own")
    if not all(isinstance(ctx.states[base], Layout) for base in kwargs["_all_bases"]):
        raise Refusal("attention's cache is not a graph input")
    heads = [ctx.rows(kwargs[name]) for name in ("q", "k", "v")]
    for value in heads:
        if [axis.row for axis in value.dims[0]] != ["tokens"] or not all(is_feature(dim) for dim in value.dims[1:]):
            raise Refusal(f"attention over {[describe(dim) for dim in value.dims]} instead of [tokens, heads, features]")
    out = Rows((heads[0].dims[0], heads[0].dims[1], heads[2].dims[2]))
    return (out, *(LAYOUT for _ in kwargs["_all_bases"]))


def _functionalized(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
    if node.args[0] is not ours.paged_attention.default:
        raise Refusal(f"mutating operation {node.args[0]}")
    return _paged_attention(node, ctx)


def _dense_attention(node: fx.Node, ctx: Context) -> Rows:
    q, k, v = (ctx.rows(arg) for arg in node.args[:3])
    for value in (q, k, v):
        if not is_feature(value.dims[1]) or not is_feature(value.dims[3]):
            raise Refusal("attention's heads or features hold rows")
        if any(axis.row not in ("tokens", None) for axis in value.dims[2]) or value.dims[0] != q.dims[0]:
            raise Refusal("attention's batch and tokens are out of place")
    return Rows((q.dims[0], q.dims[1], q.dims[2], v.dims[3]))


ATTENTION: Mapping[Any, Rule] = {
    FUNCTIONALIZED: _functionalized,
    ours.dense_attention.default: _dense_attention,
}

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def size_arithmetic(node: fx.Node) -> Size | None:
    """The state of a node whose value is a number, None for tensors."""
    return SIZE if isinstance(node.meta.get("val"), NUMBERS) or node.target is aten.sym_size.int else None
