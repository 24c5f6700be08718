"""dequant_matmul: matmul of templates/matmul/op.py with weights of four or eight bits, dequantized on the fly.

Legend: M tokens, N output features, K input features, G groups of K.

    w    = dequantized(weight, x.dtype)      templates/quantized/weights.py: one defined rounding per element
    out  = matmul(x, w, bias, residual, radices)
    dequant_matmul_partial(...) -> float32: one rank's subtree of Tree(K, ...), without a bias

The bytes equal those of the two operations in sequence, so the order is matmul's. A CPU dequantizes a tile of features
at a time. A GPU dequantizes operands of the tensor cores (kernels.py), or a whole copy if many tokens share its cost.
"""

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.matmul.op import matmul_cpu, reference_matmul
from detcompile.templates.quantized.gpu import dequant_matmul_cuda
from detcompile.templates.quantized.weights import KINDS, QuantizedWeight, dequantized, require_quantized
from detcompile.templates.registration import define

_CALL = struct.Struct("PqPPPqPqqqqq5i4x")  # struct Call of dequantize.cpp
_TILE_BYTES = 1 << 19  # of dequantized weights per thread: they stay in its core's cache until they are multiplied


def dequant_matmul_cpu(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: Sequence[int],
    out_dtype: torch.dtype | None = None,
    isa: str | None = None,
) -> Tensor:
    """Run the op on the CPU: x [M, K], weight [N, K], bias [N], residual [M, N] -> [M, N].

    Raises:
        NumericsError: K is not a multiple of the product of the radices.
    """
    N, K = len(weight.w), x.shape[1]
    out = torch.empty((len(x), N), dtype=out_dtype or x.dtype, device="cpu")
    features = max(64, _TILE_BYTES * cpu_library.thread_count() // max(1, K * x.element_size()))
    for first in range(0, N, features):
        rows_N = slice(first, min(N, first + features))
        tile = dequantized_cpu(weight, x.dtype, first, rows_N.stop - first, isa)
        parts = (None if bias is None else bias[rows_N], None if residual is None else residual[:, rows_N])
        out[:, rows_N] = matmul_cpu(x, tile, *parts, radices, out_dtype, isa=isa)
    return out


def dequantized_cpu(
    weight: QuantizedWeight, dtype: torch.dtype, first: int = 0, count: int | None = None, isa: str | None = None
) -> Tensor:
    """Return rows [first, first + count) of dequantized(weight, dtype), the same bytes."""
    w, scales = weight.w.contiguous(), weight.scales.contiguous()
    zeros, mins = (None if part is None else part.contiguous() for part in (weight.zeros, weight.mins))
    count = len(w) - first if count is None else count
    out = torch.empty((count, weight.k), dtype=dtype, device="cpu")
    call = _CALL.pack(
        w.data_ptr(),
        w.stride(0),
        scales.data_ptr(),
        cpu_library.address(zeros),
        cpu_library.address(mins),
        scales.stride(0),
        out.data_ptr(),
        first,
        count,
        weight.k,
        weight.group,
        weight.rows,
        KINDS[w.dtype],
        cpu_library.dtype_code(scales),
        cpu_library.dtype_code(mins),
        cpu_library.dtype_code(out),
        cpu_library.thread_count(),
    )
    cpu_library.library(isa).detcompile_dequantize(call)
    return out


def _flat(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that takes a QuantizedWeight as the operation, whose arguments are flat."""

    def flat(x, w, scales, zeros, mins, bias, residual, group, rows, radices, out_dtype=None):
        weight = QuantizedWeight(w, scales, zeros, mins, x.shape[-1], group, rows)
        require_quantized(weight)
        return multiply(x, weight, bias, residual, radices or (), out_dtype)  # AOTInductor passes None for []

    return flat


def _partial(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, scales, zeros, mins, group, rows, radices, tp: _flat(multiply)(
        x, w, scales, zeros, mins, None, None, group, rows, radices, torch.float32
    )


def _fake(x, w, scales, zeros, mins, bias, residual, group, rows, radices, out_dtype=None):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype or x.dtype)


PARTS = "Tensor w, Tensor scales, Tensor? zeros, Tensor? mins"
PART_OPERANDS: dict[str, str | range] = {
    "scales": "float G R",
    "zeros": "int16 G R",
    "mins": "float G R",
    "group": range(1, 2**31),
    "rows": range(1, 2**31),
}
_OPERANDS = {"x": "float M K", "w": "quantized N W"} | PART_OPERANDS
define(
    f"dequant_matmul(Tensor x, {PARTS}, Tensor? bias, Tensor? residual, int group, int rows, int[] radices, "
    "ScalarType? out_dtype=None) -> Tensor",
    _OPERANDS | {"bias": "float N", "residual": "float M N"},
    cpu=_flat(dequant_matmul_cpu),
    cuda=_flat(dequant_matmul_cuda),
    fake=_fake,
)
define(
    f"dequant_matmul_partial(Tensor x, {PARTS}, int group, int rows, int[] radices, int tp) -> Tensor",
    _OPERANDS | {"tp": range(1, 2**31)},
    cpu=_partial(dequant_matmul_cpu),
    cuda=_partial(dequant_matmul_cuda),
    fake=lambda x, w, *rest: x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32),
)


def reference_dequant_matmul(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return the op's value in float64, with weights rounded to x.dtype."""
    return reference_matmul(x, dequantized(weight, x.dtype), bias, residual)
