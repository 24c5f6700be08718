"""Numerics checks itself, and the orders it leads to are functions of lengths alone."""

import dataclasses
import inspect
import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders import KV, Blocked, EvenOdd, Exact, Row, Sequential, Tree, numerics
from detcompile.orders.numerics import (
    Numerics,
    kv_order,
    matmul_order,
    row_order,
    token_product_order,
    token_row_order,
)

CHAINS = st.lists(st.integers(2, 4), max_size=4).map(
    lambda radices: tuple(itertools.accumulate(radices, lambda size, radix: size * radix, initial=1))
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.parametrize(
    ("tp_sizes", "radices", "leaves"),
    [
        ((1,), (), 1),
        ((1, 4), (4,), 4),
        ((1, 8), (8,), 8),
        ((1, 3, 6), (3, 2), 6),
        ((1, 2, 6), (2, 3), 6),
        ((1, 2, 4, 8), (2, 2, 2), 8),
    ],
)
def test_radices_run_from_root_to_leaf(tp_sizes, radices, leaves):
    choice = Numerics(tp_sizes=tp_sizes)
    assert (choice.radices, choice.leaves) == (radices, leaves)


@given(CHAINS)
def test_radices_multiply_to_the_leaves(tp_sizes):
    choice = Numerics(tp_sizes=tp_sizes)
    assert math.prod(choice.radices) == choice.leaves == tp_sizes[-1]


@pytest.mark.parametrize(
    ("tp_sizes", "message"),
    [
        ((), r"tp_sizes=\(\): the first size must be 1; put 1 in front"),
        ((2, 4), r"tp_sizes=\(2, 4\): the first size must be 1"),
        ((0, 1), "the first size must be 1"),
        ((1, 2, 2), "2 follows 2; list each size once, in ascending order"),
        ((1, 4, 2), "2 follows 4; .* ascending"),
        ((1, 2, 3), "2 does not divide 3, .* use a multiple of 2, such as 4"),
        ((1, 4, 6, 12), "4 does not divide 6, .* drop one of them, .* such as 8"),
        ((1, 2.0), "expected a tuple of integers"),
        ((True, 2), "expected a tuple of integers"),
        (8, r"tp_sizes=8: expected a tuple of integers, such as \(1, 2, 4, 8\)"),
    ],
)
def test_a_broken_divisor_chain_is_refused(tp_sizes, message):
    with pytest.raises(NumericsError, match=message):
        Numerics(tp_sizes=tp_sizes)


@pytest.mark.parametrize(
    ("kv_chunk", "such_as"), [(0, 64), (-64, 64), (100, 128), (65, 64), (511, 512), (512.0, 512), ("512", 512)]
)
def test_a_broken_chunk_is_refused(kv_chunk, such_as):
    with pytest.raises(NumericsError, match=f"kv_chunk={kv_chunk!r}: .* multiple of 64, such as {such_as}"):
        Numerics(kv_chunk=kv_chunk)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"token_leaf": 100}, r"token_leaf=100: .* multiple of 64, such as 1024"),
        ({"token_leaf": 0}, "token_leaf=0: "),
        ({"token_leaf": 1024.0}, r"token_leaf=1024\.0: "),
        ({"token_grid": 1}, "token_grid=1: .* from -96 to 0, such as -44"),
        ({"token_grid": -97}, "token_grid=-97: "),
        ({"token_grid": -44.0}, r"token_grid=-44\.0: "),
        ({"train_tp_sizes": (1, 2)}, r"train_tp_sizes=\(1, 2\): .* use \(1,\), and shard it"),
        ({"train_tp_sizes": 1}, "train_tp_sizes=1: "),
    ],
)
def test_broken_choices_of_gradients_are_refused(choice, message):
    with pytest.raises(NumericsError, match=message):
        Numerics(**choice)


def test_gradient_choices_leave_forward_fingerprint_unchanged():
    choices = [Numerics(), Numerics(token_leaf=64), Numerics(token_grid=-40)]
    assert {repr(choice) for choice in choices} == {"Numerics(tp_sizes=(1, 2, 4, 8), kv_chunk=512)"}
    assert len({choice.digest() for choice in choices}) == 1
    assert len({choice.for_training() for choice in choices}) == len(set(choices)) == 3
    every = "tp_sizes=(1, 2, 4, 8), kv_chunk=512, token_leaf=1024, token_grid=-44, train_tp_sizes=(1,)"
    assert Numerics(train_tp_sizes=[1]).for_training() == f"Numerics({every})"


def test_numerics_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Numerics().kv_chunk = 64
    with pytest.raises(TypeError):
        Numerics((1, 2))


def test_list_of_sizes_equals_tuple():
    assert Numerics(tp_sizes=[1, 2]) == Numerics(tp_sizes=(1, 2))
    assert Numerics(tp_sizes=[1, 2]).digest() == Numerics(tp_sizes=(1, 2)).digest()


def test_digests_are_unique_and_survive_restarts():
    choices = [Numerics(), Numerics(kv_chunk=64), Numerics(tp_sizes=(1,)), Numerics(tp_sizes=(1, 8))]
    assert len({choice.digest() for choice in choices}) == len(choices)
    code = "from detcompile.orders.numerics import Numerics; print(Numerics().digest())"
    restarted = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=Path(__file__).parents[2])
    assert restarted.strip() == Numerics().digest()


def test_order_choice_cannot_see_batch_or_tp():
    allowed = {"k", "length", "dtype", "device_type", "isa", "radices", "numerics"}
    for name in numerics.__all__:
        chooser = getattr(numerics, name)
        if inspect.isfunction(chooser):
            assert set(inspect.signature(chooser).parameters) <= allowed, name


