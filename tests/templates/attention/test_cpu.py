"""Attention on the CPU: the same bits for dense and paged keys and for any cut of a prompt; accuracy; refusals."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from tests.bits import assert_bitwise_equal
from tests.templates.attention.cases import (
    assert_shared_tokens_are_those_of_each,
    dense_cpu,
    exact_attention,
    paged_cpu,
)
from tests.templates.cases import DTYPES, ISAS, KINDS, PagedCache, assert_as_accurate, normal, sample

# tokens, query heads, key heads, D, Dv
SHAPES = [(129, 4, 2, 16, 16), (65, 3, 3, 8, 20), (63, 6, 1, 80, 40), (513, 2, 1, 20, 8), (577, 2, 2, 32, 32)]
WINDOWS = [0, 1, 17, 64, 65, 512]
EDGES = [1, 2, 15, 16, 17, 62, 63, 64, 65, 66, 127, 128, 129, 511, 512, 513]


def _qkv(shape, dtype, kind="normal", seed=0):
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]"""
    T, Hq, Hkv, D, Dv = shape
    return (
        sample(kind, (T, Hq, D), dtype, seed),
        normal((T, Hkv, D), dtype, seed + 1),
        sample(kind, (T, Hkv, Dv), dtype, seed + 2),
    )


def _dense(q, k, v, *rest, isa=None):
    """[T, heads, dims] in and out"""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return dense_cpu(q, k, v, *rest, isa=isa)[0].transpose(0, 1)


def _cache(shape, block_size, dtype, seed=0):
    T, _, Hkv, D, Dv = shape
    return PagedCache.poisoned(T, block_size, Hkv, D, Dv, dtype, seed)


def _cuts(edges, total):
    """Step sizes that cut [0, total) at the edges."""
    bounds = sorted({0, total, *(edge for edge in edges if edge < total)})
    return [end - begin for begin, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(
    edges=st.sets(st.sampled_from(EDGES), max_size=6),
    block_size=st.sampled_from([16, 32, 48, 128]),
    window=st.sampled_from(WINDOWS),
    kv_chunk=st.sampled_from([64, 128, 512]),
    seed=st.integers(0, 3),
)
def test_any_chunking_of_a_prompt_into_any_pages_gives_the_dense_bits(
    dtype, shape, edges, block_size, window, kv_chunk, seed
):
    q, k, v = _qkv(shape, dtype)
    rest = (shape[3] ** -0.5, window, kv_chunk)
    paged = _cache(shape, block_size, dtype, seed).attend(paged_cpu, q, k, v, _cuts(edges, len(q)), *rest)
    assert_bitwise_equal(paged, _dense(q, k, v, *rest))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70])
