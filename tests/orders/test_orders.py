"""Each order evaluates exactly its additions, ranks' partials combine to the whole, and swaps are detected.

Data is heavy-tailed, so that another order of additions shows in the bits: each property comes with a planted swap.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.orders import KV, Blocked, EvenOdd, Experts, Row, Sequential, Tree
from detcompile.orders.float32 import add_tree, fma_float32, fma_flushed
from detcompile.orders.numerics import matmul_order, row_order

SEEDS = st.integers(0, 2**32 - 1)
RADICES = st.sampled_from([(), (4,), (8,), (3, 2), (2, 3), (2, 2, 2)]) | st.lists(st.integers(2, 4), max_size=3).map(
    tuple
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def heavy_tailed(seed: int, *shape: int) -> np.ndarray:
    """float32 with exponents far apart, half of them canceling."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    return a.tobytes() == b.tobytes()


def tp_sizes_of(radices: tuple[int, ...]) -> list[int]:
    return list(itertools.accumulate(radices, lambda size, radix: size * radix, initial=1))


def chain(x_K: np.ndarray, w_K: np.ndarray) -> np.float32:
    """One dot product, one k at a time."""
    acc = np.float32(0)
    for x, w in zip(x_K, w_K):
        acc = np.float32(fma_float32(x, w, acc))
    return acc


# --- GEMM orders


@given(SEEDS, st.integers(1, 300))
def test_sequential_is_one_chain_upwards(seed, k):
    x_MK, w_NK = heavy_tailed(seed, 3, k), heavy_tailed(seed + 1, 2, k)
    expected = np.array([[chain(x, w) for w in w_NK] for x in x_MK])
    assert same_bits(Sequential(k).evaluate(x_MK, w_NK), expected)


@given(SEEDS, st.sampled_from([1, 127, 128, 129, 255, 256, 257, 400]))
def test_blocked_adds_the_chains_of_its_blocks(seed, k):
    x_MK, w_NK = heavy_tailed(seed, 2, k), heavy_tailed(seed + 1, 2, k)
    expected = np.empty((2, 2), np.float32)
    for m, n in np.ndindex(2, 2):
        expected[m, n] = chain(x_MK[m, :128], w_NK[n, :128])
        for i in range(128, k, 128):
            expected[m, n] += chain(x_MK[m, i : i + 128], w_NK[n, i : i + 128])
    assert same_bits(Blocked(k).evaluate(x_MK, w_NK), expected)


@given(SEEDS, st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 100]))
def test_even_odd_adds_two_chains_per_block(seed, k):
    x_MK, w_NK = heavy_tailed(seed, 2, k), heavy_tailed(seed + 1, 2, k)
    expected = np.zeros((2, 2), np.float32)
    for m, n in np.ndindex(2, 2):
        for i in range(0, k, 32):
            x, w = x_MK[m, i : i + 32], w_NK[n, i : i + 32]
            expected[m, n] += chain(x[0::2], w[0::2]) + chain(x[1::2], w[1::2])
    assert same_bits(EvenOdd(k).evaluate(x_MK, w_NK), expected)


def test_even_odd_flushes_every_addition():
    x_MK, w_NK = np.array([[1.5, -1.0]], np.float32), np.array([[2.0**-126, 2.0**-126]], np.float32)
    assert EvenOdd(2).evaluate(x_MK, w_NK) == 2.0**-127
    assert EvenOdd(2).evaluate(x_MK, w_NK, fma_flushed).tobytes() == bytes(4)
    assert EvenOdd(2, 1).evaluate(x_MK, w_NK, fma_flushed).tobytes() == bytes(4)


@given(SEEDS, st.integers(1, 9), RADICES, DTYPES, st.sampled_from(["", "amx"]))
def test_ranks_combine_to_the_whole_sum(seed, leaf_k, radices, dtype, isa):
    k = leaf_k * math.prod(radices)
    order = matmul_order(k, dtype, radices, isa)
    x_MK, w_NK = heavy_tailed(seed, 3, k), heavy_tailed(seed + 1, 4, k)
    whole = order.evaluate(x_MK, w_NK)
    for tp_size in tp_sizes_of(radices):
        shards = zip(np.split(x_MK, tp_size, axis=1), np.split(w_NK, tp_size, axis=1))
        parts = [order.subtree(tp_size).evaluate(*shard) for shard in shards]
        assert same_bits(order.combine(parts), whole), tp_size


