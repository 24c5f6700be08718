"""Random numbers that depend only on (seed, position, stream, token id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is stateless: request, position
and token id form its key and counter. A row of noise therefore cannot depend on its batch, and a vocabulary shard can
draw its own columns. The logarithm is built from single IEEE float64 operations, each its own kernel: torch's ``log``
may use a vector routine in the body of a tensor and a scalar one in its tail, with different bits, and CUDA has a third
routine. The single operations round the same everywhere, so CPU and CUDA give the same bits.

This module defines the noise. Tokens are drawn by templates.tokens.gumbel, whose kernels are tested against it byte for
byte.

Legend: R rows, V vocabulary size, G = ceil(V / 4) counters per row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_ROUNDS = 10
WORD_MASK = 0xFFFFFFFF
# Multipliers minus 2^32, so that a product with a 32-bit word fits in int64: a * M = a * (M - 2^32) + (a << 32).
MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

SQRT_HALF = 0.7071067811865476
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
# Remez polynomial of FreeBSD's e_log.c (fdlibm), powers of s^2 ascending; error below 1 ulp.
LOG_POLYNOMIAL = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device, stream: int = 0
) -> Tensor:
    """Return standard Gumbel noise [R, V] float64; element (r, v) depends on seeds[r], positions[r], stream and v.

    Args:
        seeds: R of them, 0 <= seed < 2^64.
        positions: R of them, 0 <= position < 2^64.
        stream: 0 <= stream < 2^32, separates several uses of one (seed, position).
    """
    keys = noise_keys(seeds, positions, [stream] * len(seeds))
    return gumbel_noise_of(keys.to(device), vocab_size)


def noise_keys(seeds: Sequence[int], positions: Sequence[int], streams: Sequence[int]) -> Tensor:
    """Return [R, 5] int64 on the CPU, 32-bit words: seed (low, high), position (low, high), stream."""
    words = [
        (seed & WORD_MASK, seed >> 32, position & WORD_MASK, position >> 32, stream)
        for seed, position, stream in zip(seeds, positions, streams, strict=True)
    ]
    return torch.tensor(words, dtype=torch.int64, device="cpu").reshape(-1, 5)


def gumbel_noise_of(keys: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise [R, V] float64 of ``noise_keys`` [R, 5], on their device.

    The underlying uniform is (word + 1/2) / 2^32, strictly inside (0, 1), so the noise lies in (-3.2, 22.9).
    """
    return -portable_log(-portable_log(uniform_of(keys, vocab_size)))


def uniform_of(keys: Tensor, count: int) -> Tensor:
    """Return uniform numbers [R, count] float64, strictly inside (0, 1), of ``noise_keys`` [R, 5], on their device."""
    return (_words(keys, count).to(torch.float64) + 0.5) * 2.0**-32


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ten rounds of Philox4x32: four counter words, two key words, int64 in [0, 2^32), broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD_MASK, (k1 + KEY_STEPS[1]) & WORD_MASK
    return c0, c1, c2, c3


def portable_log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive, normal float64 numbers, within 1 ulp, with the same bits everywhere.

    x = 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); then the series in s = f / (2 + f).
    """
    assert x.dtype == torch.float64
    mantissa, exponent = torch.frexp(x)
    small = mantissa < SQRT_HALF
    f = torch.where(small, mantissa * 2.0, mantissa) - 1.0
    e = (exponent - small.to(exponent.dtype)).to(torch.float64)
    s = f / (f + 2.0)
    z = s * s
    series = z * LOG_POLYNOMIAL[-1]
    for coefficient in reversed(LOG_POLYNOMIAL[:-1]):
        series = z * (series + coefficient)
    half_square = f * f * 0.5
    return e * LN2_HIGH - ((half_square - (s * (half_square + series) + e * LN2_LOW)) - f)


def _words(keys: Tensor, vocab_size: int) -> Tensor:
    """Return [R, V] int64 in [0, 2^32): token v takes word v % 4 of counter (v // 4, position, stream)."""
    key0, key1, position_low, position_high, stream = keys.unsqueeze(-1).unbind(1)
    group = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=keys.device).unsqueeze(0)
    words = torch.stack(philox4x32((group, position_low, position_high, stream), (key0, key1)), dim=-1)
    return words.flatten(1)[:, :vocab_size]


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of word * (multiplier + 2^32) without leaving int64."""
    product = word * multiplier
    return (product >> 32) + word, product & WORD_MASK