def test_decoding_one_token_at_a_time_gives_the_bits_of_prefill(dtype, window):
    shape = (140, 4, 2, 24, 24)
    q, k, v = _qkv(shape, dtype, "heavy")
    decoded = _cache(shape, 16, dtype).attend(paged_cpu, q, k, v, [1] * 140, 0.2, window, 128)
    assert_bitwise_equal(decoded, _dense(q, k, v, 0.2, window, 128))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_at_the_edges_of_blocks_and_chunks(dtype):
    shape = (1030, 2, 1, 16, 16)
    q, k, v = _qkv(shape, dtype)
    edges = [edge + i for edge in (64, 448, 512, 576, 1024) for i in (-1, 0, 1, 2)]
    paged = _cache(shape, 16, dtype).attend(paged_cpu, q, k, v, _cuts(edges, 1030), 0.25, 0, 512)
    assert_bitwise_equal(paged, _dense(q, k, v, 0.25, 0, 512))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_a_batch_ignore_each_other(dtype):
    lengths, caches, alone, tokens = [5, 70, 1], [], [], []
    pages, total = [], 0
    for i, length in enumerate(lengths):
        shape = (length, 4, 2, 16, 16)
        q, k, v = _qkv(shape, dtype, seed=10 * i)
        alone.append(_dense(q, k, v, 0.25, 0, 128))
        tokens.append((q, k, v))
        caches.append(_cache(shape, 16, dtype, i))
    k_cache, v_cache = (torch.cat([getattr(c, name) for c in caches]) for name in ("k_cache", "v_cache"))
    slots = []
    for cache, length in zip(caches, lengths, strict=True):
        pages.append(
            torch.nn.functional.pad(cache.block_table[0] + total, (0, 8 - cache.block_table.shape[1]), value=-7)
        )
        slots.append(cache.step(length)[0] + total * 16)
        total += len(cache.k_cache)
    q, k, v = (torch.cat([*parts, normal((3, *parts[0].shape[1:]), dtype)]) for parts in zip(*tokens, strict=True))
    slot_mapping = torch.cat([*slots, torch.full((3,), -1)])
    cu = torch.tensor([0, 5, 75, 76], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    out = paged_cpu(q, k, v, k_cache, v_cache, slot_mapping, cu, seq_lens, torch.stack(pages), 0.25, 0, 128)
    assert_bitwise_equal(out, torch.cat([*alone, torch.zeros(3, 4, 16, dtype=dtype)]))


@pytest.mark.parametrize("dtype", DTYPES)
@given(future=st.integers(0, 66), window=st.sampled_from([0, 3]))
def test_a_later_token_does_not_matter_even_as_nan(dtype, future, window):
    q, k, v = _qkv((67, 4, 2, 16, 16), dtype)
    expected = _dense(q, k, v, 0.25, window, 64)
    for tensor in (q, k, v):
        tensor[future:] = torch.nan
    assert_bitwise_equal(_dense(q, k, v, 0.25, window, 64)[:future], expected[:future])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("lost", [1, 64, 70, 130])
def test_tokens_without_a_finite_score_are_alike_in_prefill_and_decode(dtype, window, lost):
    shape = (140, 4, 2, 24, 24)
    q, k, v = _qkv(shape, dtype)
    q = q.abs()
    k[:lost] = -torch.inf
    whole = _dense(q, k, v, 0.2, window, 64)
    assert whole[:lost].isnan().all() and whole[lost:].isfinite().all()
    assert not _dense(q, k, v, 0.2, window, 64, 0.0, torch.zeros(4))[:lost].any()  # all weight is the sink's
    if not window:
        v[0, 0, 3], v[lost - 1, 1, 5] = torch.inf, torch.nan  # which no weight of zero takes back
        whole = _dense(q, k, v, 0.2, window, 64)
        assert whole[lost:, :2, 3].isnan().all() and whole[lost:, 2:, 5].isnan().all()
        assert (whole[lost:].isnan().sum((1, 2)) == 4).all()
    for step in (1, 37):
        actual = _cache(shape, 16, dtype).attend(paged_cpu, q, k, v, _cuts(range(0, 140, step), 140), 0.2, window, 64)
        assert_bitwise_equal(actual, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_threads_and_strides_do_not_matter(dtype, isa):
    threads = torch.get_num_threads()
    for shape, window in ((SHAPES[0], 0), (SHAPES[1], 17), (SHAPES[2], 0)):
        q, k, v = _qkv(shape, dtype, "heavy")
        expected = _dense(q, k, v, 0.3, window, 64)
        torch.set_num_threads(2)
        assert_bitwise_equal(_dense(q, k, v, 0.3, window, 64, isa=isa), expected, isa)
        torch.set_num_threads(threads)
        strided = [torch.stack([x, x.new_full((), torch.nan).expand_as(x)], -1)[..., 0] for x in (q, k, v)]
        assert_bitwise_equal(_dense(*strided, 0.3, window, 64, isa=isa), expected)
        fused = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1).split([x[0].numel() for x in (q, k, v)], 1)
        views = [part.unflatten(1, x.shape[1:]) for part, x in zip(fused, (q, k, v), strict=True)]
        op = functools.partial(paged_cpu, isa=isa)
        paged = _cache(shape, 32, dtype).attend(op, *views, [len(q)], 0.3, window, 64)
        assert_bitwise_equal(paged, expected)


@pytest.mark.parametrize("dtype", [torch.float32])
def test_another_chunk_has_other_bits(dtype):
    q, k, v = _qkv((600, 2, 1, 32, 32), dtype)
    assert_bitwise_equal(_dense(q, k, v, 0.2, 0, 256)[:256], _dense(q, k, v, 0.2, 0, 512)[:256])
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(_dense(q, k, v, 0.2, 0, 256), _dense(q, k, v, 0.2, 0, 512))


def test_positions_that_start_elsewhere_have_other_bits():
    q, k, v = _qkv((300, 2, 1, 32, 32), torch.float32)
    shifted = _dense(*(x[1:] for x in (q, k, v)), 0.2, 64, 128)[100:]
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(shifted, _dense(q, k, v, 0.2, 64, 128)[101:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "window"), [((700, 4, 2, 64, 64), 0), ((300, 4, 4, 128, 128), 0), ((300, 4, 2, 80, 80), 100)]
)
def test_as_accurate_as_torch(dtype, kind, shape, window):
    q, k, v = (x.transpose(0, 1)[None] for x in _qkv(shape, dtype, kind))
    scale = shape[3] ** -0.5
    distance = torch.arange(shape[0])[:, None] - torch.arange(shape[0])
    visible = (distance >= 0) & (distance < (window or shape[0]))
    k_all, v_all = (x.repeat_interleave(shape[1] // shape[2], 1) for x in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k_all, v_all, attn_mask=visible, scale=scale)
    ours = dense_cpu(q, k, v, scale, window, 512)
    assert_as_accurate(ours, theirs, exact_attention(q, k, v, scale, window), f"{dtype} {kind} {shape}")


def test_no_tokens_give_an_empty_result():
    assert dense_cpu(torch.empty(0, 2, 5, 8), torch.empty(0, 1, 5, 8), torch.empty(0, 1, 5, 4), 1.0, 0, 64).numel() == 0
    empty, cache = torch.empty(0, 2, 8), torch.zeros(2, 16, 2, 8)
    table, zero = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    slots = torch.empty(0, dtype=torch.int64)
    out = paged_cpu(empty, empty, empty, cache, cache.clone(), slots, zero, zero[:1], table, 1.0, 0, 64)
    assert out.shape == (0, 2, 8)


def _step(**changes):
    """A valid step of 3 tokens, but for the changes."""
    arguments = {
        "q": torch.zeros(3, 4, 8),
        "k": torch.ones(3, 2, 8),
        "v": torch.ones(3, 2, 8),
        "k_cache": torch.zeros(4, 16, 2, 8),
        "v_cache": torch.zeros(4, 16, 2, 8),
        "slot_mapping": torch.tensor([32, 33, 34]),
        "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([3], dtype=torch.int32),
        "block_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "scale": 1.0,
        "sliding_window": 0,
        "kv_chunk": 64,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([32, 64, 34])}, r"slot_mapping\[1\] .*4 blocks of 16"),
        ({"slot_mapping": torch.tensor([32, -2, 34])}, r"slot_mapping\[1\]"),
        ({"slot_mapping": torch.tensor([32, 33])}, "slot_mapping has 2 slots; 3 tokens need"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}, "cu_seqlens must start at 0"),
        ({"cu_seqlens": torch.tensor([1, 3], dtype=torch.int32)}, "cu_seqlens must start at 0"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens .* must be contiguous torch.int32 \[S\+1\]"),
        ({"seq_lens": torch.tensor([2], dtype=torch.int32)}, r"seq_lens\[0\] is less"),
        ({"seq_lens": torch.tensor([33], dtype=torch.int32)}, r"seq_lens\[0\] is less .* more than"),
        ({"block_table": torch.tensor([[4, 0]], dtype=torch.int32)}, r"block_table\[0\] is not a block"),
        ({"q": torch.zeros(3, 3, 8)}, "3 query heads cannot share 2 key heads"),
        ({"q": torch.zeros(3, 4, 8).bfloat16()}, r"k is torch.float32 .* must be torch.bfloat16 \[T, Hkv, D\]"),
        ({"v_cache": torch.zeros(4, 16, 2, 9)}, r"v_cache .* must be .* with .*Dv = 8"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_writes_nothing(changes, message):
    step = _step(**changes)
    with pytest.raises(InvalidInput, match=message):
        torch.ops.detcompile.paged_attention(**step)
    assert not step["k_cache"].any() and not step["v_cache"].any()


def test_chunk_must_be_a_multiple_of_the_block():
    with pytest.raises(InvalidInput, match=r"kv_chunk = 100 must be a multiple of 64"):
        torch.ops.detcompile.paged_attention(**_step(kv_chunk=100))


def test_the_ops_and_their_fakes_agree():
    torch.library.opcheck(torch.ops.detcompile.paged_attention.default, tuple(_step().values()))
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 6)
    torch.library.opcheck(torch.ops.detcompile.dense_attention.default, (q, k, v, 0.3, 0, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_may_be_written_for_several_sequences(dtype):
    assert_shared_tokens_are_those_of_each(paged_cpu, dtype, "cpu")
