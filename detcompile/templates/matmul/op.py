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

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import matmul_order
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.matmul.gpu import matmul_cuda

__all__ = ["matmul_cpu", "pack_call", "reference_matmul"]

_CALL = struct.Struct("PqPqqPPqPqqqPq5i")  # struct Call of matmul_call.h

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define(
    "matmul(Tensor x, Tensor w, Tensor? bias, Tensor? residual, int[] radices, ScalarType? out_dtype=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


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
        InvalidInput: shapes or dtypes that do not fit together.
        NumericsError: K is not a multiple of the product of the radices.
    """
    radices = tuple(radices or ())  # AOTInductor hands None where the graph has an empty list
    _check(x, w, bias, residual, radices)
    M, N = x.shape[0], w.shape[0]
    out = torch.empty((M, N), dtype=out_dtype or x.dtype, device="cpu")
    cpu_library.dtype_code(out)  # refuses what the kernels do not write
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


_LIBRARY.impl("matmul", matmul_cpu, "CPU")
_LIBRARY.impl("matmul", matmul_cuda, "CUDA")


@torch.library.register_fake("detcompile::matmul", lib=_LIBRARY)
def _(x, w, bias, residual, radices, out_dtype=None):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype or x.dtype)


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


def _check(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, radices: Sequence[int]) -> None:
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise InvalidInput(
            f"detcompile::matmul: x {tuple(x.shape)} and w {tuple(w.shape)} must be [M, K] and [N, K]. "
            "Flatten the leading dimensions of x; pass nn.Linear's weight as it is."
        )
    if x.dtype != w.dtype:
        raise InvalidInput(
            f"detcompile::matmul: x is {x.dtype} and w is {w.dtype}. Convert one: the op multiplies equal dtypes."
        )
    if bias is not None and bias.shape != (w.shape[0],):
        raise InvalidInput(f"detcompile::matmul: bias {tuple(bias.shape)} must be [N] = ({w.shape[0]},). Reshape it.")
    if residual is not None and residual.shape != (x.shape[0], w.shape[0]):
        raise InvalidInput(
            f"detcompile::matmul: residual {tuple(residual.shape)} must be [M, N] = ({x.shape[0]}, {w.shape[0]})."
            " Expand it."
        )
    cpu_library.radices_array(tuple(radices))  # refuses a radix below 1
    if x.shape[1] % math.prod(radices):
        matmul_order(x.shape[1], x.dtype, tuple(radices))  # raises, and names the tp_sizes that fit
