"""The reference of exact-1 against its golden digests, float64 and itself in pieces."""

import math

import numpy as np
import pytest

from detcompile.templates.exact.attention import _factor
from detcompile.templates.exact.rows import FUNCTIONS
from tests.exact import definition as exact
from tests.exact import golden
from tests.exact.definition import Array, D, F, U
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless

WORST_ULP = {"exp2": 0.79, "exp": 1.0, "log": 0.86, "rsqrt": 1.49, "sigmoid": 2.27, "silu": 2.25, "gelu_tanh": 38}
WORST_ULP |= {"erf": 0.98, "tanh": 1.81, "log1p": 2.3, "gelu": 4, "sqrt": 0.5, "floor": 0}
TRUTHS = {
    "exp2": np.exp2,
    "exp": np.exp,
    "log": np.log,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "erf": np.vectorize(math.erf),
    "tanh": np.tanh,
    "log1p": np.log1p,
    "gelu": lambda x: x / 2 * np.vectorize(math.erfc)(-x * math.sqrt(0.5)),
    "sqrt": np.sqrt,
    "floor": np.floor,
}


def test_reference_gives_golden_digests() -> None:
    kept = golden.kept()
    assert golden.measured() == {part: kept[part] for part in ("functions", "rows", "products", "attention")}


@pytest.mark.parametrize(
    ("variant", "length"),
    exhaustive_unless(lambda case: case == ("exact16", 1), [(v, n) for v in exact.VARIANTS for n in golden.LENGTHS]),
)
def test_reference_gives_golden_logits(variant: str, length: int) -> None:
    assert golden.logits(variant, length) == golden.kept()["logits"][variant][str(length)]


@EXHAUSTIVE
@pytest.mark.parametrize("variant", exact.VARIANTS)
def test_chunks_of_a_text_give_its_logits(variant: str) -> None:
    decoder, tokens, cache, parts = (
        exact.Decoder(golden.TINY, exact.VARIANTS[variant]),
        exact.fixed_tokens(40),
        None,
        [],
    )
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        logits, cache = decoder.forward(tokens[start:stop], cache)
        parts.append(logits)
    assert exact.digest(np.concatenate(parts)) == golden.kept()["logits"][variant]["40"]


@EXHAUSTIVE
@pytest.mark.parametrize("name", golden.kept()["sweep"])
def test_reference_gives_a_segment_of_the_sweep(name: str) -> None:
    inputs = np.arange(1 << 24, dtype=U) + U(64 << 24)
    x = inputs.view(F)
    y = getattr(exact, name)(np.where(x == x, x, F(0)) if name == "exp2_short" else x)
    assert golden.segment_sum(inputs, y) == golden.kept()["sweep"][name]["every 16th segment"][4]


@pytest.mark.parametrize("name", exact.FUNCTIONS)
def test_function_is_near_float64(name: str) -> None:
    x = golden.function_sample()
    truth, y = TRUTHS[name](x.astype(D)), exact.FUNCTIONS[name](x).astype(D)
    counts = np.isfinite(truth) & (np.abs(truth) >= 2.0**-126) & (np.abs(truth) < 2.0**128)
    counts &= x > {"silu": -80, "gelu_tanh": -5, "gelu": -0.5}.get(name, -np.inf)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(truth[counts]))) - 23)
    assert np.max(np.abs(y[counts] - truth[counts]) / ulp) <= WORST_ULP[name]


@pytest.mark.parametrize("kv_digits", [1, 2])
def test_attention_is_near_float64(kv_digits: int) -> None:
    operands = golden.attention_operands(300, 300, H=2, G=1)
    q, k, v = (dequantized(x, digits) for x, digits in zip(operands, (2, kv_digits, kv_digits)))
    scores = np.einsum("thd,sd->hts", q, k[:, 0]) / np.sqrt(32)
    scores[:, np.arange(300)[:, None] < np.arange(300)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    truth = np.einsum("hts,sd->thd", weights / weights.sum(-1, keepdims=True), v[:, 0])
    assert np.abs(golden.attended(*operands, kv_digits) - truth).max() <= 5e-4 * np.abs(v).max()


def dequantized(x: Array, digits: int) -> Array:
    planes, scale = exact.quantize(x, digits, True)
    value = planes.astype(D)
    return (value[0] + (value[1] / 256 if digits == 2 else 0)) * scale[..., None].astype(D)


@pytest.mark.parametrize("sign", [1, -1])
def test_attention_of_finite_scores_is_finite(sign: int) -> None:
    q, k, v = golden.attention_operands(8, 200)
    q[:], k[:] = 1, np.abs(k) + F(0.01)
    for exponent in range(0, 38, 5):
        out = golden.attended(q * F(sign * 2.0**exponent), k * F(2.0 ** (exponent - 4)), v, 1)
        assert np.isfinite(out).all(), exponent


def test_log_softmax_is_near_float64() -> None:
    z = golden.values((3, 5000), 3)
    wide = z.astype(D) - z.max(-1, keepdims=True)
    truth = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    assert np.abs(exact.log_softmax(z) - truth).max() < 2e-6


def test_sum_of_largest_digits_fits_int32() -> None:
    high, low = 127 * 127 * exact.LONGEST, 2 * 127 * 128 * exact.LONGEST
    assert max(high, low) < 2**31 - 1
    assert (256 * 127 * 127 + 2 * 127 * 128) * 512 < 2**31  # scores of heads of up to 512, and values of a block


def test_score_factors_are_correctly_rounded() -> None:
    """torch's float32 square root is not: its sqrt(19) is one unit in the last place too small."""
    for dim in range(1, 1025):
        root = float(F(math.sqrt(dim)))  # rounding from float64 is innocuous for a root and a quotient
        assert _factor(dim, 0.0) == float(F(float(exact.LOG2E) / root)), dim
        assert _factor(dim, dim / 7) == float(F(float(exact.LOG2E) * float(F(dim / 7)))), dim


def test_sweep_holds_every_function() -> None:
    assert golden.kept()["sweep"].keys() == set(FUNCTIONS) == {*exact.FUNCTIONS, "exp2_short", "bf16"}
