"""Every operation of torch.ops.detcompile: its class in the certificate, its rule for rows, and its sum order.

A registered operation without an entry is an error when this module is imported. An order is a function of (node,
numerics). It returns None if this call sums nothing (`sums_nothing`: if no call does), and raises Refusal for an order
that is not declared or whose extent is not fixed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import sympy
from torch import fx

from detcompile.orders import Keys, Sequential
from detcompile.orders.numerics import (
    KEY_BLOCK,
    Numerics,
    kv_order,
    matmul_order,
    row_order,
    state_order,
    token_product_order,
    token_row_order,
)
from detcompile.orders.sum_order import SumOrder
from detcompile.passes.graphs import arguments_of, operation_of, shape_of
from detcompile.passes.proof.gradient_rules import gradient, packed_attention
from detcompile.passes.proof.movement_rules import embedding
from detcompile.passes.proof.pointwise import pointwise
from detcompile.passes.proof.provenance import Refusal, Rule
from detcompile.passes.proof.template_rules import (
    AVERAGE,
    CONV,
    GREATEST,
    SCAN,
    batched_matmul,
    cached_attention,
    columns_gathered,
    dense_attention,
    dense_recurrence,
    dequant_expert_matmul,
    dequant_expert_matmul_partial,
    dequant_matmul,
    dequant_matmul_partial,
    exact_expert_linear,
    exact_fused_linear,
    exact_linear,
    exact_rotated_attention,
    expert_matmul,
    expert_matmul_partial,
    gated_matmul,
    matmul,
    matmul_all_reduce,
    packed_recurrence,
    paged_attention,
    quantize_rows,
    rope_cache,
    row_by_row,
    row_reduced,
    tree_all_reduce,
)
from detcompile.templates.cpu.library import isa_of
from detcompile.templates.ops import ours
from detcompile.torch_internals.graph_nodes import FUNCTIONALIZED
from detcompile.torch_internals.operators import operation_names, schema_of

Kind = Literal["template", "attention", "recurrence", "collective"]
Order: TypeAlias = Callable[[fx.Node, Numerics], SumOrder | None]


def sums_nothing(node: fx.Node, numerics: Numerics) -> None:
    """Return no order: the template moves values, or its sums have two terms, each a separate operation."""


def exact(node: fx.Node, numerics: Numerics) -> None:
    """Return no order: every sum is a sum of integers that none of its orders rounds."""


def sums_in_order(node: fx.Node, numerics: Numerics) -> None:
    """Return no order of the declared numerics: exact_sum adds a row from its first element to its last."""


def order_of_product(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of a matrix product: over the last dimension of x, in the declared tree if it has one."""
    given = arguments_of(node)
    value = given["x"].meta["val"]
    radices = _declared(given.get("radices") or (), numerics)
    return matmul_order(_static(shape_of(given["x"])[-1]), value.dtype, radices, isa_of(value.device))


