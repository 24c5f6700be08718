"""The golden digests of exact-1: the results that every implementation must have for fixed inputs.

`python -m tests.exact.golden` writes golden.json from the reference. The sums of "sweep" come from C++ over all 2^32
inputs, and an H200 gave the same; they stay as they are.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.exact import definition as exact
from tests.exact.definition import Array, F, I, U

PATH = Path(__file__).with_name("golden.json")
TINY = Path(__file__).parents[2] / "detcompile" / "tiny"
LENGTHS = (1, 40, 64, 127, 300)  # of the fixed texts whose logits are kept
DIGITS = {"exact8": (1, 1), "exact8x16": (2, 1), "exact16": (2, 2)}  # of left and right operands of products
EDGES = (0.0, -0.0, 2.0**-149, 2.0**-70, -(2.0**-60), 2.0**39, -(2.0**40), 3e38, float("inf"), float("nan"))


def kept() -> dict[str, Any]:
    """Return the digests of golden.json."""
    return json.loads(PATH.read_text())


def mix(h: Array) -> Array:
    """Hash 32-bit integers."""
    h = (h ^ (h >> U(16))) * U(0x7FEB352D)
    h = (h ^ (h >> U(15))) * U(0x846CA68B)
    return h ^ (h >> U(16))


def integers(shape: Sequence[int], seed: int) -> Array:
    return mix(mix(np.arange(np.prod(shape), dtype=U)) ^ U(seed)).reshape(shape)


def values(shape: Sequence[int], seed: int) -> Array:
    """Return float32 numbers in (-8, 8), a sixteenth of them above 1/2: exact on every machine."""
    i = integers(shape, seed)
    return (((i >> U(8)).astype(I) - I(1 << 23)).astype(F) * F(2.0**-20)) * exact.power_of_two(-(i & U(7)).astype(I))


def rows(seed: int = 1, K: int = 200) -> Array:
    """Return rows [M, K] of all sizes, then one row for each of EDGES."""
    x = values((24 + len(EDGES), K), seed)
    x[:24] = exact.scaled(x[:24], np.arange(-120, 120, 10, dtype=I)[:, None])
    x[24:, 7] = EDGES
    return x


def function_sample() -> Array:
    """Return float32 inputs that hold every sign, exponent and leading fraction."""
    return (np.arange(1 << 16, dtype=U) * U(65537)).view(F)


def segment_sum(inputs: Array, y: Array) -> str:
    """Return the sum of hashes of a function's results y at `inputs`, whose order is free."""
    u = y.view(U)
    u = np.where((u & U(0x7FFFFFFF)) > U(0x7F800000), U(0x7FC00000), u)  # every NaN is one value
    return f"{int(mix(u ^ (inputs * U(0x9E3779B1))).astype(np.uint64).sum()):x}"


def planes(shape: Sequence[int], seed: int) -> Array:
    """Return digits int8 [digits, ...]: the high one in [-127, 127], the low one in [-128, 127]."""
    i = (integers(shape, seed) & U(0xFF)).astype(np.uint8).view(np.int8)
    i[0][i[0] == -128] = 127
    return i


def attention_operands(T: int, S: int, H: int = 4, G: int = 2, dim: int = 32) -> tuple[Array, Array, Array]:
    """Return queries [T, H, dim] of the last of S tokens, keys and values [S, G, dim], values of many sizes."""
    q, k, v = values((T, H, dim), 11), values((S, G, dim), 12), values((S, G, dim), 13)
    v *= exact.power_of_two((integers((S, G, 1), 14) % U(13)).astype(I) - I(6))
    if T > 2:
        q[1], k[:2] = F(2.0**-59), F(2.0**-59)  # scores so small that their ceiling is 1
    return q, k, v


def attention_cases() -> dict[str, tuple[Array, Array, Array, int]]:
    """Return queries, keys, values and digits of keys and values."""
    cases = {}
    for digits in (1, 2):
        cases[f"kv {digits}, 300"] = (*attention_operands(300, 300), digits)
        cases[f"kv {digits}, 1200"] = (*attention_operands(3, 1200), digits)
    q, k, v = attention_operands(140, 140)
    cases["large scores"] = q * F(2.0**30), k * F(2.0**25), v, 1
    q[3, 1, 5], k[130, 0, 0], v[135, 1, 1] = F(np.nan), F(np.inf), F(2.0**40)
    cases["poisoned"] = q, k, v, 2
    return cases


def attended(q: Array, k: Array, v: Array, digits: int, *rule: Any) -> Array:
    """Return the reference's attention of the last len(q) of len(k) tokens."""
    keys, its_values = exact.quantize(k, digits, True), exact.quantize(v, digits, True)
    queries = exact.quantize(q, exact.QUERY_DIGITS, False)
    return exact.attention(*queries, *keys, *its_values, np.arange(len(k) - len(q), len(k)), *rule)


def product_cases() -> dict[str, tuple[Array, Array]]:
    cases = {}
    for name, (left, right) in DIGITS.items():
        cases[name] = planes((left, 5, 333), 21), planes((right, 7, 333), 22)
        largest = (
            np.full((left, 1, exact.LONGEST + 3), 127, np.int8),
            np.full((right, 2, exact.LONGEST + 3), -127, np.int8),
        )
        largest[0][1:], largest[1][1:] = -128, -128
        cases[f"{name} largest"] = largest
    return cases


def measured() -> dict[str, dict[str, str]]:
    """Return the digests that the reference gives, without the logits."""
    x = function_sample()
    number = np.where(x == x, x, F(0))
    functions = {name: exact.digest(function(x)) for name, function in exact.FUNCTIONS.items()}
    functions |= {"exp2_short": exact.digest(exact.exp2_short(number)), "bf16": exact.digest(exact.bf16(x))}
    row = {"rms_norm": exact.digest(exact.rms_norm(rows(), values((200,), 2), 1e-6))}
    for digits in (1, 2):
        for side in ("left", "right"):
            q, scale = exact.quantize(rows(), digits, side == "right")
            row[f"quantize {digits} {side}"] = exact.digest(q) + exact.digest(scale)
    row["rope"] = exact.digest(np.stack(exact.rope_tables([0, 1, 2, 1000, 40959], 64, 1_000_000)))
    row["layer_norm"] = exact.digest(exact.layer_norm(rows(), values((200,), 2), values((200,), 4), 1e-5))
    row["log_softmax"] = exact.digest(exact.log_softmax(values((3, 5000), 3)))
    return {
        "functions": functions,
        "rows": row,
        "products": {name: exact.digest(exact.product(*case)) for name, case in product_cases().items()},
        "attention": {name: exact.digest(attended(*case)) for name, case in attention_cases().items()},
    }


def logits(variant: str, length: int) -> str:
    """Return the digest of the model tiny's logits over the fixed text of this length."""
    return exact.digest(exact.Decoder(TINY, exact.VARIANTS[variant]).forward(exact.fixed_tokens(length))[0])


if __name__ == "__main__":
    written = measured() | {"logits": {v: {str(n): logits(v, n) for n in LENGTHS} for v in exact.VARIANTS}}
    PATH.write_text(json.dumps(kept() | written, indent=1) + "\n")
