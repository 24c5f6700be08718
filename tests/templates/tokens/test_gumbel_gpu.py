"""gumbel_argmax on the GPU: the token of the torch path, computed on the CPU, and of a row alone."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.runtime.sampling.philox import SQRT_HALF, gumbel_noise_of, noise_keys, portable_log
from detcompile.templates.tokens import gumbel
from detcompile.templates.tokens.gumbel import gumbel_argmax_cuda
from tests.bits import assert_bitwise_equal
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON

SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))
KEYS = st.tuples(SEEDS, SEEDS, st.integers(0, 2**32 - 1))


def torch_path(logprobs: Tensor, keys: Tensor) -> Tensor:
    return torch.argmax(logprobs.double() + gumbel_noise_of(keys, logprobs.shape[1]), dim=-1)


def draw(rows: int, vocab_size: int, seed: int, nearly_equal: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * (1e-6 if nearly_equal else 4)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    logits[torch.rand(rows, generator=generator) < 0.1, vocab_size // 2] = math.nan
    return logits.log_softmax(-1)


@triton.jit
def _log_kernel(x_ptr, out_ptr, N, W: tl.constexpr):
    i = tl.arange(0, W)
    x = tl.load(x_ptr + i, mask=i < N, other=1.0)
    tl.store(out_ptr + i, gumbel._portable_log(x), mask=i < N)


def test_the_logarithm_has_the_bits_of_the_torch_path():
    """Also where the series changes over: a bound rounded to fp32 would be seen."""
    u = torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 2.0**-33
    turn = SQRT_HALF * (1 + torch.arange(-40, 41, dtype=torch.float64) * 2.0**-30)
    edges = torch.tensor([2.0**-33, 1 - 2.0**-33, 0.5, 1.0, math.log(2) * 33], dtype=torch.float64)
    x = torch.cat([u, u * 2.0**-32, 1 - u * 2.0**-20, u * 23, turn, turn * 4, edges])
    out = torch.empty_like(x, device=DEVICE)
    _log_kernel[(1,)](x.to(DEVICE), out, len(x), W=16384, enable_fp_fusion=False)
    assert_bitwise_equal(out.cpu(), portable_log(x))


@given(
    keys=st.lists(KEYS, min_size=1, max_size=4),
    vocab_size=st.sampled_from([1, 2, 3, 5, 1023, 1024, 1025, 3000]),
    seed=st.integers(0, 2**32),
    nearly_equal=st.booleans(),
)
def test_the_token_is_that_of_the_torch_path(keys, vocab_size, seed, nearly_equal):
    words = noise_keys(*zip(*keys))
    logprobs = draw(len(keys), vocab_size, seed, nearly_equal)
    tokens = gumbel_argmax_cuda(logprobs.to(DEVICE), words.to(DEVICE))
    assert_bitwise_equal(tokens.cpu(), torch_path(logprobs, words))
    alone = [gumbel_argmax_cuda(logprobs[r : r + 1].to(DEVICE), words[r : r + 1].to(DEVICE)) for r in range(len(keys))]
    assert_bitwise_equal(torch.cat(alone), tokens)


@pytest.mark.parametrize("vocab_size", [8, 2048])
def test_every_score_has_the_bits_of_the_torch_path(vocab_size, monkeypatch):
    """One token a row is possible: its score comes back, bit for bit, as the best of its tile."""
    rows = 64 if INTERPRETED else 4096
    kept = torch.arange(rows) * 37 % vocab_size
    logprobs = torch.full((rows, vocab_size), -math.inf)
    logprobs[torch.arange(rows), kept] = -torch.rand(rows, generator=torch.Generator().manual_seed(0)) * 20
    words = noise_keys([r * 2**33 + r for r in range(rows)], [r * 2**30 for r in range(rows)], range(rows))
    scores = []
    empty = torch.empty

    def keep_scores(*shape, **options):
        tensor = empty(*shape, **options)
        if options["dtype"] == torch.float64:
            scores.append(tensor)
        return tensor

    monkeypatch.setattr(gumbel.torch, "empty", keep_scores)
    tokens = gumbel_argmax_cuda(logprobs.to(DEVICE), words.to(DEVICE))
    monkeypatch.undo()
    expected = logprobs.double() + gumbel_noise_of(words, vocab_size)
    assert_bitwise_equal(tokens.cpu(), kept)
    assert_bitwise_equal(scores[0].cpu().amax(1), expected.amax(1))


@pytest.mark.parametrize("vocab_size", [1, 700, 5000])
def test_equal_scores_go_to_the_lowest_id(vocab_size, monkeypatch):
    """Scores are equal where all are -inf; a NaN comes before every number."""
    logprobs = torch.full((2, vocab_size), -math.inf)
    logprobs[1, vocab_size // 2 :] = math.nan
    tokens = gumbel_argmax_cuda(logprobs.to(DEVICE), noise_keys([1, 2], [3, 4], [5, 6]).to(DEVICE))
    assert tokens.tolist() == [0, vocab_size // 2]


def test_rows_may_be_strided():
    logprobs, words = draw(6, 50, 0, True), noise_keys(range(3), range(3), range(3))
    tokens = gumbel_argmax_cuda(logprobs.to(DEVICE)[::2], words.to(DEVICE))
    assert_bitwise_equal(tokens.cpu(), torch_path(logprobs[::2], words))
    assert gumbel_argmax_cuda(logprobs[:0].to(DEVICE), words[:0].to(DEVICE)).shape == (0,)


@pytest.mark.parametrize("rows", [pytest.param(100, marks=NEEDS_GPU)])
def test_real_vocabularies(rows):
    logprobs, words = draw(rows, 151_936, 1, True), noise_keys(range(rows), range(rows), [7] * rows)
    tokens = gumbel_argmax_cuda(logprobs.cuda(), words.cuda())
    assert_bitwise_equal(tokens.cpu(), torch_path(logprobs, words))
