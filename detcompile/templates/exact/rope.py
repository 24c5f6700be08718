"""Rotary tables of docs/exact.md: the same float32 values on every machine, made on the host.

cos and sin are rounded to float64, then to float32. libm's float64 results may be off by a few units in the last place.
That matters only near the midpoint of two float32 numbers: there, integers of 120 bits give the exact rounding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ONE = 1 << 120
_UNSURE = 2.0**-44  # relative; no libm's float64 cos or sin has so large an error
_WIDE = Context(prec=60, rounding=ROUND_HALF_EVEN)


def rope_tables(length: int, frequencies: Sequence[float], scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, len(frequencies)] float32 of position * frequency, times the scaling."""
    angles = np.arange(length, dtype=np.float32)[:, None] * np.array(frequencies).astype(np.float32)
    wide = angles.astype(np.float64)
    tables = []
    for index, function in enumerate((np.cos, np.sin)):
        near = function(wide)
        table = near.astype(np.float32)
        unsure = (near * (1 - _UNSURE)).astype(np.float32) != (near * (1 + _UNSURE)).astype(np.float32)
        for place in zip(*unsure.nonzero()):
            table[place] = np.float32(_cos_sin(float(angles[place]))[index])
        tables.append(torch.from_numpy(table * np.float32(scaling)))
    return tables[0], tables[1]


def frequencies_of(theta: float, dim: int) -> list[float]:
    """Return theta^(-2i / dim) for i < dim / 2, each rounded to float64."""
    base = Decimal(theta)
    return [float(_WIDE.power(base, _WIDE.divide(Decimal(-2 * i), Decimal(dim)))) for i in range(dim // 2)]


def _default(parameters: Mapping[str, Any], dim: int, config: Any) -> tuple[list[float], float]:
    return frequencies_of(parameters["rope_theta"], dim), 1.0


def _linear(parameters: Mapping[str, Any], dim: int, config: Any) -> tuple[list[float], float]:
    factor = parameters["factor"]
    return [frequency / factor for frequency in frequencies_of(parameters["rope_theta"], dim)], 1.0


def _llama3(parameters: Mapping[str, Any], dim: int, config: Any) -> tuple[list[float], float]:
    factor, length = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]

    def blend(frequency: float) -> float:
        waves = length / (2 * math.pi / frequency)
        if waves > high:
            return frequency
        smooth = max(0.0, (waves - low) / (high - low))
        return (1 - smooth) * (frequency / factor) + smooth * frequency

    return [blend(frequency) for frequency in frequencies_of(parameters["rope_theta"], dim)], 1.0


def _proportional(parameters: Mapping[str, Any], dim: int, config: Any) -> tuple[list[float], float]:
    factor = parameters.get("factor", 1.0)
    rotated = int(parameters.get("partial_rotary_factor", 1.0) * dim // 2)
    frequencies = frequencies_of(parameters["rope_theta"], dim)
    return [frequency / factor if i < rotated else 0.0 for i, frequency in enumerate(frequencies)], 1.0


def _yarn(parameters: Mapping[str, Any], dim: int, config: Any) -> tuple[list[float], float]:
    theta, length = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    factor = config.max_position_embeddings / length if factor is None else factor

    def feature(turns: float) -> float:
        """Return the feature that turns this often over the original length, as a real number."""
        angle = _WIDE.multiply(Decimal(turns), _WIDE.divide(Decimal(2 * _PI), Decimal(_ONE)))
        logarithm = _WIDE.ln(_WIDE.divide(Decimal(length), angle))
        return float(_WIDE.divide(dim * logarithm, 2 * _WIDE.ln(Decimal(theta))))

    low, high = feature(parameters.get("beta_fast") or 32), feature(parameters.get("beta_slow") or 1)
    if config.rope_parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high

    def blend(i: int, frequency: float) -> float:
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        return frequency / factor * ramp + frequency * (1 - ramp)

    frequencies = [blend(i, frequency) for i, frequency in enumerate(frequencies_of(theta, dim))]
    return frequencies, _yarn_scaling(parameters, factor)


def _yarn_scaling(parameters: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * float(_WIDE.ln(Decimal(factor))) + 1.0 if factor > 1 else 1.0

    factor_of_tables, mscale, all_dim = (parameters.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor_of_tables is not None:
        return float(factor_of_tables)
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1)


# Each returns frequencies, rounded to float64 in each step, and the factor of both tables.
ROPE_TYPES: Mapping[str, Callable[[Mapping[str, Any], int, Any], tuple[list[float], float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "proportional": _proportional,
    "yarn": _yarn,
}


def _cos_sin(angle: float) -> tuple[float, float]:
    """Return the float64 values nearest to the cosine and sine."""
    numerator, denominator = angle.as_integer_ratio()
    x = numerator * _ONE // denominator // 16 % (2 * _PI // 16)  # a sixteenth of the angle, doubled below
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
