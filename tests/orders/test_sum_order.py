"""Every order prints itself, hashes, states its symbols, and refuses what it cannot sum."""

import hashlib

import numpy as np
import pytest
import sympy

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders import KV, Blocked, EvenOdd, Exact, Experts, Keys, Queries, Row, Sequential, Tree

TOKENS = sympy.Symbol("tokens", integer=True, positive=True)

ORDERS = {
    Sequential(1536): "Sequential(1536)",
    Blocked(1536): "Blocked(1536, block=128)",
    Blocked(1536, 64): "Blocked(1536, block=64)",
    EvenOdd(1536): "EvenOdd(1536, block=32)",
    Tree(12288, (2, 2, 2), EvenOdd(1536)): "Tree(12288, 2x2x2, EvenOdd(1536, block=32))",
    Tree(12288, (2, 2, 2), Sequential(1536)): "Tree(12288, 2x2x2, Sequential(1536))",
    Tree(12288, (2, 2, 2), Blocked(1536)): "Tree(12288, 2x2x2, Blocked(1536, block=128))",
    Tree(12288, (8,), Sequential(1536)): "Tree(12288, 8, Sequential(1536))",
    Row(4096, 128, 8): "Row(4096, lanes=128, vector=8)",
    Row(4096, 128, 8, (3, 2)): "Row(4096, lanes=128, vector=8, leaves=3x2)",
    KV(512): "KV(chunk=512, block=64)",
    Experts(8): "Experts(8)",
    Exact(Sequential(1024), 1024, -44): "Exact(Sequential(1024), tokens=1024, grid=2^-44)",
    Exact(Sequential(1024), 1024, -40): "Exact(Sequential(1024), tokens=1024, grid=2^-40)",
    Keys(128): "Keys(block=128)",
    Queries(4): "Queries(heads=4)",
    Sequential(TOKENS): "Sequential(tokens)",
    Sequential(sympy.Symbol("tokens")): "Sequential(tokens)",
}


def test_orders_print_themselves():
    assert [str(order) for order in ORDERS] == list(ORDERS.values())


def test_orders_differ_and_so_do_their_digests():
    assert len(ORDERS) == len({order.digest() for order in ORDERS}) == 18
    assert Tree(8, (2,), Sequential(4)).digest() == Tree(8, [2], Sequential(sympy.Integer(4))).digest()
    canonical = b"Tree(k=8, radices=(2), leaf=Sequential(k=4))"
    assert Tree(8, (2,), Sequential(4)).digest() == hashlib.sha256(canonical).hexdigest()


def test_a_sympy_number_is_a_number():
    order = Sequential(sympy.Integer(64))
    assert order == Sequential(64) and hash(order) == hash(Sequential(64)) and type(order.k) is int


@pytest.mark.parametrize(
    "order",
    [
        Sequential(TOKENS),
        Blocked(2 * TOKENS + 1),
        Blocked(64, TOKENS),
        EvenOdd(TOKENS),
        Tree(8 * TOKENS, (2, 2, 2), Sequential(TOKENS)),
        Tree(64 * TOKENS, (TOKENS,), Sequential(64)),
        Row(TOKENS, 64),
        Row(64, TOKENS),
        Row(64, 32, TOKENS),
        Row(64, 32, 1, (TOKENS,)),
        KV(TOKENS),
        KV(64 * TOKENS),
        Experts(TOKENS),
        Exact(Sequential(TOKENS), 64, -44),
        Exact(Sequential(64), TOKENS, -44),
        Keys(TOKENS),
        Queries(TOKENS),
    ],
)
def test_order_reports_nested_symbols(order):
    assert order.symbols == {TOKENS}
    assert "tokens" in str(order)
    inputs = {Row: 1, Experts: 1, Exact: 1, KV: 6}.get(type(order), 2)
    with pytest.raises(InvalidInput, match="sizes hold tokens"):
        order.evaluate(*[np.ones((1, 1))] * inputs)


def test_numbers_have_no_symbols():
    assert all(not order.symbols for order in ORDERS if "tokens" not in str(order))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sequential(0), "Sequential: k=0 must be an integer of at least 1"),
        (lambda: EvenOdd(64, 0), "EvenOdd: block=0"),
        (lambda: Blocked(64, -1), "Blocked: block=-1"),
        (lambda: Sequential(1.5), r"k=1\.5"),
        (lambda: Sequential(sympy.Rational(3, 2)), "k=3/2"),
        (lambda: Tree(8, (), Sequential(8)), r"without radices is its leaf; use Sequential\(8\)"),
        (lambda: Tree(9, (2, 2), Sequential(2)), r"4 leaves of 2 are not 9; give each leaf K / 4"),
        (lambda: Tree(TOKENS, (2,), Sequential(4)), "2 leaves of 4 are not tokens"),
        (lambda: Tree(8, (2, 0), Sequential(4)), "radices=0 must be"),
        (lambda: Row(8, 48), "lanes=48 is not a power of two"),
        (lambda: Row(8, 32, 3), "vector=3 is not a power of two"),
        (lambda: Exact(Sequential(0), 64, -44), "Sequential: k=0"),
        (lambda: Exact(Sequential(64), 0, -44), "Exact: tokens=0"),
        (lambda: Exact(Sequential(64), 64, -150), "grid=-150 must be an exponent of two from -149 to 76"),
        (lambda: Exact(Sequential(64), 64, -44.0), r"grid=-44\.0 must"),
        (lambda: Keys(0), "Keys: block=0"),
        (lambda: Queries(0), "Queries: heads=0"),
        (lambda: KV(100), "a chunk holds whole blocks; use a multiple of 64"),
    ],
)
def test_an_impossible_order_is_refused(build, message):
    with pytest.raises(NumericsError, match=message):
        build()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: Sequential(8).evaluate(np.ones((2, 7)), np.ones((2, 8))), "sums 8 terms, but .* x holds 7; slice"),
        (lambda: Blocked(8).evaluate(np.ones((2, 8)), np.ones((2, 9))), "but the last dim of w holds 9"),
        (lambda: Row(8, 32).evaluate(np.ones((2, 9))), "but the last dim of terms holds 9"),
        (lambda: Experts(3).evaluate(np.ones((2, 9))), "but the first dim of partials holds 2"),
        (lambda: Keys(64).evaluate(np.ones((2, 3)), np.ones((2, 4))), "but the last dim of ds holds 3"),
        (lambda: Queries(3).evaluate(np.ones((2, 4, 4)), np.ones((2, 4, 8))), "but the first dim of weights holds 2"),
        (lambda: KV(64).evaluate(np.ones(4), np.ones((3, 4)), np.ones((3, 4)), 3, 0, 1.0), "position 3 has no key"),
        (lambda: Tree(12, (3, 2), Sequential(2)).subtree(2), "cannot be shared by 2 ranks, only by 1, 3, 6"),
        (lambda: Tree(12, (3, 2), Sequential(2)).combine([1.0] * 4), "shared by 4 ranks, only by 1, 3, 6"),
        (lambda: Sequential(12).subtree(2), "cannot be shared by 2 ranks, only by 1$"),
        (lambda: Row(12, 32, 1, (2,)).combine([1.0] * 3), "shared by 3 ranks, only by 1, 2"),
    ],
)
def test_input_that_does_not_fit_is_refused(use, message):
    with pytest.raises(InvalidInput, match=message):
        use()
