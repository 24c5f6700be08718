"""Autograd operations that stand for templates while a certified forward graph is differentiated. They never run.

Each takes the arguments of its template, then what only the gradient needs: the step's ``leaves`` and the *gradient
handles* of its weights. A handle is a float64 stand-in for a weight, a zero without memory. The gradient of the handle
is the gradient of the weight: autograd would round a gradient to the dtype of the weight itself. A weight that is not
trained has no handle and no gradient. After autograd has made its two graphs, `as_templates` puts the templates back.

silu has such an operation too: torch writes it as x / (exp(-x) + 1), whose derivative by the chain rule is 0 * inf
if exp overflows.

Gradients of rows are products and row sums in the orders of the forward templates. Gradients of weights are token sums
(templates of ``token_matmul``, ``token_sum`` and ``token_scatter``), which are exact in any order of tokens.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from detcompile.errors import UnsupportedModel
from detcompile.passes.graphs import VIEWS, arguments_of, insert, operation_of, replace, shape_of, source_of
from detcompile.templates.attention.scores import RULE
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import forget_eager_inputs
from detcompile.torch_internals.operators import schema_of

aten = torch.ops.aten
_LIBRARY = torch.library.Library("detcompile_autograd", "DEF")
autograd_ops = torch.ops.detcompile_autograd
WITHOUT_DEFAULTS = re.sub(r"=[^,]*", "", RULE)
AUTOGRAD_OPS: dict[Any, tuple[Any, int]] = {}  # operation -> its template, and how many arguments that takes


def _define(name: str, schema: str, template: Any, fake: Callable[..., Any], setup: Any, backward: Any) -> None:
    _LIBRARY.define(f"{name}({schema}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"detcompile_autograd::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(f"detcompile_autograd::{name}", backward, setup_context=setup, lib=_LIBRARY)
    AUTOGRAD_OPS[getattr(autograd_ops, name).default] = template, len(schema_of(template).arguments)


def as_templates(gm: fx.GraphModule) -> fx.GraphModule:
    """autograd_ops.matmul(x, w, bias, residual, radices, leaves, handles)  ->  matmul(x, w, bias, residual, radices)"""
    for node in gm.graph.find_nodes(op="call_function", target=autograd_ops.silu.default):
        (x,) = node.args
        one = insert(gm.graph, aten.add.Tensor, (_exp_of_minus(gm.graph, x, node), 1), node)
        replace(node, insert(gm.graph, aten.div.Tensor, (x, one), node))
    for op, (template, count) in AUTOGRAD_OPS.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            node.target, node.args = template, node.args[:count]
            forget_eager_inputs(node)  # Inductor's record of the earlier call
    gm.recompile()
    return gm


def _exp_of_minus(graph: fx.Graph, x: fx.Node, origin: fx.Node) -> fx.Node:
    return insert(graph, aten.exp.default, (insert(graph, aten.neg.default, (x,), origin),), origin)


def _matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _bias, residual, _radices, _dtype, leaves, rows_a_token, grid, w_handle, bias_handle = inputs
    ctx.save_for_backward(x if w_handle is not None else None, w, leaves)
    ctx.trains_w, ctx.trains_bias, ctx.dtype = w_handle is not None, bias_handle is not None, x.dtype
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
    "int rows_a_token, int grid, Tensor? w_handle, Tensor? bias_handle) -> Tensor",
    ours.matmul.default,
    lambda x, w, bias, residual, radices, out_dtype, *_: x.new_empty(
        (x.shape[0], w.shape[0]), dtype=out_dtype or x.dtype
    ),
    _matmul_setup,
    _matmul_backward,
)


def _rms_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.how, ctx.grid, handle = inputs
    ctx.save_for_backward(x, weight)
    ctx.trains = handle is not None


def _rms_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    # A rotation's gradient is strided. With this, Inductor writes it contiguously, and nothing is copied.
    dx, rows = ours.rms_norm_backward(g.contiguous(), x, weight, *ctx.how)
    return dx, None, None, None, None, ours.token_sum(rows.flatten(0, -2), ctx.grid) if ctx.trains else None


_define(
    "rms_norm",
    "Tensor x, Tensor? weight, float eps, bool round_before_weight, int grid, Tensor? handle) -> Tensor",
    ours.rms_norm.default,
    lambda x, *_: x.new_empty(x.shape),
    _rms_setup,
    _rms_backward,
)


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _bias, ctx.eps, ctx.grid, handle, bias_handle = inputs
    ctx.save_for_backward(x, weight)
    ctx.trains_w, ctx.trains_bias = handle is not None, bias_handle is not None


def _layer_norm_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    g = g.contiguous()
    dx, rows = ours.layer_norm_backward(g, *ctx.saved_tensors, ctx.eps)
    dw = ours.token_sum(rows.flatten(0, -2), ctx.grid) if ctx.trains_w else None
    return dx, None, None, None, None, dw, ours.token_sum(g.flatten(0, -2), ctx.grid) if ctx.trains_bias else None


_define(
    "layer_norm",
    "Tensor x, Tensor? weight, Tensor? bias, float eps, int grid, Tensor? handle, Tensor? bias_handle) -> Tensor",
    ours.layer_norm.default,
    lambda x, *_: x.new_empty(x.shape),
    _layer_norm_setup,
    _layer_norm_backward,
)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.padding_id, ctx.grid, handle = inputs
    ctx.save_for_backward(ids)
    ctx.num_rows, ctx.trains = weight.shape[0], handle is not None


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
    "Tensor weight, Tensor ids, int padding_id, int grid, Tensor? handle) -> Tensor",
    ours.embedding.default,
    lambda weight, ids, *_: weight.new_empty((*ids.shape, weight.shape[1])),
    _embedding_setup,
    _embedding_backward,
)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.rule, ctx.grid, handle = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.trains = handle is not None


def _attention_backward(ctx: Any, g: Tensor, _lse: None) -> tuple[Any, ...]:
    dq, dk, dv, rows = ours.packed_attention_backward(g.contiguous(), *ctx.saved_tensors, *ctx.rule)
    return dq, dk, dv, None, *(None for _ in ctx.rule), None, ours.token_sum(rows, ctx.grid) if ctx.trains else None


_define(
    "packed_attention",
    f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, {WITHOUT_DEFAULTS}, int grid, Tensor? handle) "
    "-> (Tensor, Tensor)",
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
torch.library.register_fake("detcompile_autograd::silu", lambda x: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_autograd(
    "detcompile_autograd::silu",
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


aten, prims = torch.ops.aten, torch.ops.prims
LEAVES = "leaves"  # name of the input with the leaf table of the step
# Allowed between a weight and its template: moving elements, and rounding, whose derivative counts as 1.
MOVES = (*VIEWS, aten.permute.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim)
ROUNDS = (prims.convert_element_type.default, aten._to_copy.default, aten.clone.default)
SHIFTS = (aten.add.Tensor, aten.add.Scalar)


HandleOf = Callable[[Any], fx.Node | None]  # from a template's weight to its handle


class _Sums(NamedTuple):
    """Order of a step's sums over its tokens."""

    leaves: fx.Node  # the leaf table
    grid: int


