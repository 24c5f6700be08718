"""The reference of exact-1 against its golden digests, float64 and itself in pieces."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch

import detcompile
from detcompile.errors import InvalidInput
from detcompile.templates.exact.attention import WIDEST_HEAD, _factor
from detcompile.templates.exact.gpu import _LONGEST as GPU_PART
from detcompile.templates.exact.rows import _LONGEST, FUNCTIONS
from detcompile.templates.exact.softmax import _MOST_LOGITS, exact_softmax
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


N, HIGH, LOW = sympy.Symbol("n", integer=True, positive=True), 127, 128  # terms; the largest digits
T = 256 * HIGH**2 + 2 * HIGH * LOW  # of one term, with two digits on both sides
BOUNDS = {  # of a sum of n terms of any signs, thus of every part of it in any order; terms; bits
    "high by high": (N * HIGH**2, exact.LONGEST, 31),
    "low by high": (N * HIGH * LOW, exact.LONGEST, 31),
    "both cross products": (2 * N * HIGH * LOW, exact.LONGEST, 31),
    "T of a part, in float64": (N * T, exact.LONGEST, 53),
    "T of all parts": (N * T, 1 << 32, 63),
    "a score": (N * T, WIDEST_HEAD, 31),
    "values of a block": (N * T, exact.BLOCK, 31),
    "weights of a block, in float32": (N * 32512, exact.BLOCK, 24),
    "squares of a norm": (N * 2**44, _LONGEST - 1, 63),
    "elements of a norm": (N * 2**22, _LONGEST - 1, 63),
    "weights of a softmax": (N * 2**40, _MOST_LOGITS, 63),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_sums_of_integers_do_not_overflow(bound: str) -> None:
    largest, terms, bits = BOUNDS[bound]
    assert sympy.ask(sympy.Q.positive(sympy.diff(largest, N)))  # so the most terms give the largest sum
    assert 0 < largest.subs(N, terms) <= 2**bits - 1


def test_parts_of_long_product_meet_bounds() -> None:
    source = Path(detcompile.__file__).parent / "templates"
    cut = re.search(r"kLongest = (\d+)", (source / "cpu" / "exact" / "steps.h").read_text())
    assert cut is not None and int(cut[1]) == exact.LONGEST == GPU_PART.value
    whole = sympy.floor((2**31 - 1) / (2 * HIGH * LOW))  # the longest sum that fits
    assert exact.LONGEST <= whole == 66052


def test_softmax_of_too_many_logits_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="an exact softmax of 8388608 logits"):
        exact_softmax(torch.empty(1, _MOST_LOGITS + 1, device="meta"))


def test_score_factors_are_correctly_rounded() -> None:
    """torch's float32 square root is not: its sqrt(19) is one unit in the last place too small."""
    for dim in range(1, 1025):
        root = float(F(math.sqrt(dim)))  # rounding from float64 is innocuous for a root and a quotient
        assert _factor(dim, 0.0) == float(F(float(exact.LOG2E) / root)), dim
        assert _factor(dim, dim / 7) == float(F(float(exact.LOG2E) * float(F(dim / 7)))), dim


def test_sweep_holds_every_function() -> None:
    assert golden.kept()["sweep"].keys() == set(FUNCTIONS) == {*exact.FUNCTIONS, "exp2_short", "bf16"}
