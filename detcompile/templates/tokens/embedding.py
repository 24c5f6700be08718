"""embedding: rows of weight [V, D] by ids of any shape; the bytes are copied, so there is no order to fix.

An id outside [0, V) is never read out of bounds: the CPU raises and names it, the GPU writes a row of NaN.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import define
from detcompile.templates.tokens.embedding_gpu import embedding_cuda

__all__ = ["embedding_cpu", "reference_embedding"]


def embedding_cpu(weight: Tensor, ids: Tensor, isa: str | None = None) -> Tensor:
    """The op on the CPU, weight [V, D], ids [...] int64 or int32 -> [..., D].

    Raises:
        InvalidInput: an id outside the table.
    """
    V, D = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, D), dtype=weight.dtype, device="cpu")
    item_bytes = weight.element_size()
    bad = cpu_library.library(isa).detcompile_embedding(
        weight.data_ptr(),
        weight.stride(0) * item_bytes,
        ids.data_ptr(),
        ids.element_size(),
        out.data_ptr(),
        ids.numel(),
        V,
        D * item_bytes,
        cpu_library.thread_count(),
    )
    if bad >= 0:
        raise InvalidInput(
            f"detcompile::embedding: id {int(ids.flatten()[bad])} at index {bad} (of the flattened ids) is outside the "
            f"table's [0, {V}). Check that the tokenizer belongs to this model."
        )
    return out


define(
    "embedding(Tensor weight, Tensor ids) -> Tensor",
    {"weight": "any V D", "ids": "ids ..."},
    cpu=embedding_cpu,
    cuda=embedding_cuda,
    fake=lambda weight, ids: weight.new_empty((*ids.shape, weight.shape[1])),
)


def reference_embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """The op's value: torch's own, which copies too."""
    return torch.nn.functional.embedding(ids, weight)