@given(SEEDS, st.integers(1, 9), RADICES, DTYPES, st.data())
def test_a_row_ignores_its_neighbors(seed, leaf_k, radices, dtype, data):
    k = leaf_k * math.prod(radices)
    order = matmul_order(k, dtype, radices)
    x_MK, w_NK = heavy_tailed(seed, 6, k), heavy_tailed(seed + 1, 3, k)
    rows = data.draw(st.lists(st.integers(0, 5), max_size=6))
    assert same_bits(order.evaluate(x_MK[rows], w_NK), order.evaluate(x_MK, w_NK)[rows])


def test_no_rows_give_no_sums():
    assert Tree(8, (2,), Sequential(4)).evaluate(np.ones((0, 8)), np.ones((5, 8))).shape == (0, 5)
    assert Row(100, 32, 4, (2,)).evaluate(np.ones((0, 100))).shape == (0,)


def test_leading_dims_are_batches():
    x, w = heavy_tailed(0, 2, 3, 40), heavy_tailed(1, 2, 4, 40)
    batched = Blocked(40, 16).evaluate(x, w)
    assert same_bits(batched, np.stack([Blocked(40, 16).evaluate(a, b) for a, b in zip(x, w)]))


X, W = heavy_tailed(10, 16, 768), heavy_tailed(11, 16, 768)


@pytest.mark.parametrize(
    ("order", "planted"),
    [
        (Sequential(768), lambda: Sequential(768).evaluate(X[:, ::-1], W[:, ::-1])),
        (Sequential(768), lambda: Blocked(768).evaluate(X, W)),
        (Sequential(768), lambda: np.einsum("mk,nk->mn", X, W)),
        (Sequential(768), lambda: unfused(X, W)),
        (Blocked(768), lambda: Blocked(768, 64).evaluate(X, W)),
        (Blocked(768), lambda: Tree(768, (2, 3), Sequential(128)).evaluate(X, W)),
        (EvenOdd(768), lambda: EvenOdd(768, 64).evaluate(X, W)),
        (EvenOdd(768), lambda: Sequential(768).evaluate(X, W)),
        (EvenOdd(768), lambda: Blocked(768, 32).evaluate(X, W)),
        (Tree(768, (2, 2), EvenOdd(192)), lambda: EvenOdd(768).evaluate(X, W)),
        (Tree(768, (2, 2, 2), Sequential(96)), lambda: swapped_leaves(X, W)),
        (Tree(768, (2, 2, 2), Sequential(96)), lambda: Tree(768, (8,), Sequential(96)).evaluate(X, W)),
        (Tree(768, (3, 2), Sequential(128)), lambda: Tree(768, (2, 3), Sequential(128)).evaluate(X, W)),
        (Tree(768, (2, 2), Sequential(192)), lambda: Tree(768, (2, 2), Blocked(192)).evaluate(X, W)),
        (Tree(768, (2, 2), Sequential(192)), lambda: Sequential(768).evaluate(X, W)),
    ],
)
def test_planted_swap_changes_matmul_bits(order, planted):
    assert not same_bits(order.evaluate(X, W), planted())


def unfused(x_MK: np.ndarray, w_NK: np.ndarray) -> np.ndarray:
    acc = np.zeros((len(x_MK), len(w_NK)), np.float32)
    for x_M, w_N in zip(x_MK.T, w_NK.T):
        acc = acc + np.outer(x_M, w_N)
    return acc


def swapped_leaves(x_MK: np.ndarray, w_NK: np.ndarray) -> np.ndarray:
    """Tree(768, 2x2x2) with leaves 1 and 2 exchanged; a swap inside one node would commute."""
    leaves = [Sequential(96).evaluate(x_MK[:, i : i + 96], w_NK[:, i : i + 96]) for i in range(0, 768, 96)]
    leaves[1], leaves[2] = leaves[2], leaves[1]
    return add_tree(leaves, (2, 2, 2))


