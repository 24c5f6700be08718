"""Operations that a program of exact integer arithmetic may hold: their bits are the same on every machine.

require_exact checks those of the graph, require_exact_code those that Inductor writes code for: it may make others of
them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from detcompile.errors import UncertifiedOp
from detcompile.passes.graphs import arguments_of, operation_of
from detcompile.passes.proof.provenance import Refusal
from detcompile.templates.ops import ours

aten, prims = torch.ops.aten, torch.ops.prims
_TEMPLATES = frozenset(
    {
        ours.all_gather_columns.default,
        ours.embedding.default,
        ours.exact_dense_attention.default,
        ours.exact_divide.default,
        ours.exact_expert_linear.default,
        ours.exact_expert_linear_all_reduce.default,
        ours.exact_function.default,
        ours.exact_fused_linear.default,
        ours.exact_layer_norm.default,
        ours.exact_linear.default,
        ours.exact_linear_all_reduce.default,
        ours.exact_paged_attention.default,
        ours.exact_quantize.default,
        ours.exact_rms_norm.default,
        ours.exact_rotated_attention.default,
        ours.exact_softmax.default,
        ours.exact_sum.default,
        ours.sharded_embedding.default,
    }
)
# One IEEE operation, a selection, a bit operation or a conversion with one rounding.
_POINTWISE = frozenset(
    str(operation)
    for packet in (
        *(aten.add, aten.sub, aten.mul, aten.neg, aten.abs, aten.maximum, aten.minimum, aten.where, aten.clone),
        *(aten.copy, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, prims.convert_element_type),
        *(aten.bitwise_and, aten.bitwise_or, aten.bitwise_not, aten.bitwise_xor),
        *(aten.logical_and, aten.logical_or, aten.logical_not, aten.clamp, aten.clamp_min, aten.clamp_max),
    )
    for operation in (getattr(packet, overload) for overload in packet.overloads())
)
_ROUNDED = frozenset({aten.glu.default})  # counted as movement, but it computes a sigmoid
# Defined for integers alone. Of 0.0 and -0.0 the machine chooses one; sums may convert floats to integers first.
_OF_INTEGERS = frozenset(
    {aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.maximum.default, aten.minimum.default}
    | {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor}
    | {aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.cumsum.default, aten.cumprod.default}
)
# Names in Inductor's code. No division, root or fma: a GPU may approximate them, and a compiler may make one of others.
_WRITTEN = frozenset(
    (
        *("abs", "add", "constant", "identity", "index_expr", "masked", "mul", "neg", "sub", "to_dtype", "value_expr"),
        *("to_dtype_bitcast", "where", "eq", "ge", "gt", "le", "lt", "ne", "logical_and", "logical_not", "logical_or"),
        *("logical_xor", "and_", "or_", "xor", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor"),
    )
)
_FLOATS_OF_INTEGERS = frozenset(("rand", "randn", "reciprocal", "reduction mean", "rsqrt", "sqrt", "truediv"))


def require_exact_code(name: str, operands: Sequence[Any]) -> None:
    """Raise UncertifiedOp unless an operation that Inductor writes has one result on every machine.

    Args:
        name: in Inductor's code.
        operands: variables, of which those of indices have no dtype, and numbers.
    """
    dtypes = [dtype for operand in operands if (dtype := getattr(operand, "dtype", None)) is not None]
    has_floats = any(isinstance(operand, float) for operand in operands) or any(d.is_floating_point for d in dtypes)
    if name not in _WRITTEN and (has_floats or name in _FLOATS_OF_INTEGERS):
        shown = ", ".join(map(str, dtypes))
        raise UncertifiedOp(
            f"Inductor makes {name} of ({shown}) of a certified graph, and exact arithmetic does not define it, so a"
            " machine would decide its bits. Nothing was compiled: use the releases that constraints.txt names",
            (name,),
        )


def require_exact(node: fx.Node, kind: str) -> None:
    """Raise Refusal if the definition has no such operation.

    Args:
        kind: the operation's class in the certificate.
    """
    operation = operation_of(node)
    if operation in _TEMPLATES:
        return
    if kind == "pointwise":
        is_defined = str(operation) in _POINTWISE and not _leaves_bits_open(node)
    else:
        is_defined = kind in ("movement", "order-free") and operation not in _ROUNDED
    if not is_defined or (operation in _OF_INTEGERS and _has_floats(node)):
        raise Refusal("exact arithmetic does not define it, so a machine would decide its bits")


def _has_floats(node: fx.Node) -> bool:
    return any(dtype.is_floating_point for dtype in _operand_dtypes(node))


def _leaves_bits_open(node: fx.Node) -> bool:
    """Return whether the operation has steps that may be fused, makes NaN an integer, or has 16-bit floats."""
    if arguments_of(node).get("alpha", 1) != 1:
        return True
    result: torch.dtype = node.meta["val"].dtype
    if not result.is_floating_point:
        return result != torch.bool and _has_floats(node)
    return result.itemsize < torch.float32.itemsize  # a compiler may drop such a cast and the one back


def _operand_dtypes(node: fx.Node) -> list[torch.dtype]:
    values = [arg.meta["val"] for arg in node.all_input_nodes]
    return [value.dtype for value in values if isinstance(value, torch.Tensor)]
