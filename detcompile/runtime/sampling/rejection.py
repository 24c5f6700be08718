"""Rejection sampling over guesses for one token: the result has the target's distribution, whatever the guesses.

The guesses are tried in turn. Guess x, drawn from q, is accepted with probability min(1, p(x) / q(x)). Otherwise p
becomes the normalized residual max(p - q, 0), and the next guess is tried; after the last guess, a token is drawn from
the remaining p.
Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, for one guess; Miao
et al., "SpecInfer", ASPLOS 2024, section 4.3, for several.

Every node of a tree is decided separately, with random numbers of its position; if its token is a guess, that guess's
node is next. Drafters never draw with these random numbers, so a guess may be any function of the draft's noise. A
guess with unknown q is treated as certain (q = 1). This is correct for any way of guessing, since p(x) and the
renormalized rest of p make up p; it only accepts fewer guesses.

Not covered by the bit contract: the drawn token depends on the guesses, and sums over the vocabulary use torch's order.

Legend: Q rows, C guesses per row at most, V vocabulary size, D known distributions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.runtime.sampling.philox import uniform_of
from detcompile.templates.tokens.gumbel import gumbel_argmax

# Added to the sample's index: random streams that neither drafters nor plain draws use.
ACCEPTANCE_STREAM = 1 << 31
RESIDUAL_STREAM = 1 << 30
NO_GUESS = -1  # padding of rows with fewer guesses
CERTAIN = -1  # source of a guess with unknown distribution


class Proposals(NamedTuple):
    """Guesses for the next token, in the order in which they are tried."""

    tokens: tuple[int, ...]
    distributions: tuple[Tensor | None, ...]  # [V] each


def resolve(
    probabilities: Tensor, guesses: Tensor, sources: Tensor, distributions: Tensor | None, keys: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the token of each row.

    Args:
        probabilities: [Q, V] of the target, after temperature and filters.
        guesses: [Q, C] int64, padded with NO_GUESS; distinct within a row.
        sources: [Q, C] int64: index in ``distributions`` of the distribution that a guess was drawn from (given the
            earlier guesses), or CERTAIN.
        distributions: [D, V], each summing to 1; None if there are none.
        keys: noise keys [Q, 5] for acceptance and for draws from residuals (``philox.noise_keys``).

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
        # The residual is empty only if p and q agree to the last bit; then the guess was accepted, up to rounding.
        left = torch.where((trying & ~accepted)[:, None] & (mass > 0), rest / mass, left)
    return torch.where(tokens == NO_GUESS, _draw(left, keys[1]), tokens)


def _draw(probabilities: Tensor, keys: Tensor) -> Tensor:
    return gumbel_argmax(torch.log(probabilities).float(), keys)  # in float32 like every row's logprobs
