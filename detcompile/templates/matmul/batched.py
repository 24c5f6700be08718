"""batched_matmul: out[..., m, n] = x[..., m, :] @ w[..., n, :], each matrix of the batch summed as matmul sums it.

Legend: B matrices, all leading dims together, M and N rows of x and w, K features of both.

The order is matmul_order(K, x.dtype, (), isa): it knows nothing of B, M or N, so that a matrix ignores those beside it,
and a row of x the other rows of x. Scores of attention over a sequence's own tokens are such products, and so is what
their weights make of the values. On a GPU each matrix is a product of its own, launched one after the other.
"""

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.matmul.gpu import matmul_cuda
from detcompile.templates.matmul.op import pack_call
from detcompile.templates.registration import define

__all__ = ["batched_matmul_cpu", "reference_batched_matmul"]


def batched_matmul_cpu(x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None, isa: str | None = None) -> Tensor:
    """The op on the CPU, x [..., M, K] and w [..., N, K] -> [..., M, N] in out_dtype (default x.dtype)."""
    x_BMK, w_BNK = _operands(x, w)
    (B, M, K), N = x_BMK.shape, w_BNK.shape[1]
    rows, out = x_BMK.reshape(B * M, K).contiguous(), torch.empty((B * M, N), dtype=out_dtype or x.dtype, device="cpu")
    if out.numel():
        call = pack_call(rows, w_BNK[0], None, None, out, ())
        counts = torch.full((B,), M, dtype=torch.int64, device="cpu")
        cpu_library.library(isa).detcompile_expert_matmul(call, counts.data_ptr(), B, w_BNK.stride(0))
    return out.view(*x.shape[:-1], N)


def _batched_matmul_cuda(x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    x_BMK, w_BNK = _operands(x, w)
    out_BMN = x.new_empty((*x_BMK.shape[:2], w_BNK.shape[1]), dtype=out_dtype or x.dtype)
    for rows, matrix, out in zip(x_BMK, w_BNK, out_BMN, strict=True):
        matmul_cuda(rows, matrix, None, None, (), out.dtype, out)
    return out_BMN.view(*x.shape[:-1], w.shape[-2])


def _fake(x, w, out_dtype=None):
    return x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=out_dtype or x.dtype)


define(
    "batched_matmul(Tensor x, Tensor w, ScalarType? out_dtype=None) -> Tensor",
    {"x": "float ... M K>0", "w": "x ... N K"},
    cpu=batched_matmul_cpu,
    cuda=_batched_matmul_cuda,
    fake=_fake,
)


def reference_batched_matmul(x: Tensor, w: Tensor) -> Tensor:
    """The op's value in float64, unrounded."""
    return x.double() @ w.double().transpose(-1, -2)


def _operands(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x as [B, M, K], w as [B, N, K] of unit stride along N or K."""
    x_BMK, w_BNK = (value.reshape(value.shape[:-2].numel(), *value.shape[-2:]) for value in (x, w))
    return x_BMK, w_BNK if 1 in w_BNK.stride()[1:] else w_BNK.contiguous()
