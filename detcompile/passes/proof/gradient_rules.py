"""Rules of training templates: packed attention keeps rows apart, and gradients occur in a backward only.

In a backward, sums over tokens are gradients of weights (TokenSum). No row may read them: they are moved, added to each
other in float64, and returned.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from detcompile.passes.graphs import VIEWS, arguments_of, operation_of, sympy_size
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import (
    Dim,
    Layout,
    Refusal,
    Rows,
    TokenSum,
    created,
    describe,
    require_feature,
    require_weight,
)
from detcompile.passes.proof.template_rules import require_heads_of_tokens, require_per_head
from detcompile.templates.ops import ours

aten = torch.ops.aten


def packed_attention(node: fx.Node, ctx: Context) -> tuple[Rows, Rows]:
    """Row t reads the keys of its sequence up to its position. They are rows of the same step."""
    given = arguments_of(node)
    _require_step(given["cu_seqlens"], "cu_seqlens", ctx)
    require_per_head(given["sinks"], given["alibi_slopes"], ctx=ctx)
    heads = [ctx.rows(given[name]) for name in ("q", "k", "v")]
    biases = [] if given["relative_bias"] is None else [ctx.rows(given["relative_bias"])]
    for value in (*heads, *biases):
        require_heads_of_tokens(value)
    q, _, v = heads
    return Rows((q.dims[0], q.dims[1], v.dims[2])), Rows(q.dims[:2])


def gradient(node: fx.Node, ctx: Context) -> Any:
    """Apply the rule of GRADIENTS.

    Raises:
        Refusal: the graph is not a backward, or the rule refuses.
    """
    rule = GRADIENTS.get(operation_of(node))
    if rule is None or not ctx.backward:
        raise Refusal("a gradient in a forward: rows meet in it")
    return rule(node, arguments_of(node), ctx)


def of_token_sums(node: fx.Node, ctx: Context) -> TokenSum:
    """Allow moving a sum over tokens and adding two of them.

    Raises:
        Refusal: any other operation.
    """
    reads = [ctx.states[arg] for arg in node.all_input_nodes]
    moved = node.target in MOVES and len(reads) == 1
    added = node.target is aten.add.Tensor and not node.kwargs and all(isinstance(state, TokenSum) for state in reads)
    if not (moved or added):
        raise Refusal("reads a sum over tokens, which is the gradient of a weight and nothing else")
    return TokenSum()


MOVES = (*VIEWS, aten.permute.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
         aten.squeeze.dims, aten.clone.default)  # fmt: skip


def _attention_backward(node: fx.Node, given: Mapping[str, Any], ctx: Context) -> tuple[Rows, ...]:
    """By contract, a row of dq reads its sequence up to its token, and a row of dk and dv from its token on."""
    _require_step(given["cu_seqlens"], "cu_seqlens", ctx)
    require_per_head(given["sinks"], given["alibi_slopes"], ctx=ctx)
    g, q, k, v, out = values = [ctx.rows(given[name]) for name in ("g", "q", "k", "v", "out")]
    for value in values:
        require_heads_of_tokens(value)
    lse = ctx.rows(given["lse"])
    if g.dims != out.dims or lse.dims != q.dims[:2]:
        raise Refusal("a gradient of attention over rows that are not the forward's")
    none = created([sympy_size(size) for size in node.meta["val"][3].shape], {})
    return q, k, v, none if given["sinks"] is None else lse


def _norm_backward(node: fx.Node, given: Mapping[str, Any], ctx: Context) -> tuple[Rows, Rows]:
    """Row t of each result reads row t of the gradient and of the norm's input."""
    value = _alike(ctx.rows(given["g"]), ctx.rows(given["x"]))
    if given["weight"] is not None:
        require_weight(ctx.rows(given["weight"]), "the weight of a norm")
    return value, value


def _alike(g: Rows, value: Rows) -> Rows:
    require_feature(value, -1, "a row reduction")
    if g.dims != value.dims:
        raise Refusal(f"a gradient {' '.join(map(describe, g.dims))} of {' '.join(map(describe, value.dims))}")
    return value


def _token_matmul(node: fx.Node, given: Mapping[str, Any], ctx: Context) -> TokenSum:
    _require_step(given["leaves"], "leaves", ctx)
    g, x = ctx.rows(given["g"]), ctx.rows(given["x"])
    rows = _require_tokens(g, x.dims[0])
    if math.prod(int(axis.size) for axis in rows[1:]) != given["rows_a_token"]:
        raise Refusal(f"leaves of {given['rows_a_token']} rows a token, over {describe(rows)}")
    require_feature(x, 1, "a gradient of a matrix")
    return TokenSum()


def _token_sum(node: fx.Node, given: Mapping[str, Any], ctx: Context) -> TokenSum:
    """A leaf is one row, so the order of tokens does not matter, and heads may come first."""
    g = ctx.rows(given["g"])
    if sum(axis.row is not None for axis in g.dims[0]) != 1:
        raise Refusal(f"a sum over {describe(g.dims[0])}, which is not over the tokens")
    require_feature(g, 1, "a gradient of a weight")
    return TokenSum()


def _token_scatter(node: fx.Node, given: Mapping[str, Any], ctx: Context) -> TokenSum:
    _require_tokens(ctx.rows(given["g"]), ctx.rows(given["ids"]).dims[0])
    return TokenSum()


def _require_tokens(g: Rows, others: Dim) -> Dim:
    """Require that g and ``others`` hold all tokens in order, with equally many rows of each."""
    rows = g.dims[0]
    if not rows or rows[0].row is None or any(axis.row for axis in rows[1:]) or others != rows:
        raise Refusal(f"a sum over {describe(rows)}, which is not over the tokens in their order")
    require_feature(g, 1, "a gradient of a weight")
    return rows


def _require_step(arg: fx.Node, part: str, ctx: Context) -> None:
    state = ctx.states[arg]
    if not isinstance(state, Layout) or state.part != part:
        raise Refusal(f"{part} is not the step's")


GRADIENTS: Mapping[Any, Callable[[fx.Node, Mapping[str, Any], Context], Any]] = {
    ours.layer_norm_backward.default: _norm_backward,
    ours.packed_attention_backward.default: _attention_backward,
    ours.rms_norm_backward.default: _norm_backward,
    ours.softmax_backward.default: lambda node, given, ctx: _alike(ctx.rows(given["g"]), ctx.rows(given["y"])),
    ours.token_matmul.default: _token_matmul,
    ours.token_scatter.default: _token_scatter,
    ours.token_sum.default: _token_sum,
}
