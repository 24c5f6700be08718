"""Biases by distance on the CPU: each query's own, added to the scores of its keys, with torch's accuracy."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from tests.bits import assert_bitwise_equal
from tests.templates.attention.cases import dense_cpu, exact_attention, paged_cpu
from tests.templates.cases import DTYPES, ISAS, KINDS, PagedCache, assert_as_accurate, normal, sample

TOKENS = 200
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129]
EXTENTS = [1, 17, 64, 100, 400]


def _qkv(dtype, kind="normal"):
    """q [1, 6, TOKENS, 20], k [1, 2, TOKENS, 20], v [1, 2, TOKENS, 24]"""
    q, v = sample(kind, (1, 6, TOKENS, 20), dtype), sample(kind, (1, 2, TOKENS, 24), dtype, 2)
    return q, normal((1, 2, TOKENS, 20), dtype, 1), v


def _bias(extent, dtype):
    return 2 * normal((1, 6, TOKENS, extent), dtype, 7)


def _order(window=0, kv_chunk=128, softcap=0.0, sinks=None, slopes=None, attention_chunk=0):
    """Arguments between v and the biases."""
    return (0.2, window, kv_chunk, softcap, sinks, slopes, attention_chunk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extent", EXTENTS)
@given(
    edges=st.sets(st.sampled_from(EDGES), max_size=6),
    block_size=st.sampled_from([16, 48, 128]),
    window=st.sampled_from([0, 17, 65]),
    kv_chunk=st.sampled_from([64, 128]),
    seed=st.integers(0, 3),
)
def test_any_cut_of_a_prompt_into_any_pages_gives_the_dense_bits(
    dtype, extent, edges, block_size, window, kv_chunk, seed
):
    qkv, bias, order = _qkv(dtype), _bias(extent, dtype), _order(window, kv_chunk)
    q, k, v, rows = (x[0].transpose(0, 1) for x in (*qkv, bias))
    cache = PagedCache.poisoned(TOKENS, block_size, 2, 20, 24, dtype, seed)
    parts = []
    for begin, end in itertools.pairwise(sorted({0, TOKENS, *edges})):
        caches = (cache.k_cache, cache.v_cache, *cache.step(end - begin))
        tokens = slice(begin, end)
        parts.append(paged_cpu(q[tokens], k[tokens], v[tokens], *caches, *order, rows[tokens]))
    assert_bitwise_equal(torch.cat(parts).transpose(0, 1)[None], dense_cpu(*qkv, *order, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("extent", "window"), [(33, 0), (400, 0), (70, 70)])
def test_as_accurate_as_torch(dtype, kind, extent, window):
    q, k, v = _qkv(dtype, kind)
    bias = _bias(extent, dtype)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    actual = bias.gather(-1, distance.clamp(0, extent - 1).expand(1, 6, -1, -1)).masked_fill(distance >= extent, 0)
    scores = (q @ k.repeat_interleave(3, 1).transpose(-1, -2)).float() * 0.2 + actual.float()
    hidden = (distance < 0) | ((distance >= window) if window else False)
    theirs = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).to(dtype) @ v.repeat_interleave(3, 1)
    ours = dense_cpu(q, k, v, *_order(window), bias)
    reference = exact_attention(q, k, v, 0.2, window, relative_bias=bias)
    assert_as_accurate(ours, theirs, reference, f"{dtype} {kind} {extent}")


@pytest.mark.parametrize("features", ["cap", "all", "chunks"])
def test_with_other_features_the_value_is_float64s(features):
    q, k, v = _qkv(torch.float32)
    sinks, slopes = (torch.linspace(-1, 3, 6), torch.linspace(0.01, 0.3, 6)) if features == "all" else (None, None)
    order = _order(0, 128, 0.0 if features == "chunks" else 1.5, sinks, slopes, 48 if features == "chunks" else 0)
    bias = _bias(33, torch.float32)
    reference = exact_attention(q, k, v, 0.2, 0, *order[3:], bias)
    assert (dense_cpu(q, k, v, *order, bias) - reference).norm() < 5e-7 * reference.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slope_of_distances_is_alibi(dtype):
    """0.25 times a distance is exact."""
    qkv = _qkv(dtype)
    bias = (-0.25 * torch.arange(float(TOKENS))).expand(1, 6, TOKENS, TOKENS)
    assert_bitwise_equal(dense_cpu(*qkv, *_order(), bias), dense_cpu(*qkv, *_order(slopes=torch.full((6,), 0.25))))


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_do_not_matter(isa):
    qkv, bias = _qkv(torch.float32, "heavy"), _bias(33, torch.float32)
    expected = dense_cpu(*qkv, *_order(), bias)
    assert_bitwise_equal(dense_cpu(*qkv, *_order(), bias, isa=isa), expected, isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_biases_of_another_query_may_be_nan(dtype):
    qkv, bias = _qkv(dtype), _bias(33, dtype)
    clean = dense_cpu(*qkv, *_order(), bias)
    bias[:, :, 70] = torch.nan
    bias[:, :, 9, 10:] = torch.nan  # of distances that the tenth token does not have
    actual = dense_cpu(*qkv, *_order(), bias)
    kept = torch.arange(TOKENS) != 70
    assert_bitwise_equal(actual[:, :, kept], clean[:, :, kept])
    assert actual[:, :, 70].isnan().all()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 6, TOKENS, 0), torch.float32), ((1, 6, 3, 5), torch.float32), ((1, 6, TOKENS, 5), torch.int32)],
)
def test_what_has_no_meaning_is_refused(shape, dtype):
    with pytest.raises(InvalidInput, match=r"relative_bias is .*; it must be .* \[N, Hq, T, E>0\]"):
        torch.ops.detcompile.dense_attention(*_qkv(torch.float32), *_order(), torch.zeros(shape, dtype=dtype))


def test_the_ops_and_their_fakes_agree():
    q, k, v, bias = (x[:, :, :3] for x in (*_qkv(torch.float32), _bias(2, torch.float32)))
    torch.library.opcheck(torch.ops.detcompile.dense_attention.default, (q, k, v, *_order(), bias))
    q, k, v, bias = (x[0].transpose(0, 1) for x in (q, k, v, bias))
    cache = PagedCache.poisoned(3, 16, 2, 20, 24, torch.float32)
    step = (cache.k_cache.zero_(), cache.v_cache.zero_(), *cache.step(3))
    torch.library.opcheck(torch.ops.detcompile.paged_attention.default, (q, k, v, *step, *_order(), bias))