def test_matmul_orders():
    assert matmul_order(4096, torch.bfloat16, ()) == Sequential(4096)
    assert matmul_order(4096, torch.float16, ()) == Sequential(4096)
    assert matmul_order(4096, torch.float32, ()) == Blocked(4096, 128)
    assert matmul_order(12288, torch.bfloat16, (2, 2, 2)) == Tree(12288, (2, 2, 2), Sequential(1536))
    assert matmul_order(4096, torch.bfloat16, (), "amx") == EvenOdd(4096, 32)
    assert matmul_order(12288, torch.bfloat16, (3, 2), "amx") == Tree(12288, (3, 2), EvenOdd(2048, 32))
    for dtype, isa in ((torch.float16, "amx"), (torch.float32, "amx"), (torch.bfloat16, "avx512bf16")):
        assert matmul_order(4096, dtype, (), isa) == matmul_order(4096, dtype, ())
    assert matmul_order(12288, torch.float32, (3, 2)) == Tree(12288, (3, 2), Blocked(2048, 128))


@given(CHAINS, st.integers(1, 40), DTYPES)
def test_row_parallel_order_has_declared_sizes(tp_sizes, leaf_k, dtype):
    choice = Numerics(tp_sizes=tp_sizes)
    order = matmul_order(leaf_k * choice.leaves, dtype, choice.radices)
    assert len(order.leaf_slices()) == choice.leaves
    for tp_size in tp_sizes:
        assert order.subtree(tp_size).k == order.k // tp_size


@given(CHAINS, st.integers(1, 5000))
def test_uneven_k_is_rejected_with_fitting_sizes(tp_sizes, k):
    choice = Numerics(tp_sizes=tp_sizes)
    if k % choice.leaves == 0:
        matmul_order(k, torch.bfloat16, choice.radices)
        return
    with pytest.raises(NumericsError) as refusal:
        matmul_order(k, torch.bfloat16, choice.radices)
    fits = tuple(size for size in tp_sizes if k % size == 0)
    assert f"K={k} " in str(refusal.value) and f"tp_sizes that fit this K: {fits}" in str(refusal.value)
    matmul_order(k, torch.bfloat16, Numerics(tp_sizes=fits).radices)


@pytest.mark.parametrize(
    ("k", "tp_sizes", "message"),
    [
        (4100, (1, 2, 4, 8), r"into 8 equal leaves.*: \(1, 2, 4\) .*ends in one of 2, 4, 5, 10, 20, 25, 41, 50$"),
        (4096, (1, 3, 6), r"into 6 equal leaves.*: \(1,\) .*ends in one of 2, 4, 8, 16, 32, 64$"),
        (67, (1, 2), r"\(1,\) .* or no other up to 64$"),
    ],
)
def test_the_refusal_says_what_to_do(k, tp_sizes, message):
    with pytest.raises(NumericsError, match=message):
        matmul_order(k, torch.float32, Numerics(tp_sizes=tp_sizes).radices)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_without_a_template_is_refused(dtype):
    with pytest.raises(InvalidInput, match=f"matmul of {dtype}: .*float32, bfloat16 and float16"):
        matmul_order(64, dtype, ())


def test_row_orders():
    assert row_order(4096, "cpu") == Row(4096, 512, 1)
    assert row_order(151936, "cpu", (2, 2, 2)) == Row(151936, 4096, 1, (2, 2, 2))
    assert row_order(20, "cuda") == Row(20, 16, 4)
    assert row_order(128, "cuda") == Row(128, 16, 8)
    assert row_order(128, "cuda", (), torch.float32) == Row(128, 32, 4)
    assert row_order(257, "cuda") == Row(257, 128, 1)
    assert row_order(4096, "cuda", (), torch.float16) == Row(4096, 256, 8)
    assert row_order(4096, "cuda", (), torch.float32) == Row(4096, 256, 4)
    assert row_order(16384, "cuda") == Row(16384, 1024, 8)
    assert row_order(16386, "cuda") == Row(16386, 512, 2, (), 4096)
    assert row_order(151936, "cuda", (2, 2)) == Row(151936, 512, 8, (2, 2), 4096)


@given(st.integers(1, 200_000), st.sampled_from(["cpu", "cuda"]), CHAINS)
def test_a_row_order_fits_its_device(length, device_type, tp_sizes):
    radices = Numerics(tp_sizes=tp_sizes).radices
    order = row_order(length, device_type, radices)
    assert order.length == length and order.radices == radices
    assert 8 <= order.lanes <= 4096 and order.vector in (1, 2, 4, 8)
    item = row_order(order.leaf_length, device_type)
    assert item == Row(order.leaf_length, order.lanes, order.vector, (), order.chunk)


def test_lanes_never_shrink_as_rows_grow():
    lanes = [row_order(length, "cuda").lanes for length in range(8, 16_384, 16)]
    assert lanes == sorted(lanes)


def test_a_device_without_templates_is_refused():
    with pytest.raises(InvalidInput, match=r"device type 'mps': .*'cpu' and 'cuda' only"):
        row_order(64, "mps")


def test_kv_order_follows_the_declared_chunk():
    assert kv_order(Numerics()) == KV(512, 64)
    assert kv_order(Numerics(kv_chunk=128)) == KV(128, 64)


def test_token_orders_use_declared_leaf_and_grid():
    choice = Numerics(token_leaf=256, token_grid=-40)
    assert token_product_order(choice, torch.bfloat16) == Exact(Sequential(256), 256, -40)
    assert token_product_order(choice, torch.bfloat16, "amx") == Exact(EvenOdd(256), 256, -40)
    assert token_product_order(choice, torch.float32) == Exact(Blocked(256, 128), 256, -40)
    assert token_row_order(choice) == Exact(Sequential(1), 1, -40)
