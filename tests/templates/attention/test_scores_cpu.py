"""Soft cap, sinks, ALiBi, any scale and any head dim on the CPU: one set of bits, float64's value, torch's accuracy."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput
from tests.bits import assert_bitwise_equal
from tests.templates.attention.cases import FEATURES, dense_cpu, exact_attention, features, paged_cpu
from tests.templates.cases import DTYPES, ISAS, KINDS, PagedCache, assert_as_accurate, normal, sample

EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129]
HEAD_DIMS = [(64, 64), (80, 80), (96, 96), (128, 64), (192, 128), (192, 192), (256, 256)]


def _qkv(T: int, heads: int, kv_heads: int, d: int, dv: int, dtype: torch.dtype, kind: str = "normal") -> list[Tensor]:
    """q [1, heads, T, d], k [1, kv_heads, T, d], v [1, kv_heads, T, dv]"""
    q, v = sample(kind, (1, heads, T, d), dtype), sample(kind, (1, kv_heads, T, dv), dtype, 2)
    return [q, normal((1, kv_heads, T, d), dtype, 1), v]


def _arguments(name: str, heads: int, scale: float, window: int, chunk: int) -> tuple[Any, ...]:
    """scale, sliding_window, kv_chunk, softcap, sinks, alibi_slopes"""
    requests = features(name, heads)
    rest = (requests.get("softcap", 0.0), requests.get("sinks"), requests.get("alibi_slopes"))
    return (requests.get("scale", scale), window, chunk, *rest)


def _paged(qkv: list[Tensor], cuts: list[int], block_size: int, arguments: tuple[Any, ...], seed: int = 0) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in qkv)
    T, heads, d = k.shape
    cache = PagedCache.poisoned(T, block_size, heads, d, v.shape[2], q.dtype, seed)
    return cache.attend(paged_cpu, q, k, v, cuts, *arguments).transpose(0, 1)[None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
@given(
    edges=st.sets(st.sampled_from(EDGES), max_size=6),
    block_size=st.sampled_from([16, 48, 128]),
    window=st.sampled_from([0, 17, 65]),
    kv_chunk=st.sampled_from([64, 128]),
    seed=st.integers(0, 3),
)
def test_any_chunking_of_a_prompt_into_any_pages_gives_the_dense_bits(
    dtype, name, edges, block_size, window, kv_chunk, seed
):
    qkv = _qkv(145, 6, 2, 20, 24, dtype)
    arguments = _arguments(name, 6, 0.3, window, kv_chunk)
    cuts = [end - begin for begin, end in itertools.pairwise(sorted({0, 145, *edges}))]
    assert_bitwise_equal(_paged(qkv, cuts, block_size, arguments, seed), dense_cpu(*qkv, *arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_decoding_one_token_at_a_time_gives_the_bits_of_prefill(dtype, name):
    qkv = _qkv(140, 4, 2, 24, 24, dtype, "heavy")
    arguments = _arguments(name, 4, 0.2, 0, 128)
    whole = dense_cpu(*qkv, *arguments)
    assert_bitwise_equal(_paged(qkv, [1] * 140, 16, arguments), whole)
    assert not torch.equal(whole, dense_cpu(*qkv, 0.2, 0, 128)), "the feature does nothing"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FEATURES)
def test_instruction_sets_do_not_matter(name, isa):
    qkv = _qkv(200, 6, 2, 80, 40, torch.float32, "heavy")
    arguments = _arguments(name, 6, 0.1, 0, 128)
    assert_bitwise_equal(dense_cpu(*qkv, *arguments, isa=isa), dense_cpu(*qkv, *arguments), isa)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
@given(future=st.integers(0, 66))
def test_a_later_token_does_not_matter_even_as_nan(dtype, name, future):
    qkv = _qkv(67, 4, 2, 16, 16, dtype)
    arguments = _arguments(name, 4, 0.25, 0, 64)
    expected = dense_cpu(*qkv, *arguments)
    for tensor in qkv:
        tensor[:, :, future:] = torch.nan
    assert_bitwise_equal(dense_cpu(*qkv, *arguments)[:, :, :future], expected[:, :, :future])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("name", FEATURES)
def test_as_accurate_as_torch(dtype, kind, window, name):
    qkv = _qkv(300, 4, 2, 64, 48, dtype, kind)
    scale, _, _, *rest = arguments = _arguments(name, 4, 0.125, window, 512)
    reference = exact_attention(*qkv, scale, window, *rest)
    assert_as_accurate(dense_cpu(*qkv, *arguments), _eager(*qkv, scale, window, *rest), reference, name)


def _eager(q, k, v, scale, window, softcap, sinks, slopes):
    """As transformers' eager functions do it: softmax in float32, weights rounded to the dtype of q."""
    groups, T = q.shape[1] // k.shape[1], q.shape[2]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = (q @ k.repeat_interleave(groups, 1).transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if slopes is None else scores - slopes[:, None, None] * distance
    scores = scores.masked_fill((distance < 0) | ((distance >= window) if window else False), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(1, -1, T, 1)], -1)
    return torch.softmax(scores, -1)[..., :T].to(v.dtype) @ v.repeat_interleave(groups, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(dtype, dims):
    qkv = _qkv(200, 4, 2, *dims, dtype)
    arguments = (dims[0] ** -0.5, 0, 128, 0.0, None, None)
    whole = dense_cpu(*qkv, *arguments)
    reference = exact_attention(*qkv, arguments[0])
    assert_as_accurate(whole, _eager(*qkv, arguments[0], 0, 0.0, None, None), reference, str(dims))
    assert_bitwise_equal(_paged(qkv, [129, 70, 1], 32, arguments), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_absent_features_leave_the_bits_alone(dtype):
    """No sink is a sink of -inf; sinks may have any floating dtype."""
    qkv = _qkv(145, 4, 2, 24, 24, dtype)
    plain = dense_cpu(*qkv, 0.2, 0, 64)
    assert_bitwise_equal(dense_cpu(*qkv, 0.2, 0, 64, 0.0, torch.full((4,), -math.inf)), plain)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    assert_bitwise_equal(dense_cpu(*qkv, 0.2, 0, 64, 0.0, sinks.bfloat16()), dense_cpu(*qkv, 0.2, 0, 64, 0.0, sinks))


@pytest.mark.parametrize("sink", [60.0, 88.0, 200.0, 1e30])
def test_a_sink_may_dwarf_every_key(sink):
    q, k, v = _qkv(70, 2, 2, 16, 16, torch.float32)
    ours = dense_cpu(q, k, v, 0.2, 0, 64, 0.0, torch.full((2,), sink))
    exact = exact_attention(q, k, v, 0.2, 0, 0.0, torch.full((2,), sink))
    assert (ours - exact).abs().max() <= 2e-5 * exact.abs().max() + 1e-37


def test_alibi_is_accurate_far_from_the_start():
    """Slopes times distances, not times absolute positions, whose products would round."""
    T = 3000
    qkv = _qkv(T, 1, 1, 16, 16, torch.float32)
    slopes = torch.tensor([0.37])
    ours = dense_cpu(*qkv, 0.25, 0, 512, 0.0, None, slopes)[:, :, -100:]
    exact = exact_attention(*qkv, 0.25, 0, 0.0, None, slopes)[:, :, -100:]
    assert (ours - exact).norm() < 5e-7 * exact.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((0.2, 0, 64, -1.0), "softcap=-1.0"),
        ((math.nan, 0, 64), "scale=nan"),
        ((0.2, 0, 64, 0.0, torch.zeros(2)), r"sinks .* must be .* \[Hq\] with Hq = 4"),
        ((0.2, 0, 64, 0.0, None, torch.zeros(4, 1)), r"alibi_slopes .* must be .* \[Hq\] with Hq = 4"),
    ],
)
def test_what_has_no_meaning_is_refused(changes, message):
    qkv = _qkv(5, 4, 2, 8, 8, torch.float32)
    with pytest.raises(InvalidInput, match=message):
        torch.ops.detcompile.dense_attention(*qkv, *changes)


def test_the_ops_and_their_fakes_agree():
    q, k, v = _qkv(3, 4, 2, 8, 6, torch.float32)
    arguments = _arguments("all", 4, 0.3, 0, 64)
    torch.library.opcheck(torch.ops.detcompile.dense_attention.default, (q, k, v, *arguments))
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    cache = PagedCache.poisoned(3, 16, 2, 8, 6, torch.float32)
    step = (cache.k_cache.zero_(), cache.v_cache.zero_(), *cache.step(3))
    torch.library.opcheck(torch.ops.detcompile.paged_attention.default, (*tokens, *step, *arguments))
