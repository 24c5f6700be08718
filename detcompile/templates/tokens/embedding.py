"""embedding: rows of weight [V, D] by ids of any shape; the bytes are copied, so there is no order to fix.

An id outside [0, V) is never read out of bounds: the CPU raises and names it, the GPU writes a row of NaN.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.tokens.embedding_gpu import embedding_cuda

__all__ = ["embedding_cpu", "reference_embedding"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define("embedding(Tensor weight, Tensor ids) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def embedding_cpu(weight: Tensor, ids: Tensor, isa: str | None = None) -> Tensor:
    """The op on the CPU, weight [V, D], ids [...] int64 or int32 -> [..., D].

    Raises:
        InvalidInput: an id outside the table, or a table or ids of the wrong kind.
    """
    if weight.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(
            f"detcompile::embedding: weight {tuple(weight.shape)} must be [V, D], and ids ({ids.dtype}) int64 or int32."
        )
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


_LIBRARY.impl("embedding", embedding_cpu, "CPU")
_LIBRARY.impl("embedding", embedding_cuda, "CUDA")


@torch.library.register_fake("detcompile::embedding", lib=_LIBRARY)
def _(weight, ids):
    return weight.new_empty((*ids.shape, weight.shape[1]))


def reference_embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """The op's value: torch's own, which copies too."""
    return torch.nn.functional.embedding(ids, weight)
