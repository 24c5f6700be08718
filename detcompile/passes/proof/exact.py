"""Reject operations that exact integer arithmetic does not define: their bits could differ between machines.

require_exact checks the operations of a graph. require_exact_code checks the operations in Inductor's code, because
Inductor may replace an operation by others.
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
_NOT_MOVEMENT = frozenset({aten.glu.default})  # the certificate calls it movement, but it computes a sigmoid
# Allowed on integers only. The extreme of 0.0 and -0.0 may be either; cumsum may convert floats to integers first.
_INTEGERS_ONLY = frozenset(
    {aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.maximum.default, aten.minimum.default}
    | {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor}
    | {aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.cumsum.default, aten.cumprod.default}
)
# Names in Inductor's code. Division, roots and fma are left out: a machine may approximate or fuse them.
_CODE_OPERATIONS = frozenset(
    (
        *("abs", "add", "constant", "identity", "index_expr", "masked", "mul", "neg", "sub", "to_dtype", "value_expr"),
        *("to_dtype_bitcast", "where", "eq", "ge", "gt", "le", "lt", "ne", "logical_and", "logical_not", "logical_or"),
        *("logical_xor", "and_", "or_", "xor", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor"),
    )
)
# Operations whose result is a float even for integers.
_FLOATS_OF_INTEGERS = frozenset(("rand", "randn", "reciprocal", "reduction mean", "rsqrt", "sqrt", "truediv"))


def require_exact_code(name: str, operands: Sequence[Any]) -> None:
    """Raise UncertifiedOp if an operation in Inductor's code could have different bits on another machine.

    Args:
        name: the operation's name in Inductor's code.
        operands: its variables and numbers; variables that hold indices have no dtype.
    """
    dtypes = [dtype for operand in operands if (dtype := getattr(operand, "dtype", None)) is not None]
    has_floats = any(isinstance(operand, float) for operand in operands) or any(d.is_floating_point for d in dtypes)
    if name not in _CODE_OPERATIONS and (has_floats or name in _FLOATS_OF_INTEGERS):
        shown = ", ".join(map(str, dtypes))
        raise UncertifiedOp(
            f"Inductor generated {name} of ({shown}), which exact arithmetic does not define: its bits could differ"
            " between machines. Nothing was compiled. Install the releases in constraints.txt",
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
        is_defined = kind in ("movement", "order-free") and operation not in _NOT_MOVEMENT
    if not is_defined or (operation in _INTEGERS_ONLY and _has_floats(node)):
        raise Refusal("exact arithmetic does not define it, so its bits could differ between machines")


def _has_floats(node: fx.Node) -> bool:
    return any(dtype.is_floating_point for dtype in _operand_dtypes(node))


def _leaves_bits_open(node: fx.Node) -> bool:
    """Return whether an operation has steps that may be fused, converts NaN to an integer, or uses 16-bit floats."""
    if arguments_of(node).get("alpha", 1) != 1:
        return True
    result: torch.dtype = node.meta["val"].dtype
    if not result.is_floating_point:
        return result != torch.bool and _has_floats(node)
    return result.itemsize < torch.float32.itemsize  # a compiler may drop a cast to 16 bits and back


def _operand_dtypes(node: fx.Node) -> list[torch.dtype]:
    values = [arg.meta["val"] for arg in node.all_input_nodes]
    return [value.dtype for value in values if isinstance(value, torch.Tensor)]
