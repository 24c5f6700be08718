"""Quantized matrices of a GGUF file in the layout of templates/quantized/weights.py.

gguf's reader defines the values. Its formula is q * scale, or q * scale + minimum, where scale and minimum are float32
products of the block's fields. Each part is what the reader makes of blocks whose other fields are replaced:

| part | fields that are replaced |
|---|---|
| q | scales by one, the minimum by zero |
| scale | q by one, the minimum by zero |
| minimum | q by zero, the scale by -0, so that a minimum of -0 keeps its sign |
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from detcompile.models.gguf.header import TensorType
from detcompile.templates.quantized.weights import pack_nibbles

Spans = tuple[tuple[int, int, int], ...]  # first byte of a block, byte past the last, value of each
ONE, NEGATIVE_ZERO = 0x3C00, 0x8000  # in float16
MIDDLE = 8  # added to a signed q of four bits


class Packing(NamedTuple):
    """Fields of a block.

    Attributes:
        group: successive values that share a scale.
        nibbles: True if q has four bits.
        d: place of the block's float16 scale.
        one: bytes of q = 1. Zeros there mean q = 0 where the block has a minimum.
        unit: bytes of scales of one, besides ``d``.
        minimum: place of the block's float16 minimum or its scale; None for types without.
    """

    group: int
    nibbles: bool
    d: int
    one: Spans
    unit: Spans = ()
    minimum: int | None = None


PACKINGS = {
    "Q4_0": Packing(32, True, 0, ((2, 18, 0x99),)),
    "Q4_1": Packing(32, True, 0, ((4, 20, 0x11),), minimum=2),
    "Q5_0": Packing(32, False, 0, ((2, 6, 0xFF), (6, 22, 0x11))),
    "Q5_1": Packing(32, False, 0, ((4, 8, 0), (8, 24, 0x11)), minimum=2),
    "Q8_0": Packing(32, False, 0, ((2, 34, 1),)),
    "Q2_K": Packing(16, True, 80, ((16, 80, 0x55),), ((0, 16, 1),), minimum=82),
    "Q3_K": Packing(16, True, 108, ((0, 32, 0xFF), (32, 96, 0x55)), ((96, 104, 0x11), (104, 108, 0xAA))),
    "Q4_K": Packing(32, True, 0, ((16, 144, 0x11),), ((4, 8, 1), (8, 12, 0), (12, 16, 1)), minimum=2),
    "Q5_K": Packing(32, False, 0, ((16, 48, 0), (48, 176, 0x11)), ((4, 8, 1), (8, 12, 0), (12, 16, 1)), minimum=2),
    "Q6_K": Packing(16, False, 208, ((0, 128, 0x11), (128, 192, 0xAA)), ((192, 208, 1),)),
    "IQ4_NL": Packing(32, False, 0, ((2, 18, 0x88),)),
    "IQ4_XS": Packing(32, False, 0, ((8, 136, 0x88),), ((2, 4, 0xAA), (4, 8, 0x11))),
}


def dequantized_blocks(stored: np.ndarray, kind: TensorType) -> np.ndarray:
    """Return the float32 values of a tensor; ``stored`` holds the bytes of its rows."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(stored, GGMLQuantizationType[kind.name])


def packed_linear(stored: np.ndarray, kind: TensorType) -> dict[str, Tensor]:
    """Return qweight, scales, mins (for types with a minimum) and group of a matrix [N, K].

    Args:
        stored: uint8 [N, bytes of a row].
    """
    packing = PACKINGS[kind.name]
    # q * 1 and d * 1 keep their signs: -0 is added, or 0 subtracted (types of 256 values)
    no_minimum = {} if packing.minimum is None else {packing.minimum: NEGATIVE_ZERO if kind.block == 32 else 0}
    q = _replaced(stored, kind, packing.unit, {packing.d: ONE} | no_minimum)
    scales = _replaced(stored, kind, packing.one, no_minimum)[:, :: packing.group]
    dtype = torch.float16 if kind.block == 32 else torch.float32  # float16 is exact: the block's field itself
    group = torch.tensor([packing.group], device="cpu")
    parts = {"scales": torch.from_numpy(scales.T.copy()).to(dtype), "group": group}
    if packing.minimum is not None:
        zero = tuple((first, end, 0) for first, end, _ in packing.one)
        mins = _replaced(stored, kind, zero, {packing.d: NEGATIVE_ZERO})[:, :: packing.group]
        parts["mins"] = torch.from_numpy(mins.T.copy()).to(dtype)
    if packing.nibbles:
        parts["qweight"] = pack_nibbles(torch.from_numpy(q if packing.minimum is not None else q + MIDDLE))
    else:
        parts["qweight"] = torch.from_numpy(q).to(torch.int8)
    return parts


def _replaced(stored: np.ndarray, kind: TensorType, spans: Spans, halves: dict[int, int]) -> np.ndarray:
    """Return the values of blocks with other bytes in ``spans``, and other float16 numbers at ``halves``."""
    blocks = stored.reshape(len(stored), -1, kind.size).copy()
    for first, end, value in spans:
        blocks[..., first:end] = value
    for place, bits in halves.items():
        blocks[..., place : place + 2] = bits & 0xFF, bits >> 8
    return dequantized_blocks(blocks.reshape(stored.shape), kind)
