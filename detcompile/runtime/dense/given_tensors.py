"""Checks of tensors that callers pass."""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput

__all__ = ["holds_integers", "require_ids", "require_integers", "require_values"]


def require_ids(input_ids: Tensor) -> None:
    """Reject input_ids that are not a padded batch of integers.

    Raises:
        InvalidInput: another shape or dtype, or no values.
    """
    require_values(input_ids, "input_ids")
    if input_ids.dim() != 2 or input_ids.numel() == 0 or not holds_integers(input_ids):
        raise InvalidInput(
            f"input_ids must be integers [batch, length], not empty; got {input_ids.dtype} {list(input_ids.shape)}"
        )


def require_integers(tensor: Tensor, name: str) -> None:
    """Reject a tensor that does not hold integers.

    Raises:
        InvalidInput: names the tensor.
    """
    require_values(tensor, name)
    if not holds_integers(tensor):
        raise InvalidInput(f"{name}: it holds {tensor.dtype}: give integers")


def require_values(tensor: Tensor, name: str) -> None:
    """Reject a tensor without values (meta device), or one that is sparse or nested.

    Raises:
        InvalidInput: names the tensor.
    """
    if tensor.is_meta:
        raise InvalidInput(f"{name}: it is on the meta device, which holds no values: pass a tensor of a real device")
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        raise InvalidInput(f"{name}: it is {what}: pass a dense tensor")


def holds_integers(tensor: Tensor) -> bool:
    """Return True for integer dtypes; bool does not count."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
