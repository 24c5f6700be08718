"""Quantised weights as our templates hold them, and what they mean: w[n, k] = round(float32(q - z) * float32(s)).

Legend: N output features, K input features, G groups of K.

| `w` | q | `zeros` left out means |
|---|---|---|
| uint8 [N, ceil(K / 128) * 64] | four bits, 0 to 15: see `pack_nibbles` | z = 8 |
| int8 [N, K] | eight bits | z = 0 |
| float8_e4m3fn [N, K] | the value itself | there are none |

`scales` [G, ceil(N / rows)] and `zeros` (int16, the same shape): one for `group` successive k of `rows` successive
features, the last of either may be shorter. q - z is exact, the product is rounded to float32, and then to the dtype of
the activations: both to the nearest, ties to even.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.errors import InvalidInput

__all__ = [
    "KINDS",
    "NIBBLE_BLOCK",
    "QuantizedWeight",
    "dequantized",
    "pack_nibbles",
    "require_quantized",
    "unpack_nibbles",
]

NIBBLE_BLOCK = 128  # k of which a byte holds the i-th and the (64 + i)-th
KINDS = {torch.uint8: 0, torch.int8: 1, torch.float8_e4m3fn: 2}  # of `w`, as the kernels of both devices number them


class QuantizedWeight(NamedTuple):
    """A matrix [N, K] in few bits: the module's table says what the parts hold."""

    w: Tensor
    scales: Tensor
    zeros: Tensor | None
    k: int
    group: int
    rows: int

    @property
    def bits(self) -> int:
        """Bits of one weight, 4 or 8."""
        return 4 if self.w.dtype is torch.uint8 else 8


def pack_nibbles(q: Tensor) -> Tensor:
    """q [N, K] of 0 to 15 -> uint8 [N, ceil(K / 128) * 64], zeros past K.

    Of each block of 128 k, byte i holds k = i in its low half and k = 64 + i in its high half: both halves of a tile of
    bytes are then tiles of successive k, and the sum over k stays in order without a shuffle.
    """
    blocks = torch.nn.functional.pad(q.to(torch.uint8), (0, -q.shape[1] % NIBBLE_BLOCK)).unflatten(1, (-1, 2, 64))
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1).contiguous()


def unpack_nibbles(packed: Tensor, k: int) -> Tensor:
    """What `pack_nibbles` was given, uint8 [N, K]."""
    blocks = packed.unflatten(1, (-1, 64))
    return torch.stack([blocks & 15, blocks >> 4], 2).flatten(1)[:, :k]


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] that the weight means for activations of this dtype; in float64, the product unrounded."""
    exact = dtype is torch.float64
    wide = torch.float64 if exact else torch.float32
    q = unpack_nibbles(weight.w, weight.k) if weight.w.dtype is torch.uint8 else weight.w
    at_k = torch.arange(weight.k, device=q.device) // weight.group
    at_n = torch.arange(len(q), device=q.device) // weight.rows
    scales = weight.scales.to(wide)[at_k][:, at_n].t()
    if weight.zeros is not None:
        zeros: Tensor | int = weight.zeros.to(wide)[at_k][:, at_n].t()
    else:
        zeros = 8 if weight.w.dtype is torch.uint8 else 0
    return ((q.to(wide) - zeros) * scales).to(dtype)


def require_quantized(weight: QuantizedWeight) -> None:
    """Fail unless the parts fit each other.

    Raises:
        InvalidInput: they do not.
    """
    w, scales, _, k, group, rows = weight
    width = -(-k // NIBBLE_BLOCK) * 64 if w.dtype is torch.uint8 else k
    if w.shape[1] != width:
        raise InvalidInput(
            f"detcompile::dequant_matmul: w {tuple(w.shape)} {w.dtype} must be [N, {width}] for K = {k}. Pack four bits"
            " with pack_nibbles."
        )
    shape = (-(-k // group), -(-w.shape[0] // rows))
    if scales.shape != shape:
        raise InvalidInput(
            f"detcompile::dequant_matmul: scales and zeros {tuple(scales.shape)} must be {shape}: one for {group} k of "
            f"{rows} features. Transpose them."
        )
