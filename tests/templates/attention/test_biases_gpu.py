"""Biases by distance in the kernels of the GPU: one set of bytes, the right value."""

import math

import pytest
import torch
from torch import Tensor

from detcompile.templates.attention.schedules import AttentionProblem, attention_candidates
from tests.bits import assert_bitwise_equal
from tests.templates.attention.cases import CHUNK, PLAIN, SCHEDULES, dense, dense_gpu, exact_attention, paged, sequence
from tests.templates.triton_interpreter import (
    DEVICE,
    DOT_DTYPES,
    INTERPRETED,
    NEEDS_TRITON,
    QUICK_DOT_DTYPES,
    exhaustive_interpreted,
)

pytestmark = NEEDS_TRITON

SHAPE = (3, 1, 16, 24) if INTERPRETED else (6, 2, 16, 24)
EXTENT = CHUNK // 2 + 5


def biases(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[n, query heads, EXTENT]"""
    drawn = torch.randn(n, SHAPE[0], EXTENT, generator=torch.Generator().manual_seed(seed))
    return (2 * drawn).to(dtype).to(DEVICE)


def of_heads(bias: Tensor) -> Tensor:
    """As the dense op takes them: [1, query heads, n, EXTENT]"""
    return bias[None].transpose(1, 2)


@exhaustive_interpreted
@pytest.mark.parametrize("dtype", QUICK_DOT_DTYPES)
def test_every_way_to_compute_a_token_gives_its_bytes(dtype: torch.dtype) -> None:
    """Decode, prefill, pages, neighbors and schedules; biases of the padding are NaN."""
    n = CHUNK + 24
    a, b = sequence(n, *SHAPE, dtype), sequence(CHUNK // 2, *SHAPE, dtype, seed=1)
    one, other = biases(n, dtype), biases(CHUNK // 2, dtype, 1)
    nan = torch.full_like(one[:3], math.nan)
    for window in (0,) if INTERPRETED else (0, EXTENT):
        whole = dense(a, window, relative_bias=of_heads(one))
        assert whole.isfinite().all() and not torch.equal(whole, dense(a, window)), "the biases do nothing"
        for schedule in SCHEDULES if not INTERPRETED else SCHEDULES[1:]:
            cut = CHUNK - 1
            packed = torch.cat([one[:cut], other[3:5], nan])
            first, _ = paged([(a, 0, cut), (b, 3, 5)], 48, window, schedule, padding=3, relative_bias=packed)
            assert_bitwise_equal(first, whole[:cut], f"{schedule} prefill to {cut}")
            packed = torch.cat([other[9:10], one[cut : n - 1], one[n - 1 :]])
            parts = [(b, 9, 10), (a, cut, n - 1), (a, n - 1, n)]
            _, second, last = paged(parts, 16, window, schedule, relative_bias=packed)
            assert_bitwise_equal(second, whole[cut : n - 1], f"{schedule} prefill from {cut}")
            assert_bitwise_equal(last, whole[n - 1 :], f"{schedule} decode")


@pytest.mark.parametrize("features", [{}, {"softcap": 1.5}, {"attention_chunk": 48}], ids=str)
def test_the_value_is_the_references(features: dict) -> None:
    s, bias = sequence(CHUNK + 67, *SHAPE, torch.float32), of_heads(biases(CHUNK + 67, torch.float32))
    q, k, v = (t[None].transpose(1, 2) for t in (s.q, s.k, s.v))
    expected = exact_attention(q, k, v, SHAPE[2] ** -0.5, **features, relative_bias=bias)[0].transpose(0, 1)
    assert (dense(s, **features, relative_bias=bias) - expected).norm() < 6e-7 * expected.norm()


def test_a_batch_has_the_bytes_of_its_sequences() -> None:
    """Each row of the dense op finds the biases of its own sequence."""
    n, dtype = 70, DOT_DTYPES[0]
    rows = [sequence(n, *SHAPE, dtype, seed=seed) for seed in (0, 1)]
    given = [of_heads(biases(n, dtype, seed)) for seed in (0, 1)]
    alone = [dense(s, relative_bias=bias) for s, bias in zip(rows, given, strict=True)]
    q, k, v = (torch.stack([getattr(s, name) for s in rows]).transpose(1, 2) for name in ("q", "k", "v"))
    order = (SHAPE[2] ** -0.5, 0, CHUNK)
    together = dense_gpu(q, k, v, *order, relative_bias=torch.cat(given), schedule=PLAIN)
    assert_bitwise_equal(together.transpose(1, 2), torch.stack(alone))


def test_kernels_that_know_no_biases_are_no_candidates() -> None:
    fields = {"dtype": "bfloat16", "heads": 8, "kv_heads": 2, "d": 128, "dv": 128, "block_size": 64, "chunk": 512}
    kinds = {
        "windowed": False,
        "decode": True,
        "split": True,
        "descriptors": True,
        "needs_scores": True,
        "relative": True,
    }
    actual = attention_candidates(AttentionProblem(**fields, **kinds))
    assert actual and {schedule.kernel for schedule in actual} == {"plain"}
