"""Philox's published vectors, a logarithm without a device or a neighbor in it, and noise that ignores the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.sampling.philox import gumbel_noise, gumbel_noise_of, noise_keys, philox4x32, portable_log
from tests.bits import assert_bitwise_equal

WORDS = st.integers(0, 2**32 - 1)
WORDS_64 = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text):
    return [int(word, 16) for word in text.split()]


def philox_of_integers(counter, key):
    """Philox4x32-10 in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [product1 >> 32 ^ c[1] ^ k[0], product1 % 2**32, product0 >> 32 ^ c[3] ^ k[1], product0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def run_philox(counter, key, device):
    def tensors(words):
        return [torch.tensor([word], device=device) for word in words]

    return [word.item() for word in philox4x32(tensors(counter), tensors(key))]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer, device):
    assert run_philox(words_of(counter), words_of(key), device) == words_of(answer)
    assert philox_of_integers(words_of(counter), words_of(key)) == words_of(answer)


@given(counter=st.tuples(WORDS, WORDS, WORDS, WORDS), key=st.tuples(WORDS, WORDS))
def test_philox_of_any_words(counter, key, device):
    assert run_philox(counter, key, device) == philox_of_integers(counter, key)


def test_portable_log_is_within_one_ulp(device):
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(20_000, dtype=torch.float64, generator=generator)
    x = torch.cat([u, 1 - u * 2.0**-20, u * 2.0**-32, u * 25, torch.tensor([1.0, 0.5, 2.0**-33, math.sqrt(0.5)])])
    expected = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    ulp = expected.abs().clamp_min(2.0**-1022) * 2.0**-52
    assert ((portable_log(x.to(device)).cpu() - expected).abs() <= ulp).all()


@given(length=st.integers(1, 70), offset=st.integers(0, 9))
def test_portable_log_ignores_its_place(length, offset, device):
    x = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(length)).to(device) + 1e-9
    alone = torch.cat([portable_log(x[i : i + 1]) for i in range(offset, offset + length)])
    assert_bitwise_equal(portable_log(x[offset : offset + length]), alone)


@given(
    rows=st.lists(st.tuples(WORDS_64, WORDS_64), min_size=1, max_size=12),
    vocab_size=st.integers(1, 150),
    stream=WORDS,
    data=st.data(),
)
def test_a_row_of_noise_ignores_its_neighbors(rows, vocab_size, stream, data, device):
    seeds, positions = zip(*rows)
    noise = gumbel_noise(seeds, positions, vocab_size, torch.device(device), stream)
    assert noise.shape == (len(rows), vocab_size)
    row = data.draw(st.integers(0, len(rows) - 1))
    alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], vocab_size, torch.device(device), stream)
    assert_bitwise_equal(noise[row : row + 1], alone)


@given(rows=st.lists(st.tuples(WORDS_64, WORDS_64, WORDS), min_size=1, max_size=6), vocab_size=st.integers(1, 20))
def test_each_row_may_have_its_own_stream(rows, vocab_size, device):
    noise = gumbel_noise_of(noise_keys(*zip(*rows)).to(device), vocab_size)
    alone = [gumbel_noise([seed], [position], vocab_size, torch.device(device), s) for seed, position, s in rows]
    assert_bitwise_equal(noise, torch.cat(alone))


@given(seed=WORDS_64, position=WORDS_64, vocab_size=st.integers(1, 150), stream=WORDS, data=st.data())
def test_noise_equals_definition(seed, position, vocab_size, stream, data, device):
    noise = gumbel_noise([seed], [position], vocab_size, torch.device(device), stream)
    token = data.draw(st.integers(0, vocab_size - 1))
    counter = (token // 4, position % 2**32, position >> 32, stream)
    word = philox_of_integers(counter, (seed % 2**32, seed >> 32))[token % 4]
    expected = -math.log(-math.log((word + 0.5) / 2**32))
    assert noise[0, token].item() == pytest.approx(expected, rel=1e-14, abs=1e-14)


@given(vocab_size=st.integers(1, 100))
def test_a_larger_vocabulary_only_appends(vocab_size, device):
    whole = gumbel_noise([7], [9], 100, torch.device(device))
    assert_bitwise_equal(gumbel_noise([7], [9], vocab_size, torch.device(device)), whole[:, :vocab_size])


def test_every_device_gives_the_bits_of_the_cpu(device):
    seeds, positions = [0, 1, 2**64 - 1], [0, 2**33, 5]
    expected = gumbel_noise(seeds, positions, 1000, torch.device("cpu"))
    assert_bitwise_equal(gumbel_noise(seeds, positions, 1000, torch.device(device)), expected)


def test_seed_position_and_stream_each_change_the_noise():
    noise = [
        gumbel_noise([seed], [position], 64, torch.device("cpu"), stream)
        for seed, position, stream in [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1)]
    ]
    assert len(set(torch.cat(noise).flatten().tolist())) == 6 * 64


def test_noise_has_the_gumbel_distribution():
    noise = gumbel_noise(range(100), [5] * 100, 1000, torch.device("cpu")).flatten()
    empirical = noise.sort().values
    distance = (torch.exp(-torch.exp(-empirical)) - torch.linspace(0, 1, len(empirical))).abs().max()
    assert distance < 1.95 / math.sqrt(len(noise))  # Kolmogorov-Smirnov, p = 0.001
    assert noise.min() > -3.2 and noise.max() < 22.9
