"""Tensors as bytes, for transfer between a parent and its ranks."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PackedTensor", "pack_tensor", "unpack_tensor"]


class PackedTensor(NamedTuple):
    """A tensor as bytes; works for dtypes that numpy does not have."""

    memory: NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack_tensor(tensor: Tensor) -> PackedTensor:
    """Copy a tensor to the host as bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return PackedTensor(flat.numpy(), tensor.dtype, tuple(tensor.shape))


def unpack_tensor(packed: PackedTensor) -> Tensor:
    """Return the tensor on the CPU, sharing the memory."""
    return torch.from_numpy(packed.memory).view(packed.dtype).view(packed.shape)
