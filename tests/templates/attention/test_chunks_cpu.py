"""Chunks of attention on the CPU: a query sees its own chunk, with a window's bits and torch's accuracy."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from tests.bits import assert_bitwise_equal
from tests.templates.attention.cases import dense_cpu, exact_attention, paged_cpu
from tests.templates.cases import DTYPES, ISAS, KINDS, PagedCache, assert_as_accurate, normal, sample

TOKENS = 333
CHUNKS = [1, 17, 48, 64, 65, 130, 400]
EDGES = [1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 129, 130, 131, 260]


def _qkv(dtype, kind="normal"):
    """q [1, 6, TOKENS, 20], k [1, 2, TOKENS, 20], v [1, 2, TOKENS, 24]"""
    q, v = sample(kind, (1, 6, TOKENS, 20), dtype), sample(kind, (1, 2, TOKENS, 24), dtype, 2)
    return q, normal((1, 2, TOKENS, 20), dtype, 1), v


def _order(attention_chunk, kv_chunk=128, window=0):
    """Arguments behind q, k and v."""
    return (0.2, window, kv_chunk, 0.0, None, None, attention_chunk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention_chunk", CHUNKS)
@given(
    edges=st.sets(st.sampled_from(EDGES), max_size=6),
    block_size=st.sampled_from([16, 48, 128]),
    kv_chunk=st.sampled_from([64, 128, 512]),
    seed=st.integers(0, 3),
)
def test_any_cut_of_a_prompt_into_any_pages_gives_the_dense_bits(
    dtype, attention_chunk, edges, block_size, kv_chunk, seed
):
    qkv = _qkv(dtype)
    cuts = [end - begin for begin, end in itertools.pairwise(sorted({0, TOKENS, *edges}))]
    cache = PagedCache.poisoned(TOKENS, block_size, 2, 20, 24, dtype, seed)
    order = _order(attention_chunk, kv_chunk)
    paged = cache.attend(paged_cpu, *(x[0].transpose(0, 1) for x in qkv), cuts, *order)
    assert_bitwise_equal(paged.transpose(0, 1)[None], dense_cpu(*qkv, *order))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention_chunk", [1, 48, 65])
def test_a_query_has_the_bits_of_a_window_as_long_as_its_chunk_is_by_then(dtype, attention_chunk):
    qkv = _qkv(dtype, "heavy")
    chunked = dense_cpu(*qkv, *_order(attention_chunk))
    windows = {window: dense_cpu(*qkv, 0.2, window, 128) for window in range(1, attention_chunk + 1)}
    expected = [windows[position % attention_chunk + 1][:, :, position] for position in range(TOKENS)]
    assert_bitwise_equal(chunked, torch.stack(expected, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_never_looks_at_pages_before_the_chunk(dtype):
    """They may be freed: their places in the block table name no block."""
    q, k, v = _qkv(dtype)
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    cache = PagedCache.poisoned(TOKENS, 16, 2, 20, 24, dtype)
    parts = []
    for position in range(TOKENS):
        cache.block_table[:, : position // 48 * 48 // 16] = -7
        step = cache.step(1)
        row = [x[position : position + 1] for x in tokens]
        parts.append(paged_cpu(*row, cache.k_cache, cache.v_cache, *step, *_order(48)))
    assert_bitwise_equal(torch.cat(parts).transpose(0, 1)[None], dense_cpu(q, k, v, *_order(48)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poisoned", [47, 48, 100])
def test_what_a_query_does_not_see_may_be_nan(dtype, poisoned):
    qkv = _qkv(dtype)
    clean = dense_cpu(*qkv, *_order(48))
    for x in qkv:
        x[:, :, poisoned] = torch.nan
    actual = dense_cpu(*qkv, *_order(48))
    end = (poisoned // 48 + 1) * 48
    assert_bitwise_equal(actual[:, :, :poisoned], clean[:, :, :poisoned])
    assert_bitwise_equal(actual[:, :, end:], clean[:, :, end:])
    assert actual[:, :, poisoned:end].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_do_not_matter(isa):
    qkv = _qkv(torch.float32, "heavy")
    assert_bitwise_equal(dense_cpu(*qkv, *_order(65), isa=isa), dense_cpu(*qkv, *_order(65)), isa)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention_chunk", [48, 130])
def test_as_accurate_as_torch(dtype, kind, attention_chunk):
    q, k, v = _qkv(dtype, kind)
    position = torch.arange(TOKENS)
    chunk = position // attention_chunk
    visible = (position[:, None] >= position) & (chunk[:, None] == chunk)
    k_all, v_all = (x.repeat_interleave(3, 1) for x in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k_all, v_all, attn_mask=visible, scale=0.2)
    ours = dense_cpu(q, k, v, *_order(attention_chunk))
    reference = exact_attention(q, k, v, 0.2, attention_chunk=attention_chunk)
    assert_as_accurate(ours, theirs, reference, f"{dtype} {kind} {attention_chunk}")


@pytest.mark.parametrize(("window", "attention_chunk"), [(5, 5), (0, -1), (-1, 0)])
def test_what_has_no_meaning_is_refused(window, attention_chunk):
    both = f"sliding_window={window}, attention_chunk={attention_chunk}:"
    with pytest.raises(InvalidInput, match=f"{both}|= -1 must be from 0"):
        torch.ops.detcompile.dense_attention(*_qkv(torch.float32), *_order(attention_chunk, window=window))


def test_the_ops_and_their_fakes_agree():
    q, k, v = (x[:, :, :3] for x in _qkv(torch.float32))
    torch.library.opcheck(torch.ops.detcompile.dense_attention.default, (q, k, v, *_order(2)))
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    cache = PagedCache.poisoned(3, 16, 2, 20, 24, torch.float32)
    step = (cache.k_cache.zero_(), cache.v_cache.zero_(), *cache.step(3))
    torch.library.opcheck(torch.ops.detcompile.paged_attention.default, (*tokens, *step, *_order(2)))
