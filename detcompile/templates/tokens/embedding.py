"""embedding: rows of weight [V, D] by ids of any shape; bytes are copied, so there is no order to preserve.

An id outside [0, V) is never read out of bounds: the CPU raises, the GPU, where a kernel cannot raise, writes a row of
NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import define


def embedding_cpu(weight: Tensor, ids: Tensor, isa: str | None = None) -> Tensor:
    """Run the op on the CPU, weight [V, D], ids [...] int64 or int32 -> [..., D].

    Raises:
        InvalidInput: an id outside the table.
    """
    V, D = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, D), dtype=weight.dtype, device="cpu")
    item_bytes = weight.element_size()
    bad = cpu_library.library(isa).detcompile_embedding(
        weight, weight.stride(0) * item_bytes, ids, ids.element_size(), out, ids.numel(), V, D * item_bytes,
        cpu_library.thread_count(),
    )  # fmt: skip
    if bad >= 0:
        raise InvalidInput(
            f"detcompile::embedding: id {int(ids.flatten()[bad])} at index {bad} (of the flattened ids) is outside the "
            f"table's [0, {V}). Check that the tokenizer belongs to this model."
        )
    return out


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
    """Run the op on the GPU, weight [V, D], ids of any integer dtype and shape [...] -> [..., D] in weight.dtype."""
    V, D = weight.shape
    out = torch.empty((*ids.shape, D), dtype=weight.dtype, device=weight.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(D))
        flat = ids.reshape(-1).contiguous()
        grid = (flat.numel(), triton.cdiv(D, block))
        _embedding_kernel[grid](weight, flat, out, V, D, *weight.stride(), BLOCK=block, num_warps=4)
    return out


define(
    "embedding(Tensor weight, Tensor ids) -> Tensor",
    {"weight": "any V D", "ids": "ids ..."},
    cpu=embedding_cpu,
    cuda=embedding_cuda,
    fake=lambda weight, ids: weight.new_empty((*ids.shape, weight.shape[1])),
)