def test_combining_ranks_in_another_order_is_seen():
    order = Tree(768, (2, 2, 2), Sequential(96))
    parts = [order.subtree(4).evaluate(X[:, i : i + 192], W[:, i : i + 192]) for i in range(0, 768, 192)]
    assert same_bits(order.combine(parts), order.evaluate(X, W))
    assert not same_bits(order.combine([parts[0], parts[2], parts[1], parts[3]]), order.evaluate(X, W))
    assert not same_bits(sum(parts[1:], parts[0]), order.evaluate(X, W))


def test_combine_serves_torch_tensors_too():
    order = Tree(768, (3, 2), Sequential(128))
    parts = [order.subtree(6).evaluate(X[:, i : i + 128], W[:, i : i + 128]) for i in range(0, 768, 128)]
    assert same_bits(order.combine([torch.from_numpy(part) for part in parts]).numpy(), order.evaluate(X, W))


def test_leaf_slices_cover_k_once():
    assert Tree(12, (3, 2), Sequential(2)).leaf_slices() == [slice(i, i + 2) for i in range(0, 12, 2)]
    assert Sequential(12).leaf_slices() == Blocked(12).leaf_slices() == [slice(0, 12)]


def test_subtrees_are_trees_down_to_the_leaf():
    tree = Tree(48, (2, 2, 2), Sequential(6))
    assert tree.subtree(1) == tree
    assert tree.subtree(2) == Tree(24, (2, 2), Sequential(6))
    assert tree.subtree(8) == Sequential(6)
    assert Tree(48, (3, 2), Blocked(8)).subtree(3) == Tree(16, (2,), Blocked(8))


@pytest.mark.parametrize("order", [Sequential(768), Blocked(768), EvenOdd(768), Tree(768, (2, 2, 2), Sequential(96))])
def test_matmul_references_are_near_float64(order):
    exact = X.astype(np.float64) @ W.T.astype(np.float64)
    bound = np.abs(X).astype(np.float64) @ np.abs(W).T.astype(np.float64) * 768 * 2.0**-24
    assert (np.abs(order.evaluate(X, W) - exact) <= bound).all()


def test_infinities_and_nans_pass_through():
    x = np.array([[np.inf, 1], [np.nan, 1], [3e38, 3e38]], np.float32)
    sums = Sequential(2).evaluate(x, np.array([[1, 1]], np.float32))[:, 0]
    assert sums[0] == sums[2] == np.inf and np.isnan(sums[1])


# --- Row


