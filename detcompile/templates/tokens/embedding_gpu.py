"""Embedding rows on the GPU: a copy, so there is no order to keep.

Legend: T ids, V rows of the table, D columns. An id outside 0..V-1 gives a row of NaN: a kernel cannot raise, and
nothing is read out of bounds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["embedding_cuda"]


@triton.jit
def _embedding_kernel(weight_ptr, ids_ptr, out_ptr, V, D, row_stride, column_stride, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + t).to(tl.int64)
    known = (row >= 0) & (row < V)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    values = tl.load(weight_ptr + row * row_stride + column * column_stride, mask=inside & known, other=0.0)
    values = tl.where(known, values, float("nan"))
    tl.store(out_ptr + t * D + column, values.to(out_ptr.dtype.element_ty), mask=inside)


def embedding_cuda(weight: Tensor, ids: Tensor) -> Tensor:
    """weight [V, D], ids int of any shape [...] -> [..., D] in weight.dtype."""
    V, D = weight.shape
    out = torch.empty((*ids.shape, D), dtype=weight.dtype, device=weight.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(D))
        flat = ids.reshape(-1).contiguous()
        grid = (flat.numel(), triton.cdiv(D, block))
        _embedding_kernel[grid](weight, flat, out, V, D, *weight.stride(), BLOCK=block, num_warps=4)
    return out
