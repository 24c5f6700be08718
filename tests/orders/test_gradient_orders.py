"""Exact has one value for every order of its leaves; Keys and Queries are the additions that they name."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import NumericsError
from detcompile.orders import Exact, Keys, Queries, Sequential
from detcompile.orders.float32 import fma_float32

SEEDS = st.integers(0, 2**32 - 1)
GRIDS = st.sampled_from([-32, -40, -44, -48])


def heavy_tailed(seed: int, *shape: int) -> np.ndarray:
    """float32 with exponents far apart, half of them canceling."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 1, shape)).astype(np.float32)


def on_grid(values: np.ndarray, grid: int) -> np.ndarray:
    """float64 multiples of 2^grid, by the addition of a large number that leaves no finer bits."""
    magic = 1.5 * 2.0 ** (52 + grid)
    return (values.astype(np.float64) + magic) - magic


@given(SEEDS, GRIDS, st.integers(1, 40))
def test_float64_and_int64_sums_are_exact(seed, grid, count):
    leaves = heavy_tailed(seed, count, 3) * 2.0 ** (grid + 44) * 2.0**-4
    expected = Exact(Sequential(64), 64, grid).evaluate(leaves)
    shuffled = np.random.default_rng(seed).permutation(on_grid(leaves, grid))
    cut = count // 3
    assert (shuffled[:cut].sum(0) + shuffled[cut:].sum(0)).tobytes() == expected.tobytes()
    multiples = np.rint(leaves.astype(np.float64) * 2.0**-grid).astype(np.int64)
    assert (multiples.sum(0) * 2.0**grid).tobytes() == expected.tobytes()


def test_leaf_is_rounded_once_to_even():
    order = Exact(Sequential(1), 1, -2)
    assert order.evaluate(np.array([[0.125], [0.375], [0.376], [-0.125]])).tolist() == [0.0 + 0.5 + 0.5 - 0.0]
    assert order.evaluate(np.array([[0.375]])).tolist() == [0.5] and order.evaluate(np.array([[0.125]])).tolist() == [0]


def test_inexact_sums_are_rejected_nan_stays_nan():
    order = Exact(Sequential(1), 1, -44)
    assert order.limit == 128.0
    assert order.evaluate(np.array([[100.0], [-28.0]])).tolist() == [72.0]
    with pytest.raises(NumericsError, match=r"magnitudes of 2 leaves add up to more than 128\.0"):
        order.evaluate(np.array([[100.0], [-28.5]]))
    assert all(map(math.isnan, order.evaluate(np.array([[np.nan, np.inf], [1.0, 1.0]]))))


@given(SEEDS, st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_key_blocks_descend_and_keys_ascend(seed, count, block):
    ds, k = np.tril(heavy_tailed(seed, count, count)), heavy_tailed(seed + 1, count, 2)
    expected = np.zeros((count, 2), np.float32)
    for query in range(count):
        for start in range(query // block * block, -1, -block):
            total = np.zeros(2, np.float32)
            for key in range(start, min(start + block, count)):
                total = fma_float32(ds[query, key], k[key], total)
            expected[query] += total
    assert Keys(block).evaluate(ds, k).tobytes() == expected.tobytes()


@given(SEEDS, st.integers(1, 9), st.integers(1, 3))
def test_queries_are_one_chain_a_head(seed, count, heads):
    weights, rows = np.tril(heavy_tailed(seed, heads, count, count)), heavy_tailed(seed + 1, heads, count, 2)
    expected = np.zeros((count, 2), np.float32)
    for head in range(heads):
        total = np.zeros((count, 2), np.float32)
        for key in range(count):
            for query in range(key, count):  # from the key's own query on: those before it add zeros
                total[key] = fma_float32(weights[head, query, key], rows[head, query], total[key])
        expected = total if head == 0 else expected + total
    assert Queries(heads).evaluate(weights, rows).tobytes() == expected.tobytes()


def test_another_order_has_other_bits():
    ds, k = np.tril(heavy_tailed(1, 300, 300)), heavy_tailed(2, 300, 8)
    assert Keys(128).evaluate(ds, k).tobytes() != Keys(64).evaluate(ds, k).tobytes()
    flipped = Keys(128).evaluate(ds[:, ::-1], k[::-1])
    assert flipped[-1].tobytes() != Keys(128).evaluate(ds, k)[-1].tobytes()
    weights, rows = np.stack([ds, ds[::-1]]), np.stack([k, k])
    swapped = Queries(2).evaluate(weights[:, ::-1], rows[:, ::-1])
    assert Queries(2).evaluate(weights, rows).tobytes() != swapped.tobytes()


def test_a_grid_is_a_power_of_two():
    assert Fraction(Exact(Sequential(1), 1, -44).limit) == Fraction(2) ** 7
