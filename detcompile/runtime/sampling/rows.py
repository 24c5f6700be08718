"""SampleRow: a row of logits, and what its token is drawn with."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from detcompile.runtime.grammars.matcher import Mask
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.rejection import Proposals

__all__ = ["SampleRow"]


class SampleRow(NamedTuple):
    """A row of logits, and whose it is.

    ``key`` and ``token_ids`` matter only with penalties: the first plan that holds a key reads all its ``position``
    tokens; later plans follow the drawn tokens on the device, and read nothing.
    """

    params: SamplingParams  # seeded, unless greedy
    position: int  # index in its sequence of the token that the row draws
    num_generated: int = 0  # tokens of the output before it, those still on the device included
    sample_index: int = 0  # which of the n completions
    key: Hashable = None  # of the sequence
    token_ids: Sequence[int] = ()  # prompt, then output
    forbidden: tuple[int, ...] = ()  # tokens that would complete a bad word
    mask: Mask | None = None  # tokens that a grammar lets it draw; None for all
    proposals: Proposals | None = None  # guesses to accept or reject; None draws plainly