def row_one_by_one(terms: np.ndarray, lanes: int, vector: int) -> np.float32:
    """The contract of Row, element by element."""
    acc = [[np.float32(0)] * vector for _ in range(lanes)]
    for i, term in enumerate(terms):
        lane, place = (i // vector) % lanes, i % vector
        acc[lane][place] = acc[lane][place] + term
    sums = []
    for places in acc:
        while len(places) > 1:
            places = [places[j] + places[j + 1] for j in range(0, len(places), 2)]
        sums.append(places[0])
    groups = [halved(sums[i : i + 32]) for i in range(0, lanes, 32)]
    return halved(groups)


def halved(values: list[np.float32]) -> np.float32:
    while len(values) > 1:
        half = len(values) // 2
        values = [values[i] + values[i + half] for i in range(half)]
    return values[0]


@given(SEEDS, st.integers(1, 1500), st.sampled_from([1, 8, 32, 64, 256]), st.sampled_from([1, 2, 4, 8]), RADICES)
def test_row_adds_in_its_documented_order(seed, length, lanes, vector, radices):
    terms = heavy_tailed(seed, length)
    leaf_length = math.ceil(length / math.prod(radices))
    leaves = [terms[i * leaf_length : (i + 1) * leaf_length] for i in range(math.prod(radices))]
    expected = add_tree([row_one_by_one(leaf, lanes, vector) for leaf in leaves], radices)
    assert same_bits(Row(length, lanes, vector, radices).evaluate(terms), np.asarray(expected))


@given(SEEDS, st.integers(1, 1500), st.sampled_from([1, 3, 8, 40, 512]))
def test_row_combines_chunks_like_lanes(seed, length, chunk):
    terms = heavy_tailed(seed, length)
    sums = [row_one_by_one(terms[i : i + chunk], 8, 4) for i in range(0, length, chunk)]
    padded = sums + [np.float32(0)] * (max(32, 1 << (len(sums) - 1).bit_length()) - len(sums))
    expected = halved([halved(padded[i : i + 32]) for i in range(0, len(padded), 32)])
    assert same_bits(Row(length, 8, 4, (), chunk).evaluate(terms), np.asarray(expected))


@given(SEEDS, st.integers(1, 3000) | st.integers(20_000, 40_000), st.sampled_from(["cpu", "cuda"]), RADICES)
def test_a_sharded_row_combines_to_the_whole(seed, length, device_type, radices):
    order = row_order(length, device_type, radices)
    terms = heavy_tailed(seed, 2, length)
    padded = np.zeros((2, order.leaf_length * math.prod(radices)), np.float32)
    padded[:, :length] = terms
    for tp_size in tp_sizes_of(radices):
        parts = [order.subtree(tp_size).evaluate(shard) for shard in np.split(padded, tp_size, axis=1)]
        assert same_bits(order.combine(parts), order.evaluate(terms)), tp_size


def test_row_rounds_terms_to_float32_before_adding():
    terms = np.full(64, 1 + 2.0**-24 + 2.0**-30)
    assert same_bits(Row(64, 1).evaluate(terms), Row(64, 1).evaluate(terms.astype(np.float32)))


TERMS = heavy_tailed(12, 16, 4000)


@pytest.mark.parametrize(
    "planted",
    [
        lambda: Row(4000, 64, 8).evaluate(TERMS),
        lambda: Row(4000, 256, 8).evaluate(TERMS),
        lambda: Row(4000, 128, 4).evaluate(TERMS),
        lambda: Row(4000, 128, 8, (2,)).evaluate(TERMS),
        lambda: Row(4000, 128, 8).evaluate(TERMS[:, ::-1]),
        lambda: TERMS.sum(-1),
    ],
)
def test_planted_swap_changes_row_bits(planted):
    assert not same_bits(Row(4000, 128, 8).evaluate(TERMS), planted())


# --- KV


def attention_inputs(seed: int, num_keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal(8), rng.standard_normal((num_keys, 8)), rng.standard_t(2, (num_keys, 64))
    return (3 * q).astype(np.float32), k.astype(np.float32), v.astype(np.float32)


POSITIONS = st.sampled_from([0, 1, 62, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300])


@given(SEEDS, POSITIONS, st.sampled_from([0, 1, 2, 63, 64, 65, 128, 500]))
def test_kv_is_attention_over_the_visible_keys(seed, position, window):
    q, k, v = attention_inputs(seed, 301)
    first = max(0, position - window + 1) if window else 0
    scores = k[first : position + 1].astype(np.float64) @ q * 0.3
    p = np.exp(scores - scores.max())
    expected = p @ v[first : position + 1] / p.sum()
    actual = KV(128).evaluate(q, k, v, position, window, 0.3)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(v).max())


@given(SEEDS, POSITIONS, st.sampled_from([1, 64, 130, 200]))
def test_kv_passes_over_keys_that_weigh_nothing(seed, position, lost):
    q, k, v = attention_inputs(seed, 301)
    q, k[:lost] = np.abs(q), -np.inf
    actual = KV(128).evaluate(q, k, v, position, 0, 0.3)
    scores = k[lost : position + 1].astype(np.float64) @ q * 0.3
    p = np.exp(scores - scores.max(initial=-np.inf))
    expected = p @ v[lost : position + 1] / p.sum() if position >= lost else np.full(v.shape[-1], np.nan)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(v).max())