def order_of_row(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of a row reduction: over the last dimension, whole or in the declared leaves."""
    given = arguments_of(node)
    (rows,) = (given[name] for name in ("x", "y", "logits") if name in given)
    value = rows.meta["val"]
    radices = _declared(given.get("radices") or (), numerics)
    return row_order(_static(shape_of(rows)[-1]), value.device.type, radices, value.dtype)


def order_of_head_norm(node: fx.Node, numerics: Numerics) -> SumOrder | None:
    """Return the order of rope_cache's norm of a head, if it has one."""
    given = arguments_of(node)
    if given["eps"] is None:
        return None
    value = given["q"].meta["val"]
    return row_order(_static(shape_of(given["q"])[-1]), value.device.type, (), value.dtype)


def order_of_attention(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order over the keys of one sequence, in the declared chunks."""
    chunk = arguments_of(node)["kv_chunk"]
    if chunk != numerics.kv_chunk:
        raise Refusal(f"attention in chunks of {chunk}, declared are {numerics.kv_chunk}")
    return kv_order(numerics)


def order_of_attention_gradients(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of the gradients of queries: over keys. Those of keys and values are over queries."""
    order_of_attention(node, numerics)
    return Keys(KEY_BLOCK)


def order_of_convolution(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of a causal convolution: over its taps."""
    return Sequential(_static(shape_of(arguments_of(node)["weight"])[1]))


def order_of_state(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order in which a query reads a matrix state: over its keys."""
    q = arguments_of(node)["q"]
    return state_order(_static(shape_of(q)[-1]), q.meta["val"].device.type)


def order_of_ranks(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of a product and the tree over its ranks."""
    given = arguments_of(node)
    above = given["radices_above"]
    return _shared(given["x"], given["radices"], math.prod(above), [above], numerics)


def order_of_partial(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of a whole sum: this rank's share, and the trees of the node's users."""
    given = arguments_of(node)
    trees = [arguments_of(user)["radices"] for user in node.users]
    return _shared(given["x"], given["radices"], given["tp"], trees, numerics)


def order_of_tokens(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of a matrix gradient: over tokens, in leaves of the declared length on the declared grid."""
    value = _on_declared_grid(node, numerics)["g"].meta["val"]
    return token_product_order(numerics, value.dtype, isa_of(value.device))


def order_of_token_rows(node: fx.Node, numerics: Numerics) -> SumOrder:
    """Return the order of the gradient of a scale or table: over tokens, on the declared grid."""
    _on_declared_grid(node, numerics)
    return token_row_order(numerics)


def _on_declared_grid(node: fx.Node, numerics: Numerics) -> Mapping[str, Any]:
    given = arguments_of(node)
    if given["grid"] != numerics.token_grid:
        raise Refusal(f"a sum over tokens on the grid 2^{given['grid']}, declared is 2^{numerics.token_grid}")
    return given


def _shared(
    x: fx.Node, radices: Sequence[int], tp: int, trees: Sequence[Sequence[int]], numerics: Numerics
) -> SumOrder:
    if tp not in numerics.tp_sizes or tuple(radices) != numerics.split_radices(tp)[1]:
        raise Refusal(f"a subtree {tuple(radices)} on each of {tp} ranks, declared is {numerics.radices}")
    if any(tuple(above) != numerics.split_radices(tp)[0] for above in trees):
        raise Refusal(f"{tp} ranks added in the tree {tuple(trees[0])}, declared is {numerics.radices}")
    value = x.meta["val"]
    return matmul_order(_static(shape_of(x)[-1]) * tp, value.dtype, numerics.radices, isa_of(value.device))


def _declared(radices: Sequence[int], numerics: Numerics) -> tuple[int, ...]:
    if radices and tuple(radices) != numerics.radices:
        raise Refusal(f"a sum over the tree {tuple(radices)}, declared is {numerics.radices}")
    return tuple(radices)


def _static(size: sympy.Expr) -> int:
    if size.free_symbols:
        raise Refusal(f"a sum over {size}, which is not fixed")
    return int(size)


class Template(NamedTuple):
    """One operation. No field has a default: an operation without sums has `sums_nothing`."""

    kind: Kind
    rows: Rule
    order: Order


TEMPLATES: Mapping[Any, Template] = {
    ours.all_gather_columns.default: Template("collective", rows=columns_gathered, order=sums_nothing),
    ours.batched_matmul.default: Template("template", rows=batched_matmul, order=order_of_product),
    ours.cached_attention.default: Template("attention", rows=cached_attention, order=order_of_attention),
    ours.causal_conv.default: Template("recurrence", rows=packed_recurrence(CONV), order=order_of_convolution),
    ours.dense_attention.default: Template("attention", rows=dense_attention, order=order_of_attention),
    ours.dense_causal_conv.default: Template("recurrence", rows=dense_recurrence(CONV), order=order_of_convolution),
    ours.dense_linear_recurrence.default: Template("recurrence", rows=dense_recurrence(SCAN), order=order_of_state),
    ours.dense_running_max.default: Template("recurrence", rows=dense_recurrence(GREATEST), order=sums_nothing),
    ours.dense_wkv.default: Template("recurrence", rows=dense_recurrence(AVERAGE), order=sums_nothing),
    ours.dequant_expert_matmul.default: Template("template", rows=dequant_expert_matmul, order=order_of_product),
    ours.dequant_expert_matmul_partial.default: Template(
        "collective", rows=dequant_expert_matmul_partial, order=order_of_partial
    ),
    ours.dequant_matmul.default: Template("template", rows=dequant_matmul, order=order_of_product),
    ours.dequant_matmul_partial.default: Template("collective", rows=dequant_matmul_partial, order=order_of_partial),
    ours.embedding.default: Template("template", rows=embedding, order=sums_nothing),
    ours.exact_dense_attention.default: Template("attention", rows=dense_attention, order=exact),
    ours.exact_divide.default: Template("template", rows=pointwise, order=sums_nothing),
    ours.exact_expert_linear_all_reduce.default: Template("collective", rows=exact_expert_linear, order=exact),
    ours.exact_expert_linear.default: Template("template", rows=exact_expert_linear, order=exact),
    ours.exact_function.default: Template("template", rows=pointwise, order=sums_nothing),
    ours.exact_fused_linear.default: Template("template", rows=exact_fused_linear, order=exact),
    ours.exact_layer_norm.default: Template("template", rows=row_by_row, order=exact),
    ours.exact_linear_all_reduce.default: Template("collective", rows=exact_linear, order=exact),
    ours.exact_linear.default: Template("template", rows=exact_linear, order=exact),
    ours.exact_paged_attention.default: Template("attention", rows=paged_attention, order=exact),
    ours.exact_quantize.default: Template("template", rows=quantize_rows, order=exact),
    ours.exact_rms_norm.default: Template("template", rows=row_by_row, order=exact),
    ours.exact_rotated_attention.default: Template("attention", rows=exact_rotated_attention, order=exact),
    ours.exact_softmax.default: Template("template", rows=row_by_row, order=exact),
    ours.exact_sum.default: Template("template", rows=row_reduced, order=sums_in_order),
    ours.expert_matmul.default: Template("template", rows=expert_matmul, order=order_of_product),
    ours.expert_matmul_partial.default: Template("collective", rows=expert_matmul_partial, order=order_of_partial),
    ours.gated_matmul.default: Template("template", rows=gated_matmul, order=order_of_product),
    ours.layer_norm_backward.default: Template("template", rows=gradient, order=order_of_row),
    ours.layer_norm.default: Template("template", rows=row_by_row, order=order_of_row),
    ours.linear_recurrence.default: Template("recurrence", rows=packed_recurrence(SCAN), order=order_of_state),
    ours.log_softmax.default: Template("template", rows=row_by_row, order=order_of_row),
    ours.logsumexp.default: Template("template", rows=row_reduced, order=order_of_row),
    ours.matmul.default: Template("template", rows=matmul, order=order_of_product),
    ours.matmul_all_reduce.default: Template("collective", rows=matmul_all_reduce, order=order_of_ranks),
    ours.packed_attention.default: Template("attention", rows=packed_attention, order=order_of_attention),
    ours.packed_attention_backward.default: Template("attention", rows=gradient, order=order_of_attention_gradients),
    ours.paged_attention.default: Template("attention", rows=paged_attention, order=order_of_attention),
    ours.rms_norm_backward.default: Template("template", rows=gradient, order=order_of_row),
    ours.rms_norm.default: Template("template", rows=row_by_row, order=order_of_row),
    ours.rope_cache.default: Template("template", rows=rope_cache, order=order_of_head_norm),
    ours.row_sum.default: Template("template", rows=row_reduced, order=order_of_row),
    ours.row_var_mean.default: Template("template", rows=row_reduced, order=order_of_row),
    ours.running_max.default: Template("recurrence", rows=packed_recurrence(GREATEST), order=sums_nothing),
    ours.sharded_embedding.default: Template("collective", rows=embedding, order=sums_nothing),
    ours.silu_mul.default: Template("template", rows=pointwise, order=sums_nothing),
    ours.softmax_backward.default: Template("template", rows=gradient, order=order_of_row),
    ours.softmax.default: Template("template", rows=row_by_row, order=order_of_row),
    ours.token_logprobs_backward.default: Template("template", rows=gradient, order=order_of_row),
    ours.token_logprobs.default: Template("template", rows=gradient, order=order_of_row),
    ours.token_matmul.default: Template("template", rows=gradient, order=order_of_tokens),
    ours.token_scatter.default: Template("template", rows=gradient, order=order_of_token_rows),
    ours.token_sum.default: Template("template", rows=gradient, order=order_of_token_rows),
    ours.tree_all_reduce.default: Template("collective", rows=tree_all_reduce, order=sums_nothing),
    ours.wkv.default: Template("recurrence", rows=packed_recurrence(AVERAGE), order=sums_nothing),
}


def without_entry(registered: Iterable[str]) -> tuple[str, ...]:
    """Return the operations of torch.ops.detcompile without an entry, among the dispatcher's names."""
    named = {schema_of(operation).name for operation in TEMPLATES}
    of_ours = {name.partition(".")[0] for name in registered if name.startswith("detcompile::")}
    return tuple(sorted(of_ours - named))


_missing = without_entry(operation_names())
if _missing:
    raise ImportError(f"{', '.join(_missing)} have no entry in {__name__}.TEMPLATES: add their class, rule and order")


def template_of(node: fx.Node) -> Template | None:
    """Return the entry of the operation that a node calls, directly or functionalized; None for other operations.

    Raises:
        Refusal: a functionalized operation without an entry, or one that writes nothing.
    """
    operation = operation_of(node)
    if node.target is FUNCTIONALIZED and not (operation in TEMPLATES and schema_of(operation).is_mutable):
        raise Refusal(f"mutating operation {operation}")
    return TEMPLATES.get(operation)
