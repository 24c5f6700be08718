"""matmul: out[M, N] = x[M, K] @ w[N, K]^T (+ bias) (+ residual), every element summed in one fixed order.

Legend: M tokens, N output features, K input features.

    acc  = matmul_order(K, x.dtype, radices, isa), float32: a Sequential chain (bfloat16, float16) or Blocked(128) sums
           (float32), one per leaf of Tree(K, radices) if there are radices; EvenOdd(32) for bfloat16 on AMX
    y    = round(acc + bias)                 one rounding to out_dtype (default x.dtype)
    out  = round(residual + y)               only with a residual; the sum is in float32

On the CPU, bfloat16's multiply-adds count subnormal operands and results as zeros (float32.fma_flushed), as the dot
products of pairs and of tiles of AVX512-BF16 and AMX do, and fp32's and fp16's keep them. The bits are the same with
every instruction set, but for bfloat16 on AMX, whose order is another one.
Weights are read where they are at every call, so that they may change in place.

The order knows nothing of M, so a row's bits do not depend on its neighbours. x may be a slice of columns and w any
view of unit stride along K or N (nn.Linear's weight, GPT-2's Conv1D transposed); other strides are copied. M may be 0.
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from detcompile.orders.numerics import matmul_order
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.matmul.gpu import matmul_cuda
from detcompile.templates.registration import define

__all__ = ["matmul_cpu", "pack_call", "reference_matmul"]

_CALL = struct.Struct("PqPqqPPqPqqqPq5i")  # struct Call of matmul_call.h


def matmul_cpu(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: Sequence[int] | None,
    out_dtype: torch.dtype | None = None,
    isa: str | None = None,
) -> Tensor:
    """The op on the CPU; `isa` picks an instruction set (amx gives bfloat16 other bits than the others).

    Raises:
        NumericsError: K is not a multiple of the product of the radices.
    """
    radices = tuple(radices or ())  # AOTInductor hands None where the graph has an empty list
    if x.shape[1] % math.prod(radices):
        matmul_order(x.shape[1], x.dtype, radices)  # raises, and names the tp_sizes that fit
    M, N = x.shape[0], w.shape[0]
    out = torch.empty((M, N), dtype=out_dtype or x.dtype, device="cpu")
    if M == 0 or N == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    if 1 not in w.stride():
        w = w.contiguous()
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    call = pack_call(x, w, bias, residual, out, radices)
    cpu_library.library(isa).detcompile_matmul(call)
    return out


def _fake(x, w, bias, residual, radices, out_dtype=None):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype or x.dtype)


define(
    "matmul(Tensor x, Tensor w, Tensor? bias, Tensor? residual, int[] radices, ScalarType? out_dtype=None) -> Tensor",
    {"x": "float M K", "w": "x N K", "bias": "float N", "residual": "float M N"},
    cpu=matmul_cpu,
    cuda=matmul_cuda,
    fake=_fake,
)


def reference_matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The op's value in float64, unrounded: what the accuracy of an implementation is measured against."""
    y = x.double() @ w.double().t()
    if bias is not None:
        y = y + bias.double()
    return y if residual is None else residual.double() + y


def pack_call(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, radices: tuple[int, ...]
) -> bytes:
    """struct Call of matmul_call.h: x [M, K], residual, out [M, N] of unit stride along rows, w [N, K] along either."""
    N, K = w.shape
    return _CALL.pack(
        x.data_ptr(),
        x.stride(0),
        w.data_ptr(),
        *w.stride(),
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        x.shape[0],
        N,
        K,
        cpu_library.radices_address(radices),
        len(radices),
        cpu_library.dtype_code(x),
        cpu_library.dtype_code(bias),
        cpu_library.dtype_code(residual),
        cpu_library.dtype_code(out),
        cpu_library.thread_count(),
    )
