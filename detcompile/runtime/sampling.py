"""From logits to tokens: Gumbel-max under a counter RNG, one row blind to the others.

A row's token is a function of its logits, its SamplingParams and its position. Nothing here sums floating-point
numbers across a row but the detcompile softmax operations, whose order is fixed; the cumulative sum of top-p runs over
fixed-point integers, where every order gives the same sum.

Legend: R rows, V vocabulary size, N alternatives.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import detcompile.templates.softmax  # noqa: F401  registers torch.ops.detcompile.softmax and log_softmax
from detcompile.errors import InvalidInput
from detcompile.runtime.philox import gumbel_noise

__all__ = ["SAMPLING_STREAM", "SamplingParams", "TokenLogprobs", "sample", "token_logprobs"]

SAMPLING_STREAM = 0  # stream of the counter RNG that draws the tokens themselves
MIN_TEMPERATURE = 1e-5  # below it, logits / temperature may leave fp32's range
PROBABILITY_UNIT = 2.0**56  # fixed-point probabilities: a row's sum stays far below 2^63
ELEMENTS_AT_ONCE = 1 << 24  # bounds the memory of a large batch; rows are independent, so it cannot change a bit


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw the tokens of one request.

    Filters act in this order: temperature, top_k, top_p on what is left, min_p. Ties go to the lowest token id.

    Args:
        max_tokens: generated tokens at most.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probabilities reach top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        seed: 0 <= seed < 2^64; None draws a fresh one for each request. Requests that share a seed share their noise.
        stop_token_ids: tokens that end the request; they are part of its output.

    Raises:
        InvalidInput: a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(self.max_tokens >= 1, f"max_tokens {self.max_tokens} must be at least 1")
        _require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
            f"temperature {self.temperature} must be 0 (greedy), or finite and at least {MIN_TEMPERATURE}",
        )
        _require(self.top_k >= 0, f"top_k {self.top_k} must be positive, or 0 to keep all tokens")
        _require(0 < self.top_p <= 1, f"top_p {self.top_p} must be above 0 and at most 1 (1 keeps all tokens)")
        _require(0 <= self.min_p <= 1, f"min_p {self.min_p} must be between 0 (keeps all tokens) and 1")
        _require(self.seed is None or 0 <= self.seed < 1 << 64, f"seed {self.seed} must be None or in [0, 2^64)")
        _require(all(t >= 0 for t in self.stop_token_ids), f"stop_token_ids {self.stop_token_ids} must be token ids")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some token may be left out before drawing."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def seeded(self) -> "SamplingParams":
        """These parameters with a seed: their own, or a fresh one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the model itself, before temperature and filters."""

    chosen: Tensor  # [R] fp32, of the tokens drawn
    top_ids: Tensor  # [R, N] int64, the likeliest tokens, likeliest first
    top: Tensor  # [R, N] fp32, theirs


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], radices: Sequence[int] = ()
) -> Tensor:
    """Draw a token a row.

    Args:
        logits: [R, V] floating point.
        params: R of them; those that are not greedy must have a seed (``SamplingParams.seeded``).
        positions: R of them; the index in its sequence of the token that a row draws.
        radices: leaves of the sums over the vocabulary, as the softmax operations take them.

    Returns:
        [R] int64 on the device of ``logits``.

    Raises:
        InvalidInput: not one of each a row, or a seed is missing.
    """
    _require(logits.dim() == 2 and logits.shape[1] > 0, f"logits must be [R, V], not {list(logits.shape)}")
    if not len(params) == len(positions) == logits.shape[0]:
        raise InvalidInput(
            f"{logits.shape[0]} rows of logits, {len(params)} params and {len(positions)} positions: give one of each"
        )
    tokens = torch.argmax(logits, dim=-1)  # the lowest id among equals
    drawn = [row for row, p in enumerate(params) if not p.greedy]
    rows_at_once = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
    for start in range(0, len(drawn), rows_at_once):
        rows = drawn[start : start + rows_at_once]
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw(logits[index], [params[r] for r in rows], [positions[r] for r in rows], radices)
    return tokens


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int = 0, radices: Sequence[int] = ()) -> TokenLogprobs:
    """Logprobs of ``tokens`` [R] int64 and of the ``num_top`` likeliest tokens, from ``logits`` [R, V]."""
    logprobs = torch.ops.detcompile.log_softmax(logits, torch.float32, list(radices))
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    num_top = min(num_top, logits.shape[1])
    if num_top == 0:
        empty = logprobs[:, :0]
        return TokenLogprobs(chosen, empty.long(), empty)
    top, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    return TokenLogprobs(chosen, ids[:, :num_top].contiguous(), top[:, :num_top].contiguous())


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], radices: Sequence[int]) -> Tensor:
    """Gumbel-max: argmax of logprob + noise has the distribution of the softmax."""
    seeds = [p.seed for p in params if p.seed is not None]
    _require(len(seeds) == len(params), "a request that samples needs a seed: call SamplingParams.seeded() first")
    # A tensor, not a number: CUDA turns a division by a number into a product with its reciprocal.
    scaled = logits.float() / _column([p.temperature for p in params], torch.float32, logits.device)
    filtered = [row for row, p in enumerate(params) if p.filtered]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        scaled[index] = _filter(scaled[index], [params[r] for r in filtered], radices)
    logprobs = torch.ops.detcompile.log_softmax(scaled, torch.float32, list(radices))
    noise = gumbel_noise(seeds, positions, logits.shape[1], logits.device, SAMPLING_STREAM)
    return torch.argmax(logprobs.double() + noise, dim=-1)


def _filter(scaled: Tensor, params: Sequence[SamplingParams], radices: Sequence[int]) -> Tensor:
    """``scaled`` [R, V] with -inf at the tokens that top_k, top_p and min_p leave out."""
    device, vocab_size = scaled.device, scaled.shape[1]
    # -0.0 becomes +0.0: CUDA picks its sorting algorithm by batch size, and a radix sort may tell the two apart.
    descending, ids = torch.sort(scaled + 0.0, dim=-1, descending=True, stable=True)
    top_k = _column([p.top_k or vocab_size for p in params], torch.int64, device)
    keep = torch.arange(vocab_size, device=device) < top_k
    descending = descending.masked_fill(~keep, -math.inf)

    # Back in the order of the vocabulary, so that the leaves of its sum are the shards'.
    top_k_logits = torch.empty_like(scaled).scatter_(1, ids, descending)
    probabilities = torch.ops.detcompile.softmax(top_k_logits, torch.float32, list(radices)).double().gather(1, ids)

    mass = (probabilities * PROBABILITY_UNIT).long()
    mass_before = mass.cumsum(dim=-1) - mass
    limit = [max(1, int(p.top_p * PROBABILITY_UNIT)) if p.top_p < 1 else torch.iinfo(torch.int64).max for p in params]
    keep &= mass_before < _column(limit, torch.int64, device)

    min_p = _column([p.min_p for p in params], torch.float64, device)
    keep &= probabilities >= probabilities[:, :1] * min_p
    return torch.empty_like(scaled).scatter_(1, ids, descending.masked_fill(~keep, -math.inf))


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[R, 1], a value a row."""
    return torch.tensor(values, dtype=dtype).unsqueeze(1).to(device)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)
