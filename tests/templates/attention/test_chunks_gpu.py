"""Chunks of attention in the kernels of the GPU: one set of bytes, a window's bits, the right value."""

import math

import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.templates.attention.schedules import AttentionProblem, attention_candidates
from tests.bits import assert_bitwise_equal
from tests.templates.attention.cases import CHUNK, PLAIN, SCHEDULES, Sequence, dense, exact_attention, paged, sequence
from tests.templates.triton_interpreter import (
    DOT_DTYPES,
    INTERPRETED,
    NEEDS_TRITON,
    QUICK_DOT_DTYPES,
    exhaustive_interpreted,
)

pytestmark = NEEDS_TRITON

SHAPE = (3, 1, 16, 24) if INTERPRETED else (6, 2, 16, 24)
LENGTHS = [CHUNK // 2 + 5] if INTERPRETED else [17, 64, CHUNK // 2 + 5, CHUNK + 17]


@exhaustive_interpreted
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", QUICK_DOT_DTYPES)
def test_every_way_to_compute_a_token_gives_its_bytes(dtype: torch.dtype, length: int) -> None:
    """Decode, prefill, pages, neighbors and schedules, with what lies before a chunk poisoned by NaN."""
    n, given = CHUNK + 24, {"attention_chunk": length}
    a, b = sequence(n, *SHAPE, dtype), sequence(CHUNK // 2, *SHAPE, dtype, seed=1)
    whole = dense(a, **given)
    assert whole.isfinite().all() and not torch.equal(whole, dense(a, length)), "chunks are no windows"
    for schedule in SCHEDULES if not INTERPRETED else SCHEDULES[1:]:
        for cut in (length, CHUNK + 1):
            first, _ = paged([(a, 0, cut), (b, 3, 5)], 48, 0, schedule, padding=3, **given)
            assert_bitwise_equal(first, whole[:cut], f"{schedule} prefill to {cut}")
            start = cut // length * length
            hidden = Sequence(a.q, a.k.clone(), a.v.clone())
            hidden.k[:start], hidden.v[:start] = math.nan, math.inf
            _, second, last = paged([(b, 9, 10), (hidden, cut, n - 1), (hidden, n - 1, n)], 16, 0, schedule, **given)
            assert_bitwise_equal(second, whole[cut : n - 1], f"{schedule} prefill from {cut}")
            assert_bitwise_equal(last, whole[n - 1 :], f"{schedule} decode")


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_a_query_has_the_bits_of_a_window_as_long_as_its_chunk_is_by_then(dtype: torch.dtype) -> None:
    length, s = CHUNK // 2 + 5, sequence(CHUNK + 24, *SHAPE, dtype)
    chunked = dense(s, attention_chunk=length)
    for position in (0, length - 1, length, length + 20, CHUNK, CHUNK + 23):
        window = position % length + 1
        alone = paged([(s, position, position + 1)], 16, window, PLAIN)[0]
        assert_bitwise_equal(chunked[position : position + 1], alone, f"position {position}")


@pytest.mark.parametrize("length", LENGTHS)
def test_the_value_is_the_references(length: int) -> None:
    s = sequence(CHUNK + 67, *SHAPE, torch.float32)
    q, k, v = (t[None].transpose(1, 2) for t in (s.q, s.k, s.v))
    expected = exact_attention(q, k, v, SHAPE[2] ** -0.5, attention_chunk=length)[0].transpose(0, 1)
    assert (dense(s, attention_chunk=length) - expected).norm() < 6e-7 * expected.norm()


def test_kernels_that_know_no_chunks_are_no_candidates() -> None:
    fields = {"dtype": "bfloat16", "heads": 8, "kv_heads": 2, "d": 128, "dv": 128, "block_size": 64, "chunk": 512}
    kinds = {"windowed": True, "decode": True, "split": True, "descriptors": True}
    known = attention_candidates(AttentionProblem(**fields, **kinds))
    chunked = attention_candidates(AttentionProblem(**fields, **kinds, chunked=True))
    assert {schedule.kernel for schedule in known} == {"plain", "hopper", "hopper_decode"}
    assert {schedule.kernel for schedule in chunked} == {"plain"}


def test_a_window_and_a_chunk_together_are_refused() -> None:
    with pytest.raises(InvalidInput, match="sliding_window=5, attention_chunk=7"):
        dense(sequence(3, *SHAPE, torch.float32), 5, attention_chunk=7)
