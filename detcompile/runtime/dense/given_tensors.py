"""Tensors as callers give them: whether they can be what they are given for."""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput

__all__ = ["holds_integers", "require_ids", "require_integers", "require_values"]


def require_ids(input_ids: Tensor) -> None:
    """Fail unless a tensor is a padded batch of integers.

    Raises:
        InvalidInput: another shape or dtype, or no values.
    """
    require_values(input_ids, "input_ids")
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not holds_integers(input_ids):
        raise InvalidInput(
            f"input_ids must be integers [batch, length], not empty; got {input_ids.dtype} {list(input_ids.shape)}"
        )


def require_integers(tensor: Tensor, name: str) -> None:
    """Fail unless a tensor holds integers.

    Raises:
        InvalidInput: naming the tensor.
    """
    require_values(tensor, name)
    if not holds_integers(tensor):
        raise InvalidInput(f"{name}: it holds {tensor.dtype}: give integers")


def require_values(tensor: Tensor, name: str) -> None:
    """Fail unless a tensor holds its values, one beside the other.

    Raises:
        InvalidInput: naming the tensor.
    """
    if tensor.is_meta:
        raise InvalidInput(f"{name}: it is on the meta device, which holds no values: pass a tensor of a real device")
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        raise InvalidInput(f"{name}: it is {what}: pass a dense tensor")


def holds_integers(tensor: Tensor) -> bool:
    """Whether the dtype is one of integers; that of truth values is none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
