"""Formats of quantized weights, and their meaning: w[n, k] = round(float32(q - z) * float32(s) + float32(m)).

Legend: N output features, K input features, G groups of K.

| `w` | q | without `zeros` and `mins` |
|---|---|---|
| uint8 [N, ceil(K / 128) * 64] | four bits, 0 to 15: see `pack_nibbles` | z = 8 |
| int8 [N, K] | eight bits | z = 0 |
| float8_e4m3fn [N, K] | the value itself | no z |

`scales` [G, ceil(N / rows)], `zeros` (int16) and `mins` of the same shape have one value for `group` successive k of
`rows` successive features; the last group or rows may be shorter. A weight has zeros or mins, not both: z = 0 with
mins, and no sum without them. q - z is exact. The product is rounded to float32, the sum with m again, then the result
to the dtype of the activations; each to nearest, ties to even.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.errors import InvalidInput

NIBBLE_BLOCK = 128  # byte i of a block holds k = i and k = 64 + i
KINDS = {torch.uint8: 0, torch.int8: 1, torch.float8_e4m3fn: 2}  # dtypes of `w`, as numbered by the kernels


class QuantizedWeight(NamedTuple):
    """A matrix [N, K] in few bits; the module's docstring defines the parts."""

    w: Tensor
    scales: Tensor
    zeros: Tensor | None
    mins: Tensor | None
    k: int
    group: int
    rows: int

    @property
    def bits(self) -> int:
        """Bits per weight, 4 or 8."""
        return 4 if self.w.dtype is torch.uint8 else 8


def pack_nibbles(q: Tensor) -> Tensor:
    """Pack q [N, K] of 0 to 15 into uint8 [N, ceil(K / 128) * 64], with zeros past K.

    In each block of 128 k, byte i holds k = i in its low half and k = 64 + i in its high half. Both halves of a tile of
    bytes are then successive k, and the sum over k stays in order without a shuffle.
    """
    blocks = torch.nn.functional.pad(q.to(torch.uint8), (0, -q.shape[1] % NIBBLE_BLOCK)).unflatten(1, (-1, 2, 64))
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1).contiguous()


def unpack_nibbles(packed: Tensor, k: int) -> Tensor:
    """Invert `pack_nibbles`; return uint8 [N, K]."""
    blocks = packed.unflatten(1, (-1, 64))
    return torch.stack([blocks & 15, blocks >> 4], 2).flatten(1)[:, :k]


def kept_features(weight: QuantizedWeight, features: Tensor) -> QuantizedWeight:
    """Return the weight of these output features, in this order. No value changes.

    Where the features of a block are no longer together, blocks become smaller and repeat their scale.
    """
    blocks = features // weight.rows
    rows = _common_extent(blocks, weight.rows)
    w = weight.w.view(torch.uint8)[features].view(weight.w.dtype)
    scales = weight.scales[:, blocks[::rows]]
    zeros, mins = (None if part is None else part[:, blocks[::rows]] for part in (weight.zeros, weight.mins))
    return weight._replace(w=w, scales=scales, zeros=zeros, mins=mins, rows=rows)


def kept_inputs(weight: QuantizedWeight, share: slice) -> QuantizedWeight:
    """Return the weight of a range of K. No value changes; a group that the range cuts becomes smaller groups."""
    groups = torch.arange(share.start, share.stop, device=weight.w.device) // weight.group
    group = _common_extent(groups, weight.group)
    if weight.w.dtype is torch.uint8:
        w = pack_nibbles(unpack_nibbles(weight.w, weight.k)[:, share])
    else:
        w = weight.w[:, share].contiguous()
    scales = weight.scales[groups[::group]]
    zeros, mins = (None if part is None else part[groups[::group]] for part in (weight.zeros, weight.mins))
    return weight._replace(w=w, scales=scales, zeros=zeros, mins=mins, k=len(groups), group=group)


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the weight with the features of several, in order. No value changes.

    Raises:
        ValueError: they differ in K, dtypes or groups.
    """
    first = weights[0]
    if len({(each.w.dtype, each.scales.dtype, each.mins is None, each.k, each.group) for each in weights}) > 1:
        raise ValueError("weights of several formats cannot be joined")
    rows = math.gcd(*(extent for each in weights for extent in (each.rows, len(each.w))))
    blocks = [torch.arange(0, len(each.w), rows, device=each.w.device) // each.rows for each in weights]
    has_zeros = any(each.zeros is not None for each in weights)
    middle = 8 if first.w.dtype is torch.uint8 else 0
    zeros = [each.zeros if each.zeros is not None else torch.full_like(each.scales, middle).short() for each in weights]

    def side_by_side(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part[:, block] for part, block in zip(parts, blocks, strict=True)], 1)

    return first._replace(
        w=torch.cat([each.w.view(torch.uint8) for each in weights]).view(first.w.dtype),
        scales=side_by_side(each.scales for each in weights),
        zeros=side_by_side(zeros) if has_zeros else None,
        mins=None if first.mins is None else side_by_side(each.mins for each in weights if each.mins is not None),
        rows=rows,
    )


def _common_extent(blocks: Tensor, size: int) -> int:
    """Return the largest divisor of ``size`` in whose steps ``blocks`` changes."""
    changes = 1 + (blocks[1:] != blocks[:-1]).nonzero().flatten()
    return math.gcd(size, *changes.tolist())


def dequantized(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K] for activations of this dtype; float64 gives the unrounded product and sum."""
    exact = dtype is torch.float64
    wide = torch.float64 if exact else torch.float32
    q = unpack_nibbles(weight.w, weight.k) if weight.w.dtype is torch.uint8 else weight.w
    at_k = torch.arange(weight.k, device=q.device) // weight.group
    at_n = torch.arange(len(q), device=q.device) // weight.rows
    scales = weight.scales.to(wide)[at_k][:, at_n].t()
    if weight.zeros is not None:
        zeros: Tensor | int = weight.zeros.to(wide)[at_k][:, at_n].t()
    else:
        zeros = 8 if weight.w.dtype is torch.uint8 and weight.mins is None else 0
    product = (q.to(wide) - zeros) * scales
    return (product if weight.mins is None else product + weight.mins.to(wide)[at_k][:, at_n].t()).to(dtype)


def require_quantized(weight: QuantizedWeight) -> None:
    """Reject a weight whose parts do not match.

    Raises:
        InvalidInput: names the part and its required shape.
    """
    w, scales, zeros, mins, k, group, rows = weight
    width = -(-k // NIBBLE_BLOCK) * 64 if w.dtype is torch.uint8 else k
    if w.shape[1] != width:
        raise InvalidInput(
            f"detcompile::dequant_matmul: w {tuple(w.shape)} {w.dtype} must be [N, {width}] for K = {k}. Pack four bits"
            " with pack_nibbles."
        )
    shape = (-(-k // group), -(-w.shape[0] // rows))
    if scales.shape != shape:
        raise InvalidInput(
            f"detcompile::dequant_matmul: scales, zeros and mins {tuple(scales.shape)} must be {shape}: one for {group}"
            f" k of {rows} features. Transpose them."
        )
    if mins is not None and (zeros is not None or w.dtype is torch.float8_e4m3fn):
        raise InvalidInput(
            "detcompile::dequant_matmul: mins exclude zeros and float8. Subtract zeros times scales from the mins."
        )
