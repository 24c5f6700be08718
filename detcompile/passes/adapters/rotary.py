"""Rotary positions as transformers computes them, for attentions that this folder writes anew.

Written here and not imported, so that importing this package imports no model's code.

Legend: B batch, T tokens, H heads, D head dim.
"""

import torch
from torch import Tensor

__all__ = ["rotate_halves", "rotate_pairs"]


def rotate_halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Element i turns with element i + D/2: query and key [B, T, H, D], cos and sin [B, T, D]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return query * cos + _half_turned(query) * sin, key * cos + _half_turned(key) * sin


def rotate_pairs(states: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Element 2i turns with element 2i + 1: states [B, T, H, D], cos and sin [B, T, D/2]."""
    sin, cos = (torch.repeat_interleave(table[:, :, None, :], 2, 3) for table in (sin, cos))
    turned = torch.stack((-states[:, :, :, 1::2], states[:, :, :, ::2]), dim=-1).flatten(-2)
    return states * cos + turned * sin


def _half_turned(states: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    return torch.cat((-states[..., half:], states[..., :half]), dim=-1)
