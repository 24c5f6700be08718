"""Rotary tables of docs/exact.md: the same float32 values on every machine, made on the host.

cos and sin are rounded to float64, then to float32. libm is within a few units of float64's last place, which decides
the float32 except near the middle of two: there integers of 120 bits decide.
"""

from collections.abc import Callable
from decimal import Context, Decimal

import numpy as np
import torch
from torch import Tensor

_ONE = 1 << 120
_UNSURE = 2.0**-44  # relative; no libm's cos or sin of float64 is this far off


def rope_tables(length: int, dim: int, theta: float, change: Callable[[float], float] = float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, dim / 2] float32 of position * change(theta^(-2i / dim)), frequencies in float64."""
    context = Context(prec=60)
    powers = [context.power(Decimal(theta), Decimal(-2 * i) / Decimal(dim)) for i in range(dim // 2)]
    frequencies = np.array([change(float(power)) for power in powers]).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    wide = angles.astype(np.float64)
    tables = []
    for index, function in enumerate((np.cos, np.sin)):
        near = function(wide)
        table = near.astype(np.float32)
        unsure = (near * (1 - _UNSURE)).astype(np.float32) != (near * (1 + _UNSURE)).astype(np.float32)
        for place in zip(*unsure.nonzero()):
            table[place] = np.float32(_cos_sin(float(angles[place]))[index])
        tables.append(torch.from_numpy(table))
    return tables[0], tables[1]


def _cos_sin(angle: float) -> tuple[float, float]:
    """Return the float64 values nearest to the cosine and sine."""
    numerator, denominator = angle.as_integer_ratio()
    x = numerator * _ONE // denominator // 16 % (2 * _PI // 16)  # of a sixteenth of the angle, doubled four times
    cos = sin = k = 0
    term = _ONE
    while term:
        sign = -1 if k & 2 else 1
        cos, sin = (cos, sin + sign * term) if k & 1 else (cos + sign * term, sin)
        k += 1
        term = term * x // _ONE // k
    for _ in range(4):
        cos, sin = (cos * cos - sin * sin) // _ONE, 2 * cos * sin // _ONE
    return cos / _ONE, sin / _ONE


def _arctan_of_reciprocal(n: int) -> int:
    return sum((-1) ** k * (_ONE // n ** (2 * k + 1)) // (2 * k + 1) for k in range(60))


_PI = 4 * (4 * _arctan_of_reciprocal(5) - _arctan_of_reciprocal(239))  # Machin
