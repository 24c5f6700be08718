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


def require_quantized(x: Tensor, weight: QuantizedWeight) -> None:
    """Fail unless the parts fit each other and activations x [M, K].

    Raises:
        InvalidInput: they do not.
    """
    w, scales, zeros, k, group, rows = weight
    if w.dtype not in KINDS:
        raise InvalidInput(f"detcompile::dequant_matmul: w is {w.dtype}; it takes uint8 (int4), int8 and float8_e4m3fn")
    width = -(-k // NIBBLE_BLOCK) * 64 if w.dtype is torch.uint8 else k
    if x.dim() != 2 or x.shape[1] != k or w.dim() != 2 or w.shape[1] != width or group < 1 or rows < 1:
        raise InvalidInput(
            f"detcompile::dequant_matmul: x {tuple(x.shape)} and w {tuple(w.shape)} {w.dtype} must be [M, {k}] and "
            f"[N, {width}], group={group} and rows={rows} positive. Flatten x; pack w with pack_nibbles."
        )
    shape = (-(-k // group), -(-w.shape[0] // rows))
    if scales.shape != shape or (zeros is not None and (zeros.shape != shape or zeros.dtype is not torch.int16)):
        given = None if zeros is None else (tuple(zeros.shape), zeros.dtype)
        raise InvalidInput(
            f"detcompile::dequant_matmul: scales {tuple(scales.shape)} and zeros {given} must be {shape} and int16: "
            f"one for {group} k of {rows} features. Transpose or convert them."
        )
