"""The variants of exact integer arithmetic (docs/exact.md) that Numerics.arithmetic names."""

from collections.abc import Mapping
from typing import NamedTuple

DEFINITION = "exact-1"  # of docs/exact.md; another one may have other bits


class ExactArithmetic(NamedTuple):
    """Digits of eight bits that hold a value, and the rounding of residual sums.

    Attributes:
        weights: digits of a linear's weights.
        activations: digits of a linear's input rows.
        kv: digits of keys and values.
        bf16_residual: True if residual sums are rounded to bfloat16; else they are float32.
    """

    weights: int
    activations: int
    kv: int
    bf16_residual: bool


ARITHMETICS: Mapping[str, ExactArithmetic] = {
    "exact8": ExactArithmetic(weights=1, activations=1, kv=1, bf16_residual=True),
    "exact8x16": ExactArithmetic(weights=1, activations=2, kv=1, bf16_residual=True),
    "exact16": ExactArithmetic(weights=2, activations=2, kv=2, bf16_residual=False),
}
