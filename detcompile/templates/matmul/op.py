"""matmul: out[M, N] = x[M, K] @ w[N, K]^T (+ bias) (+ residual), every element summed in one fixed order.

Legend: M tokens, N output features, K input features.

    acc  = matmul_order(K, x.dtype, radices, isa), float32: a Sequential chain (bfloat16, float16) or Blocked(128) sums
           (float32), one per leaf of Tree(K, radices) if there are radices; EvenOdd(32) for bfloat16 on AMX
    y    = round(acc + bias)                 one rounding to out_dtype (default x.dtype)
    out  = round(residual + y)               only with a residual; the sum is in float32

On the CPU, bfloat16 multiply-adds flush subnormal operands and results to zero (float32.fma_flushed), as the dot
products of AVX512-BF16 pairs and AMX tiles do; those of fp32 and fp16 keep subnormals. The bits are the same with every
instruction set, except for bfloat16 on AMX, which has a different order.
Weights are read from their memory at every call, so they may be changed in place.

The order does not depend on M, so a row's bits do not depend on its neighbors. x may be a slice of columns and w any
view of unit stride along K or N (nn.Linear's weight, GPT-2's Conv1D transposed); other strides are copied. M may be 0.

batched_matmul: out[..., m, n] = x[..., m, :] @ w[..., n, :], with B matrices in all leading dims together. Its order is
matmul_order(K, x.dtype, (), isa), so a matrix's bits do not depend on B, M, N or the other matrices. A GPU runs one
launch per matrix.
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
    """Run the op on the CPU; `isa` selects an instruction set (amx gives other bits for bfloat16).

    Raises:
        NumericsError: K is not a multiple of the product of the radices.
    """
    radices = tuple(radices or ())  # AOTInductor passes None for an empty list
    if x.shape[1] % math.prod(radices):
        matmul_order(x.shape[1], x.dtype, radices)  # raises, with the tp_sizes that fit
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
    """Return the op's value in float64, unrounded: the reference for accuracy."""
    y = x.double() @ w.double().t()
    if bias is not None:
        y = y + bias.double()
    return y if residual is None else residual.double() + y


def pack_call(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, radices: tuple[int, ...]
) -> bytes:
    """Pack struct Call of matmul_call.h: x [M, K], residual, out [M, N] of unit row stride, w [N, K] of either."""
    N, K = w.shape
    return _CALL.pack(
        x.data_ptr(),
        x.stride(0),
        w.data_ptr(),
        *w.stride(),
        cpu_library.address(bias),
        cpu_library.address(residual),
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


def batched_matmul_cpu(x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, x [..., M, K], w [..., N, K] -> [..., M, N] in out_dtype (default x.dtype)."""
    x_BMK, w_BNK = _batches(x, w)
    (B, M, K), N = x_BMK.shape, w_BNK.shape[1]
    rows, out = x_BMK.reshape(B * M, K).contiguous(), torch.empty((B * M, N), dtype=out_dtype or x.dtype, device="cpu")
    if out.numel():
        call = pack_call(rows, w_BNK[0], None, None, out, ())
        counts = torch.full((B,), M, dtype=torch.int64, device="cpu")
        cpu_library.library(isa).detcompile_expert_matmul(call, counts, B, w_BNK.stride(0))
    return out.view(*x.shape[:-1], N)


def _batched_matmul_cuda(x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    x_BMK, w_BNK = _batches(x, w)
    out_BMN = x.new_empty((*x_BMK.shape[:2], w_BNK.shape[1]), dtype=out_dtype or x.dtype)
    for rows, matrix, out in zip(x_BMK, w_BNK, out_BMN, strict=True):
        matmul_cuda(rows, matrix, None, None, (), out.dtype, out)
    return out_BMN.view(*x.shape[:-1], w.shape[-2])


define(
    "batched_matmul(Tensor x, Tensor w, ScalarType? out_dtype=None) -> Tensor",
    {"x": "float ... M K>0", "w": "x ... N K"},
    cpu=batched_matmul_cpu,
    cuda=_batched_matmul_cuda,
    fake=lambda x, w, out_dtype=None: x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=out_dtype or x.dtype),
)


def _batches(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """View x as [B, M, K] and w as [B, N, K] with unit stride along N or K."""
    x_BMK, w_BNK = (value.reshape(value.shape[:-2].numel(), *value.shape[-2:]) for value in (x, w))
    return x_BMK, w_BNK if 1 in w_BNK.stride()[1:] else w_BNK.contiguous()
