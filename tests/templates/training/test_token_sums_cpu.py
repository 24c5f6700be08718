"""Sums over tokens on the CPU: the bits of Exact, whatever is packed with what; accuracy; what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.orders import Exact
from detcompile.orders.float32 import fma_float32, fma_flushed
from detcompile.orders.numerics import Numerics, matmul_order, token_product_order, token_row_order
from detcompile.templates.training import token_sums
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, normal, sample
from tests.templates.training.cases import leaves_of, packings, split

LENGTHS = [5, 1, 130, 64, 200]
LEAF = 64
OURS = torch.ops.detcompile


def rows_of(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (sample("heavy", (sum(LENGTHS), width), torch.float32, seed) / 512).to(dtype)


def without_tiles() -> list[str]:
    return [isa for isa in ISAS if isa != "amx"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_the_bits_of_the_order(dtype):
    g, x, leaves = rows_of(21, dtype, 1), rows_of(35, dtype, 2), leaves_of(LENGTHS, LEAF)
    order = token_product_order(Numerics(token_leaf=LEAF), dtype)
    fma = fma_flushed if dtype is torch.bfloat16 else fma_float32
    parts = []
    for start, end in zip(leaves.tolist(), leaves.tolist()[1:]):
        leaf = matmul_order(end - start, dtype, ())
        parts.append(leaf.evaluate(g[start:end].t().float().numpy(), x[start:end].t().float().numpy(), fma))
    expected = torch.from_numpy(order.evaluate(np.stack(parts)))
    for isa in without_tiles():
        assert_bitwise_equal(token_sums.token_matmul_cpu(g, x, leaves, isa=isa), expected, isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_rows_have_the_bits_of_the_order(dtype):
    g, ids = rows_of(300, dtype, 3), torch.randint(0, 40, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    order = token_row_order(Numerics())
    expected = torch.from_numpy(order.evaluate(g.float().numpy()))
    table = torch.zeros(41, 300, dtype=torch.float64)
    for row in ids.unique().tolist():
        table[row] = torch.from_numpy(order.evaluate(g[ids == row].float().numpy()))
    for isa in ISAS:
        assert_bitwise_equal(token_sums.token_sum_cpu(g, isa=isa), expected, isa)
        assert_bitwise_equal(token_sums.token_scatter_cpu(g, ids, 41, isa=isa), table, isa)


@pytest.mark.parametrize("grid", [-32, -44, -48])
@pytest.mark.parametrize("packing", packings(len(LENGTHS)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_does_not_change_bits(dtype, packing, grid):
    g, x = rows_of(40, dtype, 4), rows_of(33, dtype, 5)
    ids = torch.arange(sum(LENGTHS)) * 7 % 50

    def gradients(sequences):
        mine = [torch.cat([split(rows, LENGTHS)[s] for s in sequences]) for rows in (g, x, ids)]
        leaves = leaves_of([LENGTHS[s] for s in sequences], LEAF)
        return (
            OURS.token_matmul(mine[0], mine[1], leaves, 1, grid),
            OURS.token_sum(mine[0], grid),
            OURS.token_scatter(mine[0], mine[2], 50, grid),
        )

    expected = gradients(range(len(LENGTHS)))
    parts = [gradients(sequences) for sequences in packings(len(LENGTHS))[packing]]
    for ours, together in zip(zip(*parts), expected):
        assert_bitwise_equal(sum(ours[1:], ours[0]), together, packing)


@given(cut=st.integers(1, 63))
def test_leaf_cut_elsewhere_changes_bits(cut):
    g, x = rows_of(40, torch.bfloat16, 4)[6:70], rows_of(33, torch.bfloat16, 5)[6:70]
    whole = OURS.token_matmul(g, x, torch.tensor([0, 64], dtype=torch.int32))
    parts = OURS.token_matmul(g, x, torch.tensor([0, cut, 64], dtype=torch.int32))
    assert not torch.equal(whole, parts)


def test_instruction_sets_threads_and_strides_do_not_matter():
    threads = torch.get_num_threads()
    for dtype in DTYPES:
        g, x, leaves = rows_of(70, dtype, 6), rows_of(48, dtype, 7), leaves_of(LENGTHS, LEAF)
        expected = token_sums.token_matmul_cpu(g, x, leaves), token_sums.token_sum_cpu(g)
        wide = torch.full((sum(LENGTHS), 80), torch.nan, dtype=dtype)
        wide[:, 4:74] = g
        torch.set_num_threads(2)
        actual = (
            token_sums.token_matmul_cpu(wide[:, 4:74], x.t().contiguous().t(), leaves),
            token_sums.token_sum_cpu(wide[:, 4:74]),
        )
        torch.set_num_threads(threads)
        for ours, theirs in zip(actual, expected):
            assert_bitwise_equal(ours, theirs)


def test_heads_of_a_token_are_rows_of_its_leaf():
    g, x = normal((24, 5), torch.float32, 1) / 64, normal((24, 7), torch.float32, 2)
    leaves = torch.tensor([0, 3, 6], dtype=torch.int32)
    assert_bitwise_equal(OURS.token_matmul(g, x, leaves, 4), OURS.token_matmul(g, x, 4 * leaves))
    assert_bitwise_equal(OURS.token_matmul(g, x, leaves, 2), OURS.token_matmul(g[:12], x[:12], 2 * leaves))


def test_rows_outside_of_all_leaves_are_not_read():
    g, x = rows_of(9, torch.bfloat16, 1), rows_of(11, torch.bfloat16, 2)
    leaves = torch.tensor([2, 60, 60, 100], dtype=torch.int32)
    expected = OURS.token_matmul(g[2:100], x[2:100], torch.tensor([0, 58, 98], dtype=torch.int32))
    g[:2], g[100:] = math.nan, math.nan
    assert_bitwise_equal(OURS.token_matmul(g, x, leaves), expected)
    assert_bitwise_equal(OURS.token_matmul(g, x, leaves[:1]), torch.zeros(9, 11, dtype=torch.float64))


def test_no_rows_are_no_sum():
    g, none = torch.zeros(0, 3), torch.zeros(1, dtype=torch.int32)
    assert_bitwise_equal(OURS.token_matmul(g, torch.zeros(0, 2), none), torch.zeros(3, 2, dtype=torch.float64))
    assert_bitwise_equal(OURS.token_sum(g), torch.zeros(3, dtype=torch.float64))
    assert_bitwise_equal(OURS.token_scatter(g, none[:0], 4), torch.zeros(4, 3, dtype=torch.float64))


def test_elements_beyond_exactness_are_infinite_and_others_exact():
    one = torch.ones(2, 1)
    leaves = torch.tensor([0, 1, 2], dtype=torch.int32)
    terms = torch.tensor([[64.0, 64.0, 1.0, 1.0, 200.0, 1.0], [-64.0, -65.0, torch.nan, torch.inf, torch.nan, -1.0]])
    expected = torch.tensor([0.0, torch.inf, torch.nan, torch.nan, torch.nan, 0.0], dtype=torch.float64)
    assert Exact.limit.fget(token_row_order(Numerics())) == 128.0
    for actual in (
        OURS.token_sum(terms),
        OURS.token_scatter(terms, torch.tensor([1, 1]), 2)[1],
        OURS.token_matmul(terms, one, leaves).flatten(),
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert OURS.token_sum(terms, -40)[1] == -1.0


def test_accuracy():
    g, x, leaves = rows_of(40, torch.bfloat16, 8), rows_of(33, torch.bfloat16, 9), leaves_of(LENGTHS, 1024)
    reference = token_sums.reference_token_matmul(g, x, leaves)
    ours = (OURS.token_matmul(g, x, leaves) - reference).norm()
    theirs = ((g.float().t() @ x.float()).double() - reference).norm()
    assert ours <= 1.05 * theirs


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: OURS.token_matmul(g, x[1:], torch.zeros(1, dtype=torch.int32)), r"x .* \[T, K\] with T = 8"),
        (lambda g, x: OURS.token_matmul(g, x.double(), torch.zeros(1, dtype=torch.int32)), "x is torch.float64"),
        (lambda g, x: OURS.token_matmul(g, x, torch.zeros(2)), r"must be torch\.int32 \[L\+1\]"),
        (lambda g, x: OURS.token_matmul(g, x, torch.tensor([0, 4, 3], dtype=torch.int32)), "leaf 1, rows 4 to 3 "),
        (lambda g, x: OURS.token_matmul(g, x, torch.tensor([0, 9], dtype=torch.int32)), "range within 8 rows"),
        (lambda g, x: OURS.token_matmul(g, x, torch.tensor([0, 5], dtype=torch.int32), 2), "leaf 0, rows 0 to 5 "),
        (lambda g, x: OURS.token_matmul(g, x, torch.tensor([-1, 5], dtype=torch.int32)), "leaf 0, rows -1 to 5 "),
        (lambda g, x: OURS.token_sum(g[0]), r"must be .* \[T, N\]"),
        (lambda g, x: OURS.token_scatter(g, torch.zeros(3, dtype=torch.int64), 4), r"ids .* \[T\] with T = 8"),
        (lambda g, x: OURS.token_scatter(g, torch.full((8,), 4), 4), r"id 4 at row 0 is outside .*\[0, 4\)"),
        (lambda g, x: OURS.token_sum(g.double()), "g is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(InvalidInput, match=message):
        call(torch.zeros(8, 3), torch.zeros(8, 2))
