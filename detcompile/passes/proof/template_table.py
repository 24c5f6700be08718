"""Every operation of torch.ops.detcompile: its class in the certificate, what it does to rows, and how it sums.

One entry an operation, whole: an operation that is registered and has none is an error when this module is imported.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from detcompile.passes.graphs import FUNCTIONALIZED, operation_of
from detcompile.passes.proof.collective_rules import (
    columns_gathered,
    expert_matmul_partial,
    matmul_all_reduce,
    tree_all_reduce,
)
from detcompile.passes.proof.indexing_rules import embedding
from detcompile.passes.proof.pointwise import pointwise
from detcompile.passes.proof.provenance import Refusal, Rule
from detcompile.passes.proof.recurrence_rules import AVERAGE, CONV, GREATEST, SCAN, dense_recurrence, packed_recurrence
from detcompile.passes.proof.template_orders import (
    Order,
    order_of_attention,
    order_of_convolution,
    order_of_head_norm,
    order_of_partial,
    order_of_product,
    order_of_ranks,
    order_of_row,
    order_of_state,
    sums_nothing,
)
from detcompile.passes.proof.template_rules import (
    batched_matmul,
    cached_attention,
    dense_attention,
    dequant_matmul,
    expert_matmul,
    gated_matmul,
    matmul,
    paged_attention,
    rope_cache,
    row_by_row,
    row_reduced,
)
from detcompile.templates.ops import ours

__all__ = ["TEMPLATES", "Template", "template_of", "without_entry"]

Kind = Literal["template", "attention", "recurrence", "collective"]


class Template(NamedTuple):
    """What is known of one operation. No field has a default: what sums nothing says so."""

    kind: Kind
    rows: Rule
    order: Order


TEMPLATES: Mapping[Any, Template] = {
    ours.all_gather_columns.default: Template("collective", columns_gathered, sums_nothing),
    ours.batched_matmul.default: Template("template", batched_matmul, order_of_product),
    ours.cached_attention.default: Template("attention", cached_attention, order_of_attention),
    ours.causal_conv.default: Template("recurrence", packed_recurrence(CONV), order_of_convolution),
    ours.dense_attention.default: Template("attention", dense_attention, order_of_attention),
    ours.dense_causal_conv.default: Template("recurrence", dense_recurrence(CONV), order_of_convolution),
    ours.dense_linear_recurrence.default: Template("recurrence", dense_recurrence(SCAN), order_of_state),
    ours.dense_running_max.default: Template("recurrence", dense_recurrence(GREATEST), sums_nothing),
    ours.dense_wkv.default: Template("recurrence", dense_recurrence(AVERAGE), sums_nothing),
    ours.dequant_matmul.default: Template("template", dequant_matmul, order_of_product),
    ours.embedding.default: Template("template", embedding, sums_nothing),
    ours.expert_matmul.default: Template("template", expert_matmul, order_of_product),
    ours.expert_matmul_partial.default: Template("collective", expert_matmul_partial, order_of_partial),
    ours.gated_matmul.default: Template("template", gated_matmul, order_of_product),
    ours.layer_norm.default: Template("template", row_by_row, order_of_row),
    ours.linear_recurrence.default: Template("recurrence", packed_recurrence(SCAN), order_of_state),
    ours.log_softmax.default: Template("template", row_by_row, order_of_row),
    ours.logsumexp.default: Template("template", row_reduced, order_of_row),
    ours.matmul.default: Template("template", matmul, order_of_product),
    ours.matmul_all_reduce.default: Template("collective", matmul_all_reduce, order_of_ranks),
    ours.paged_attention.default: Template("attention", paged_attention, order_of_attention),
    ours.rms_norm.default: Template("template", row_by_row, order_of_row),
    ours.rope_cache.default: Template("template", rope_cache, order_of_head_norm),
    ours.row_sum.default: Template("template", row_reduced, order_of_row),
    ours.row_var_mean.default: Template("template", row_reduced, order_of_row),
    ours.running_max.default: Template("recurrence", packed_recurrence(GREATEST), sums_nothing),
    ours.sharded_embedding.default: Template("collective", embedding, sums_nothing),
    ours.silu_mul.default: Template("template", pointwise, sums_nothing),
    ours.softmax.default: Template("template", row_by_row, order_of_row),
    ours.tree_all_reduce.default: Template("collective", tree_all_reduce, sums_nothing),
    ours.wkv.default: Template("recurrence", packed_recurrence(AVERAGE), sums_nothing),
}


def without_entry(registered: Iterable[str]) -> tuple[str, ...]:
    """Operations of torch.ops.detcompile that TEMPLATES has no entry for, among the dispatcher's names."""
    named = {operation._schema.name for operation in TEMPLATES}
    of_ours = {name.partition(".")[0] for name in registered if name.startswith("detcompile::")}
    return tuple(sorted(of_ours - named))


_missing = without_entry(torch._C._dispatch_get_all_op_names())
if _missing:
    raise ImportError(f"{', '.join(_missing)} have no entry in {__name__}.TEMPLATES: how do they sum, and what?")


def template_of(node: fx.Node) -> Template | None:
    """The entry of what a node calls, also where functionalization calls it; None for what is no operation of ours.

    Raises:
        Refusal: a functionalized operation without an entry, or one that writes nothing.
    """
    operation = operation_of(node)
    if node.target is FUNCTIONALIZED and not (operation in TEMPLATES and operation._schema.is_mutable):
        raise Refusal(f"mutating operation {operation}")
    return TEMPLATES.get(operation)
