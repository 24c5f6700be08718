"""gumbel_argmax on the CPU: the score and the token of the torch path, on every instruction set."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.runtime.sampling.philox import gumbel_noise_of, noise_keys
from detcompile.templates.tokens.gumbel import best_scores_cpu, gumbel_argmax
from tests.bits import assert_bitwise_equal
from tests.templates.cases import ISAS

SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))
KEYS = st.tuples(SEEDS, SEEDS, st.integers(0, 2**32 - 1))


def draw(rows: int, vocab_size: int, seed: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * spread
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    logits[torch.rand(rows, generator=generator) < 0.1, vocab_size // 2] = math.nan
    return logits.log_softmax(-1)


@given(
    keys=st.lists(KEYS, min_size=1, max_size=4),
    vocab_size=st.sampled_from([1, 2, 3, 5, 255, 256, 257, 4096, 4097, 9000]),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([1e-6, 4.0]),
)
def test_scores_and_tokens_are_those_of_the_torch_path(keys, vocab_size, seed, spread):
    words = noise_keys(*zip(*keys))
    logprobs = draw(len(keys), vocab_size, seed, spread)
    scores = logprobs.double() + gumbel_noise_of(words, vocab_size)
    for isa in ISAS:
        actual, tokens = best_scores_cpu(logprobs, words, isa)
        assert_bitwise_equal(tokens, torch.argmax(scores, dim=-1), isa)
        numbers = ~actual.isnan()
        assert_bitwise_equal(actual[numbers], scores.amax(1)[numbers], isa)
    assert_bitwise_equal(gumbel_argmax(logprobs, words), tokens)


@pytest.mark.parametrize("isa", ISAS)
def test_every_score_has_the_bits_of_the_torch_path(isa):
    """One token a row is possible, each of a block in its turn: its score is the best."""
    rows, vocab_size = 4096, 300
    kept = torch.arange(rows) * 37 % vocab_size
    logprobs = torch.full((rows, vocab_size), -math.inf)
    logprobs[torch.arange(rows), kept] = -torch.rand(rows, generator=torch.Generator().manual_seed(0)) * 20
    words = noise_keys([r * 2**33 + r for r in range(rows)], [r * 2**30 for r in range(rows)], range(rows))
    scores, tokens = best_scores_cpu(logprobs, words, isa)
    assert_bitwise_equal(tokens, kept)
    assert_bitwise_equal(scores, (logprobs.double() + gumbel_noise_of(words, vocab_size)).amax(1))


@pytest.mark.parametrize("vocab_size", [1, 700, 9000])
def test_equal_scores_go_to_the_lowest_id(vocab_size):
    """Scores are equal where all are -inf; a NaN comes before every number, the first of them first."""
    logprobs = torch.full((3, vocab_size), -math.inf)
    logprobs[1, vocab_size // 2 :] = math.nan
    logprobs[2, 0] = math.inf
    logprobs[2, vocab_size // 3] = math.nan
    tokens = gumbel_argmax(logprobs, noise_keys([1, 2, 3], [3, 4, 5], [5, 6, 7]))
    assert tokens.tolist() == [0, vocab_size // 2, vocab_size // 3]


def test_rows_may_be_strided_and_none():
    logprobs, words = draw(6, 50, 0, 1e-6), noise_keys(range(3), range(3), range(3))
    expected = torch.argmax(logprobs[::2].double() + gumbel_noise_of(words, 50), dim=-1)
    assert_bitwise_equal(gumbel_argmax(logprobs[::2], words), expected)
    assert gumbel_argmax(logprobs[:0], words[:0]).shape == (0,)


def test_threads_change_no_bit():
    logprobs, words = draw(5, 9000, 1, 1e-6), noise_keys(range(5), range(5), range(5))
    threads = torch.get_num_threads()
    actual = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        actual.append(best_scores_cpu(logprobs, words))
    torch.set_num_threads(threads)
    for scores, tokens in actual[1:]:
        assert_bitwise_equal(tokens, actual[0][1])
        assert_bitwise_equal(scores, actual[0][0])