@given(SEEDS, POSITIONS, st.sampled_from([0, 1, 64, 100]))
def test_kv_never_reads_an_invisible_key(seed, position, window):
    q, k, v = attention_inputs(seed, 301)
    clean = KV(128).evaluate(q, k, v, position, window, 0.3)
    for keys in (slice(position + 1, None), slice(0, max(0, position - window + 1) if window else 0)):
        k[keys], v[keys] = np.nan, np.nan
    assert same_bits(KV(128).evaluate(q, k, v, position, window, 0.3), clean)
    assert same_bits(KV(128).evaluate(q, k[: position + 1], v[: position + 1], position, window, 0.3), clean)


@given(SEEDS, POSITIONS, st.sampled_from([0, 2, 64, 65, 100, 129, 200]))
def test_masked_kv_block_changes_no_bits(seed, position, window):
    q, k, v = attention_inputs(seed, 320)
    k = k[np.argsort(k @ q)]  # every block moves the running maximum
    expected = masked_attention(q, k, v, position, window, chunk=128)
    assert same_bits(KV(128).evaluate(q, k, v, position, window, 0.1), expected)


def masked_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, window: int, chunk: int) -> np.ndarray:
    """The contract of KV over all keys of all blocks: invisible ones are masked, never skipped."""
    keys = np.arange(len(k))
    visible = (keys <= position) & ((keys > position - window) if window else True)
    k, v = np.where(visible[:, None], k, 0), np.where(visible[:, None], v, 0)
    scores = Sequential(len(q)).evaluate(k, q[None])[:, 0] * np.float32(0.1 * math.log2(math.e))
    scores = np.where(visible, scores, np.float32(-np.inf))
    partials = []
    for start in range(0, len(k), chunk):
        m, l, o = nothing = (np.float32(-np.inf), np.float32(0), np.zeros(v.shape[1], np.float32))
        for first in range(start, min(start + chunk, len(k)), 64):
            m_new = max(m, scores[first : first + 64].max())
            l, o = l * decay(m, m_new), o * decay(m, m_new)
            m = m_new
            for key in range(first, first + 64):
                p = np.exp2(scores[key] - m) if visible[key] else np.float32(0)
                l, o = l + p, fma_float32(p, v[key], o)
        partials.append((m, l, o))
    m, l, o = nothing
    for m_chunk, l_chunk, o_chunk in partials:
        m_new = max(m, m_chunk)
        old, new = decay(m, m_new), decay(m_chunk, m_new)
        m, l, o = m_new, l * old + l_chunk * new, o * old + o_chunk * new
    return o / l + np.float32(0)


def decay(old: np.float32, new: np.float32) -> np.float32:
    return np.exp2(old - new) if old < new else np.float32(1)


def test_kv_has_no_negative_zero():
    """Half of the smallest subnormal rounds to zero, and would keep its sign."""
    k, v = np.zeros((2, 8), np.float32), np.array([[-1e-45], [0]], np.float32)
    assert KV(64).evaluate(k[0], k, v, 1, 0, 1.0).tobytes() == bytes(4)


@pytest.mark.parametrize(
    ("order", "keys", "shift"),
    [
        pytest.param(KV(256), slice(None), 0, id="chunks of 256"),
        pytest.param(KV(128, 32), slice(None), 0, id="blocks of 32"),
        pytest.param(KV(128), slice(None, None, -1), 0, id="keys descending"),
        pytest.param(KV(128), slice(None), 1, id="keys one position further on"),
    ],
)
def test_planted_swap_changes_attention_bits(order, keys, shift):
    """The scores rise with the position, so that every block moves the running maximum."""
    for seed in range(8):
        q, k, v = attention_inputs(seed, 400)
        k = k[np.argsort(k @ q)]
        expected = KV(128).evaluate(q, k, v, 399, 0, 0.1)
        k, v = (np.concatenate([values[:shift], values[keys]]) for values in (k, v))
        assert not same_bits(order.evaluate(q, k, v, 399 + shift, 400, 0.1), expected), seed


# --- Experts


def test_experts_add_in_rank_order():
    partials = heavy_tailed(13, 6, 50)
    expected = ((((partials[0] + partials[1]) + partials[2]) + partials[3]) + partials[4]) + partials[5]
    assert same_bits(Experts(6).evaluate(partials), expected)
    assert not same_bits(Experts(6).evaluate(partials[::-1]), expected)
