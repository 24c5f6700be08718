"""Rejection sampling over guesses for one token: what comes out has the target's distribution, whatever was guessed.

The guesses are tried in turn: guess x, drawn from q, is taken with probability min(1, p(x) / q(x)); otherwise p becomes
the residual max(p - q, 0), normalised, and the next guess is tried; after the last, a token is drawn from what is left.
Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, for one guess; Miao
et al., "SpecInfer", ASPLOS 2024, section 4.3, for several.

Every node of a tree is decided by itself, from random numbers of its position: if its token is a guess, that guess'
node is next. The numbers are none of those that a drafter drew with, so a guess may be any function of the draft's
noise. A guess whose q is not known is taken for certain (q = 1): right for every way to guess, since p(x) and the rest
of p, renormalised, make up p; it only takes less.

Outside the bit contract: which token comes out depends on what was guessed, and sums over the vocabulary take torch's
order.

Legend: Q rows, C guesses of a row at most, V vocabulary size, D known distributions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.runtime.sampling.philox import uniform_of
from detcompile.templates.tokens.gumbel import gumbel_argmax

__all__ = ["ACCEPTANCE_STREAM", "CERTAIN", "NO_GUESS", "Proposals", "RESIDUAL_STREAM", "resolve"]

# Added to the sample's index: streams of random numbers that no drafter and no plain draw uses.
ACCEPTANCE_STREAM = 1 << 31
RESIDUAL_STREAM = 1 << 30
NO_GUESS = -1  # where a row has fewer guesses
CERTAIN = -1  # a guess whose distribution is not known


class Proposals(NamedTuple):
    """The guesses for what follows a token, in the order in which they are tried."""

    tokens: tuple[int, ...]
    distributions: tuple[Tensor | None, ...]  # [V] each


def resolve(
    probabilities: Tensor, guesses: Tensor, sources: Tensor, distributions: Tensor | None, keys: tuple[Tensor, Tensor]
) -> Tensor:
    """The token of each row.

    Args:
        probabilities: [Q, V] of the target, after temperature and filters.
        guesses: [Q, C] int64, NO_GUESS behind the last of a row; no token twice in a row.
        sources: [Q, C] int64, which of ``distributions`` a guess was drawn from given the earlier ones, or CERTAIN.
        distributions: [D, V], each summing to 1; None for no known one.
        keys: noise keys [Q, 5] of the acceptances and of the draws from residuals (``philox.noise_keys``).

    Returns:
        [Q] int64.
    """
    left = probabilities.double()
    uniforms = uniform_of(keys[0], guesses.shape[1])
    tokens = torch.full_like(guesses[:, 0], NO_GUESS)
    for column in range(guesses.shape[1]):
        guess, source = guesses[:, column : column + 1], sources[:, column]
        trying = (guess[:, 0] != NO_GUESS) & (tokens == NO_GUESS)
        place = guess.clamp_min(0)
        proposed = torch.zeros_like(left).scatter_(1, place, 1.0)
        if distributions is not None:
            drawn = distributions.index_select(0, source.clamp_min(0)).double()
            proposed = torch.where((source == CERTAIN)[:, None], proposed, drawn)
        accepted = uniforms[:, column] * proposed.gather(1, place)[:, 0] < left.gather(1, place)[:, 0]
        tokens = torch.where(trying & accepted, guess[:, 0], tokens)
        rest = (left - proposed).clamp_min(0.0)
        mass = rest.sum(1, keepdim=True)
        # No mass is left only where p and q agree to the last bit: then the guess was taken, but for rounding.
        left = torch.where((trying & ~accepted)[:, None] & (mass > 0), rest / mass, left)
    return torch.where(tokens == NO_GUESS, _draw(left, keys[1]), tokens)


def _draw(probabilities: Tensor, keys: Tensor) -> Tensor:
    return gumbel_argmax(torch.log(probabilities).float(), keys)  # in float32 as every row's logprobs