def to_train(gm: fx.GraphModule, trained: Sequence[int], leaves: Any, grid: int) -> fx.GraphModule:
    """Return a graph with the inputs of ``gm``, then ``leaves``, then a handle for each of the ``trained`` inputs.

        matmul(x, w, bias, residual, radices)  ->  autograd_ops.matmul(…, leaves, handle of w, handle of bias)
        prims.convert_element_type(x, dtype)   ->  aten._to_copy(x, dtype)          (prims have no gradient)

    Args:
        gm: the rewritten and certified graph; it is not changed.
        trained: positions of the inputs that are trained weights.
        leaves: the fake value of the leaf table [L + 1] int32.
        grid: ``Numerics.token_grid``.

    Raises:
        UnsupportedModel: an operation has no gradient, or a trained weight enters one that passes it no gradient.
    """
    graph = fx.Graph()
    known: dict[fx.Node, Any] = {}
    result = graph.graph_copy(gm.graph, known)
    output = graph.output(result)
    output.meta = dict(next(iter(gm.graph.find_nodes(op="output"))).meta)
    inputs = [known[node] for node in gm.graph.find_nodes(op="placeholder")]
    with graph.inserting_after(inputs[-1]):
        table = graph.placeholder(LEAVES)
    table.meta["val"] = leaves
    handles = _Handles(graph, {inputs[position]: position for position in trained}, table)
    join_silus(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _replace(node, _Sums(table, grid), handles)
    handles.require_all_seen()
    trained_gm = fx.GraphModule(gm, graph)
    trained_gm.graph.eliminate_dead_code()
    trained_gm.recompile()
    return trained_gm


def join_silus(graph: fx.Graph) -> None:
    """div(x, add(exp(neg(x)), 1))  ->  autograd_ops.silu(x)"""
    for div in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        x, below = div.args
        exp = below.args[0] if isinstance(below, fx.Node) and below.target is aten.add.Tensor else None
        neg = exp.args[0] if isinstance(exp, fx.Node) and exp.target is aten.exp.default else None
        if isinstance(neg, fx.Node) and neg.target is aten.neg.default and neg.args[0] is x and below.args[1] == 1:
            div.target, div.args = autograd_ops.silu.default, (x,)


HANDLE = "grad_of_"  # prefix of the names of handles


def is_handle(node: fx.Node) -> bool:
    """Return whether an input of a graph is the gradient handle of a weight."""
    return node.op == "placeholder" and node.name.startswith(HANDLE)


class _Handles:
    """The gradient handles of a graph's weights, and the values computed from weights alone."""

    def __init__(self, graph: fx.Graph, weights: Mapping[fx.Node, int], last: fx.Node) -> None:
        self._known: dict[fx.Node, fx.Node] = {}
        self._computed = set(weights)  # from trained weights and constants alone
        self._used: set[fx.Node] = set()  # weights that a template takes together with their handles
        for weight in weights:
            with graph.inserting_after(last):
                last = self._known[weight] = graph.placeholder(HANDLE + weight.name)
            value = weight.meta["val"]
            last.meta["val"] = value.new_zeros((), dtype=torch.float64).expand(value.shape)

    def of(self, weight: Any) -> fx.Node | None:
        """Return the handle of a template's weight, moved as the weight is moved; None if the weight is not trained."""
        if not isinstance(weight, fx.Node) or weight not in self._computed:
            return None
        self._used.add(weight)
        if weight not in self._known:
            source = next(arg for arg in weight.all_input_nodes if arg in self._computed)
            inner = self.of(source)
            if weight.target in MOVES:
                with weight.graph.inserting_before(weight):
                    inner = weight.graph.call_function(weight.target, (inner, *weight.args[1:]), dict(weight.kwargs))
            assert inner is not None
            self._known[weight] = inner
        return self._known[weight]

    def adds(self, node: fx.Node) -> bool:
        """Record a node that is computed from weights alone, and return whether it is one.

        Raises:
            UnsupportedModel: the node computes from a weight something that has no exact gradient.
        """
        weights = [arg for arg in node.all_input_nodes if arg in self._computed]
        if not weights or not all(arg in self._computed or arg.op == "get_attr" for arg in node.all_input_nodes):
            return False
        shifts = node.target in SHIFTS and len(weights) == 1 and not node.kwargs and weights[0] is node.args[0]
        if node.target in MOVES or node.target in ROUNDS or (shifts and not isinstance(node.args[1], fx.Node)):
            self._computed.add(node)
            return True
        raise UnsupportedModel(f"{node.target} at {source_of(node)}: a trained weight goes through it; freeze it")

    def require_all_seen(self) -> None:
        """Fail if rows read a weight, but no autograd operation reads its handle."""
        for weight in self._computed:
            users = [user for user in weight.users if user not in self._computed]
            readers = [user for user in users if user.target not in AUTOGRAD_OPS or weight not in self._used]
            if readers:
                where = f"{readers[0].target} at {source_of(readers[0])}"
                raise UnsupportedModel(f"{where}: rows read a trained weight here, which gets no gradient; freeze it")


def _replace(node: fx.Node, sums: _Sums, handles: _Handles) -> None:
    """Replace a template by its autograd operation, with the handles after its arguments."""
    of_weights = handles.adds(node)
    if node.target is prims.convert_element_type.default:
        node.args, node.kwargs, node.target = node.args[:1], {"dtype": node.args[1]}, aten._to_copy.default
    elif node.target in ARGUMENTS and not of_weights:
        op, arguments = ARGUMENTS[node.target]
        named = arguments_of(node)
        given = arguments([named[argument.name] for argument in schema_of(node.target).arguments], sums, handles.of)
        node.target, node.args, node.kwargs = op.default, tuple(given), {}
    elif getattr(operation_of(node), "namespace", "") == "detcompile":
        name = f"{operation_of(node)} at {source_of(node)}"
        raise UnsupportedModel(f"{name} has no gradient: models with this operation can be served, but not trained")


def _of_product(given: list[Any], sums: _Sums, handle: HandleOf) -> list[Any]:
    rows = shape_of(given[0])[0]
    (tokens,) = rows.free_symbols
    return [*given, sums.leaves, int(rows / tokens), sums.grid, handle(given[1]), handle(given[2])]


# By template: its autograd operation, and the arguments of that.
ARGUMENTS: Mapping[Any, tuple[Any, Callable[[list[Any], _Sums, HandleOf], list[Any]]]] = {
    aten.embedding.default: (
        autograd_ops.embedding,
        lambda given, sums, handle: [*given[:3], sums.grid, handle(given[0])],
    ),
    ours.embedding.default: (
        autograd_ops.embedding,
        lambda given, sums, handle: [*given, -1, sums.grid, handle(given[0])],
    ),
    ours.layer_norm.default: (
        autograd_ops.layer_norm,
        lambda given, sums, handle: [*given, sums.grid, handle(given[1]), handle(given[2])],
    ),
    ours.matmul.default: (autograd_ops.matmul, _of_product),
    ours.packed_attention.default: (
        autograd_ops.packed_attention,
        lambda given, sums, handle: [*given, sums.grid, handle(given[8])],
    ),
    ours.rms_norm.default: (autograd_ops.rms_norm, lambda given, sums, handle: [*given, sums.grid, handle(given[1])]),
    ours.row_sum.default: (autograd_ops.row_sum, lambda given, *_: given),
    ours.silu_mul.default: (autograd_ops.silu_mul, lambda given, *_: given),
}
