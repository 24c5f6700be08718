"""Operations that a graph of exact integer arithmetic may hold: no machine decides a bit of them (docs/exact.md)."""

import torch
from torch import fx

from detcompile.passes.graphs import operation_of
from detcompile.passes.proof.provenance import Refusal
from detcompile.templates.ops import ours

aten, prims = torch.ops.aten, torch.ops.prims
_TEMPLATES = frozenset(
    {
        ours.embedding.default,
        ours.exact_dense_attention.default,
        ours.exact_function.default,
        ours.exact_linear.default,
        ours.exact_paged_attention.default,
        ours.exact_rms_norm.default,
    }
)
# One IEEE operation, a selection, a bit operation or a conversion with one rounding.
_POINTWISE = frozenset(
    str(operation)
    for packet in (
        *(aten.add, aten.sub, aten.mul, aten.neg, aten.abs, aten.maximum, aten.minimum, aten.where, aten.clone),
        *(aten.copy, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, prims.convert_element_type),
        *(aten.bitwise_and, aten.bitwise_or, aten.bitwise_not, aten.bitwise_xor),
        *(aten.logical_and, aten.logical_or, aten.logical_not),
    )
    for operation in (getattr(packet, overload) for overload in packet.overloads())
)
_ROUNDED = frozenset({aten.glu.default})  # counted as movement, but it computes a sigmoid


def require_exact(node: fx.Node, kind: str) -> None:
    """Raise Refusal if the definition has no such operation.

    Args:
        kind: the operation's class in the certificate.
    """
    operation = operation_of(node)
    if operation in _TEMPLATES or (kind == "pointwise" and str(operation) in _POINTWISE):
        return
    if kind in ("movement", "order-free") and operation not in _ROUNDED:
        return
    raise Refusal("exact arithmetic does not define it, so a machine would decide its bits")
