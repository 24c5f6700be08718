"""Twins of the templates: operations with a gradient that stand in a graph while autograd sees it, and never run.

A twin has the arguments of its template, and behind them what only the gradient needs: the step's ``leaves`` and the
*ports* of its weights. A port is a float64 stand-in of a weight, a zero without memory, whose gradient is the weight's:
autograd would round a gradient to the dtype of a weight itself. A weight that is not trained has no port, and no
gradient of it is computed. When autograd has made its two graphs, `as_templates` puts the templates back.

silu has a twin too: torch writes it out as x / (exp(-x) + 1), whose derivative by the chain rule is 0 · inf where exp
overflows.

Gradients of rows are products and row sums in the orders of the forward templates. Gradients of weights are token sums
(templates of ``token_matmul``, ``token_sum`` and ``token_scatter``), exact in any order of tokens.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from detcompile.passes.graphs import insert, replace
from detcompile.templates.attention.scores import RULE
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import forget_eager_inputs
from detcompile.torch_internals.operators import schema_of

__all__ = ["TWINS", "as_templates", "twins"]

aten = torch.ops.aten
_LIBRARY = torch.library.Library("detcompile_twins", "DEF")
twins = torch.ops.detcompile_twins
WITHOUT_DEFAULTS = re.sub(r"=[^,]*", "", RULE)
TWINS: dict[Any, tuple[Any, int]] = {}  # twin -> its template, and how many of its arguments that takes


def _define(name: str, schema: str, template: Any, fake: Callable[..., Any], setup: Any, backward: Any) -> None:
    _LIBRARY.define(f"{name}({schema}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"detcompile_twins::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"detcompile_twins::{name}", backward, setup_context=setup, lib=_LIBRARY
    )
    TWINS[getattr(twins, name).default] = template, len(schema_of(template).arguments)


def as_templates(gm: fx.GraphModule) -> fx.GraphModule:
    """matmul twin(x, w, bias, residual, radices, leaves, ports)  ->  matmul(x, w, bias, residual, radices)"""
    for node in gm.graph.find_nodes(op="call_function", target=twins.silu.default):
        (x,) = node.args
        one = insert(gm.graph, aten.add.Tensor, (_exp_of_minus(gm.graph, x, node), 1), node)
        replace(node, insert(gm.graph, aten.div.Tensor, (x, one), node))
    for twin, (template, count) in TWINS.items():
        for node in gm.graph.find_nodes(op="call_function", target=twin):
            node.target, node.args = template, node.args[:count]
            forget_eager_inputs(node)  # Inductor's note of how the twin was called
    gm.recompile()
    return gm


def _exp_of_minus(graph: fx.Graph, x: fx.Node, origin: fx.Node) -> fx.Node:
    return insert(graph, aten.exp.default, (insert(graph, aten.neg.default, (x,), origin),), origin)


def _matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _bias, residual, _radices, _dtype, leaves, rows_a_token, grid, w_port, bias_port = inputs
    ctx.save_for_backward(x if w_port is not None else None, w, leaves)
    ctx.trains_w, ctx.trains_bias, ctx.dtype = w_port is not None, bias_port is not None, x.dtype
    ctx.adds, ctx.sum = residual is not None, (rows_a_token, grid)


def _matmul_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, w, leaves = ctx.saved_tensors
    rounded = g.to(ctx.dtype)
    dx = ours.matmul(rounded, w.t(), None, None, []) if ctx.needs_input_grad[0] else None
    dw = ours.token_matmul(rounded, x, leaves, *ctx.sum) if ctx.trains_w else None
    db = ours.token_sum(rounded, ctx.sum[1]) if ctx.trains_bias else None
    return dx, None, None, g if ctx.adds else None, None, None, None, None, None, dw, db


_define(
    "matmul",
    "Tensor x, Tensor w, Tensor? bias, Tensor? residual, int[] radices, ScalarType? out_dtype, Tensor leaves, "
    "int rows_a_token, int grid, Tensor? w_port, Tensor? bias_port) -> Tensor",
    ours.matmul.default,
    lambda x, w, bias, residual, radices, out_dtype, *_: x.new_empty(
        (x.shape[0], w.shape[0]), dtype=out_dtype or x.dtype
    ),
    _matmul_setup,
    _matmul_backward,
)


def _rms_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.how, ctx.grid, port = inputs
    ctx.save_for_backward(x, weight)
    ctx.trains = port is not None


def _rms_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx, rows = ours.rms_norm_backward(g, x, weight, *ctx.how)
    return dx, None, None, None, None, ours.token_sum(rows.flatten(0, -2), ctx.grid) if ctx.trains else None


_define(
    "rms_norm",
    "Tensor x, Tensor? weight, float eps, bool round_before_weight, int grid, Tensor? port) -> Tensor",
    ours.rms_norm.default,
    lambda x, *_: x.new_empty(x.shape),
    _rms_setup,
    _rms_backward,
)


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _bias, ctx.eps, ctx.grid, port, bias_port = inputs
    ctx.save_for_backward(x, weight)
    ctx.trains_w, ctx.trains_bias = port is not None, bias_port is not None


def _layer_norm_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    dx, rows = ours.layer_norm_backward(g, *ctx.saved_tensors, ctx.eps)
    dw = ours.token_sum(rows.flatten(0, -2), ctx.grid) if ctx.trains_w else None
    return dx, None, None, None, None, dw, ours.token_sum(g.flatten(0, -2), ctx.grid) if ctx.trains_bias else None


_define(
    "layer_norm",
    "Tensor x, Tensor? weight, Tensor? bias, float eps, int grid, Tensor? port, Tensor? bias_port) -> Tensor",
    ours.layer_norm.default,
    lambda x, *_: x.new_empty(x.shape),
    _layer_norm_setup,
    _layer_norm_backward,
)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.padding_id, ctx.grid, port = inputs
    ctx.save_for_backward(ids)
    ctx.num_rows, ctx.trains = weight.shape[0], port is not None


def _embedding_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    if not ctx.trains:
        return None, None, None, None, None
    if ctx.padding_id >= 0:  # torch gives no gradient to the row of padding
        g = g.masked_fill((ids == ctx.padding_id).unsqueeze(-1), 0)
    dw = ours.token_scatter(g.flatten(0, -2), ids.flatten(), ctx.num_rows, ctx.grid)
    return None, None, None, None, dw


_define(
    "embedding",
    "Tensor weight, Tensor ids, int padding_id, int grid, Tensor? port) -> Tensor",
    ours.embedding.default,
    lambda weight, ids, *_: weight.new_empty((*ids.shape, weight.shape[1])),
    _embedding_setup,
    _embedding_backward,
)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.rule, ctx.grid, port = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.trains = port is not None


def _attention_backward(ctx: Any, g: Tensor, _lse: None) -> tuple[Any, ...]:
    dq, dk, dv, rows = ours.packed_attention_backward(g.contiguous(), *ctx.saved_tensors, *ctx.rule)
    return dq, dk, dv, None, *(None for _ in ctx.rule), None, ours.token_sum(rows, ctx.grid) if ctx.trains else None


_define(
    "packed_attention",
    f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, {WITHOUT_DEFAULTS}, int grid, Tensor? port) -> (Tensor, Tensor)",
    ours.packed_attention.default,
    lambda q, k, v, *_: (
        q.new_empty((q.shape[0], q.shape[1], v.shape[2])),
        q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32),
    ),
    _attention_setup,
    _attention_backward,
)


def _row_sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.length, ctx.dtype = inputs[0].shape[-1], inputs[0].dtype


_define(
    "row_sum",
    "Tensor x, ScalarType? out_dtype=None) -> Tensor",
    ours.row_sum.default,
    lambda x, out_dtype=None: x.new_empty(x.shape[:-1], dtype=out_dtype or x.dtype),
    _row_sum_setup,
    lambda ctx, g: (g.unsqueeze(-1).to(ctx.dtype).expand(*g.shape, ctx.length), None),
)


def _silu_backward(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    half = torch.sigmoid(x)
    return g * half * (1 + x * (1 - half))


_LIBRARY.define("silu(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.register_fake("detcompile_twins::silu", lambda x: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_autograd(
    "detcompile_twins::silu",
    _silu_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)


def _silu_mul_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = (saved.float() for saved in ctx.saved_tensors)
    half = torch.sigmoid(gate)
    dtype = ctx.saved_tensors[0].dtype
    d_gate = (g.float() * up * half * (1 + gate * (1 - half))).to(dtype)
    return d_gate, (g.float() * (gate * half).to(dtype).float()).to(dtype)


_define(
    "silu_mul",
    "Tensor gate, Tensor up) -> Tensor",
    ours.silu_mul.default,
    lambda gate, up: gate.new_empty(gate.shape),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    _silu_mul_backward,
)
