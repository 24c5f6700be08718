"""Each float32 step of the references rounds as the exact value does, and adds in the order its name says."""

import ctypes
import ctypes.util
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.orders.float32 import (
    add_halves,
    add_left_to_right,
    add_pairs,
    add_tree,
    fma_float32,
    fma_flushed,
    pad_last,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = Fraction((2**24 - 1) * 2**104)


def rounded(value: Fraction) -> float:
    """The float32 nearest to a nonzero exact value, ties to even, from first principles."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    unit = Fraction(2) ** max(exponent - 23, -149)
    result = round(magnitude / unit) * unit  # Fraction rounds ties to even
    return math.copysign(float(result) if result <= LARGEST else math.inf, value)


def assert_fma_is_exact(a, b, c):
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    actual = float(fma_float32(a, b, c))
    expected = rounded(exact) if exact else float(a) * float(b) + float(c)  # float64 knows the sign of a zero
    assert struct.pack("f", actual) == struct.pack("f", expected), f"fma({a!r}, {b!r}, {c!r})"


@given(FLOATS, FLOATS, FLOATS)
def test_fma_rounds_the_exact_value_once(a, b, c):
    assert_fma_is_exact(np.float32(a), np.float32(b), np.float32(c))


def test_fma_with_cancellation_and_subnormals():
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-20, 1e-23, 1e12):
        a, b = (rng.standard_normal((2, 500)) * scale).astype(np.float32)
        noise = rng.choice([0.0, 2.0**-30, 2.0**-24, 1.0, 2.0**24], 500)
        for triple in zip(a, b, (-a * b * (1 + noise)).astype(np.float32)):
            assert_fma_is_exact(*triple)


@pytest.mark.parametrize("product_sign", [1, -1])
@pytest.mark.parametrize("sign", [1, -1])
def test_fma_avoids_double_rounding(sign, product_sign):
    """a * b is half a unit of c, less 2**-46 of itself: float64 sees a tie, and would round away from an odd c."""
    a = np.float32(sign * product_sign * 2.0**-24 * (1 + 2.0**-23))
    b = np.float32(1 - 2.0**-23)
    c = np.float32(sign * (1 + 2.0**-23))
    twice = np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    assert twice != c
    assert fma_float32(a, b, c) == c
    assert_fma_is_exact(a, b, c)


def flushed(value: float) -> Fraction:
    return Fraction(value) if abs(value) >= 2.0**-126 else Fraction(0)


@given(
    *[st.floats(-(2.0**-40), 2.0**-40, width=32) | FLOATS for _ in range(2)],
    st.floats(-(2.0**-124), 2.0**-124, width=32),
)
def test_flushed_fma_zeroes_subnormals(a, b, c):
    """A result is tiny if it is below 2^-126 after rounding to 24 bits, as x86 says, whatever the exponent."""
    exact = flushed(a) * flushed(b) + flushed(c)
    actual = float(fma_flushed(np.float32(a), np.float32(b), np.float32(c)))
    scaled = rounded(exact * 2**100) if abs(exact) < 2**-100 and exact else None  # 24 bits, no least exponent in reach
    if scaled is not None and abs(scaled) < 2.0**-26:
        assert struct.pack("d", actual) == struct.pack("d", math.copysign(0.0, exact))
    elif exact:
        assert actual == rounded(exact)
    else:
        assert actual == 0


def test_flushed_fma_at_the_edge():
    """2^-126 - 2^-151 is a tie at 24 bits and rounds up to the least normal; anything below stays tiny."""
    least = np.float32(2.0**-126)
    assert fma_flushed(-np.float32(2.0**-75), np.float32(2.0**-76), least) == least
    assert fma_flushed(-np.float32(2.0**-75), np.float32(2.0**-75), least) == 0
    assert fma_float32(-np.float32(2.0**-75), np.float32(2.0**-75), least) == least


def test_fma_agrees_with_the_c_library():
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    rng = np.random.default_rng(2)
    a, b, c = np.ldexp(rng.standard_t(2, (3, 5000)), rng.integers(-80, 60, (3, 5000))).astype(np.float32)
    c[::2] = -a[::2] * b[::2]
    expected = np.array([fmaf(*triple) for triple in zip(a, b, c)], np.float32)
    assert fma_float32(a, b, c).tobytes() == expected.tobytes()


def test_fma_of_zeros_infinities_and_nans():
    zero, one, inf, nan = (np.float32(value) for value in (0.0, 1.0, np.inf, np.nan))
    assert math.copysign(1, fma_float32(-zero, one, -zero)) == -1
    assert math.copysign(1, fma_float32(-zero, one, zero)) == 1
    assert fma_float32(inf, -one, one) == -inf
    assert fma_float32(one, one, inf) == inf
    assert fma_float32(np.float32(3e38), np.float32(10), one) == inf
    assert np.isnan(fma_float32(inf, zero, one)) and np.isnan(fma_float32(inf, one, -inf)) and np.isnan(nan * one)


def test_fma_broadcasts_and_keeps_float32():
    result = fma_float32(np.ones((3, 1), np.float32), np.ones((1, 4), np.float32), np.zeros((3, 4), np.float32))
    assert result.shape == (3, 4) and result.dtype == np.float32


def names(count: int) -> np.ndarray:
    """Letters whose `+` writes the addition down: arrays of objects add by Python's `+`."""
    return np.array([Written(chr(ord("a") + i)) for i in range(count)], object)


class Written(str):
    def __add__(self, other):
        return Written(f"({self}{other})")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (lambda: add_left_to_right(names(4)), "(((ab)c)d)"),
        (lambda: add_pairs(names(8)), "(((ab)(cd))((ef)(gh)))"),
        (lambda: add_halves(names(8)), "(((ae)(cg))((bf)(dh)))"),
        (lambda: add_tree(names(1), ()), "a"),
        (lambda: add_tree(names(8), (2, 2, 2)), "(((ab)(cd))((ef)(gh)))"),
        (lambda: add_tree(names(8), (8,)), "(((((((ab)c)d)e)f)g)h)"),
        (lambda: add_tree(names(6), (3, 2)), "(((ab)(cd))(ef))"),
        (lambda: add_tree(names(6), (2, 3)), "(((ab)c)((de)f))"),
    ],
)
def test_the_additions_written_out(actual, expected):
    assert actual() == expected


def test_tree_rejects_surplus_parts():
    with pytest.raises(AssertionError, match="parts are left"):
        add_tree(list(np.ones(6, np.float32)), (2, 2))


def test_padding_is_positive_zero_behind():
    padded = pad_last(np.ones((2, 3), np.float32), 5)
    assert padded.tobytes() == np.array([[1, 1, 1, 0, 0]] * 2, np.float32).tobytes()
