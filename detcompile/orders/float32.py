"""Float32 arithmetic in an explicit order, vectorized with numpy; the orders' references use it.

Sums stay in float32, and each addition rounds once. Nothing is reassociated: numpy adds arrays element by element, and
`np.sum`, whose order numpy chooses, is never used.
"""

from collections.abc import Sequence

import numpy as np

LEAST_NORMAL = 2.0**-126
ROUNDS_TO_NORMAL = 2.0**-126 - 2.0**-151  # the smallest magnitude that rounds up to 2^-126 in 24 bits


def fma_float32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c, rounded once to nearest even, keeping subnormals; a, b and c are float32 and broadcast."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _fma_to_odd(a, b, c).astype(np.float32)


def fma_flushed(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return fma_float32 with subnormal operands and results flushed to zeros of their sign.

    x86 does this with FTZ and DAZ set, and so does each half of AVX512-BF16's VDPBF16PS (Intel SDM: "DAZ, FTZ, RNE").
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        odd = _fma_to_odd(*(np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0), x), x) for x in (a, b, c)))
        return np.where(np.abs(odd) < ROUNDS_TO_NORMAL, np.copysign(0.0, odd), odd).astype(np.float32)


def _fma_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c in float64, rounded to odd: rounding it to float32 equals rounding the exact value.

    The product of two float32 is exact in float64, and two-sum (Knuth, TAOCP 4.2.2) gives the error of its sum with c:
    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE TC
    57(4), 2008.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    # An infinite total has a NaN error; keep it as is.
    inexact_and_even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    return (bits + np.where(inexact_and_even, np.where(away_from_zero, 1, -1), 0)).view(np.float64)


def add_left_to_right(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return ((parts[0] + parts[1]) + parts[2]) + ...; at least one part."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def add_tree(parts: Sequence[np.ndarray], radices: tuple[int, ...]) -> np.ndarray:
    """Sum prod(radices) parts as a tree; a node adds its children left to right.

    Radices run from root to leaf: the last one joins neighbors. () has one part, the root.
    """
    for radix in reversed(radices):
        parts = [add_left_to_right(parts[i : i + radix]) for i in range(0, len(parts), radix)]
    assert len(parts) == 1, f"{len(parts)} parts are left above the root of {radices}"
    return parts[0]


def add_pairs(values: np.ndarray) -> np.ndarray:
    """[..., power of two] -> [...]: add adjacent pairs, ((0+1)+(2+3))..., until one is left."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def add_halves(values: np.ndarray) -> np.ndarray:
    """[..., power of two] -> [...]: add the upper half to the lower half until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def pad_last(values: np.ndarray, length: int) -> np.ndarray:
    """[..., n] -> [..., length]: append 0.0; n <= length."""
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, length - values.shape[-1])])
