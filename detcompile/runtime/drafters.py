"""Drafters: guesses at the next tokens of a sequence. A guess can be wrong, late or missing; it never changes a bit."""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from detcompile.errors import InvalidInput
from detcompile.runtime.draft_tree import DraftTree
from detcompile.runtime.sequence import Sequence

__all__ = ["Drafter", "NGramDrafter", "NO_DRAFT"]

NO_DRAFT = DraftTree({})


class Drafter(Protocol):
    """What the engine asks of a drafter. One that has a ``vocab_size`` must have the target's."""

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """A tree for each sequence, whose tokens are all known, no deeper than ``max_depth``; NO_DRAFT for none."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or will not be asked about for long: drop what is kept of it."""


class NGramDrafter:
    """Prompt lookup: what followed the same last few tokens earlier in the sequence (Saxena, "Prompt lookup decoding",
    2023).

    Args:
        num_tokens: tokens of a draft. longest, shortest: of the match; the longest that is found wins, and of several
            places the latest.
    """

    def __init__(self, num_tokens: int = 5, *, longest: int = 4, shortest: int = 1) -> None:
        if num_tokens < 1 or not 1 <= shortest <= longest:
            raise InvalidInput(
                f"NGramDrafter: num_tokens={num_tokens}, longest={longest}, shortest={shortest}: give at least one"
                " token, and 1 <= shortest <= longest"
            )
        self.num_tokens = num_tokens
        self.longest, self.shortest = longest, shortest
        self._seen: dict[Sequence, tuple[int, dict[tuple[int, ...], int]]] = {}

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """A chain for each sequence whose end stood in it before."""
        return [self._chain(sequence, depth) for sequence, depth in zip(sequences, max_depth, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Drop the places of a sequence's n-grams."""
        self._seen.pop(sequence, None)

    def _chain(self, sequence: Sequence, max_depth: int) -> DraftTree:
        tokens = sequence.token_ids
        places = self._places(sequence)
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            place = places.get(tuple(tokens[-size:]))
            if place is not None:
                return DraftTree.chain(tokens[place : place + min(self.num_tokens, max_depth)])
        return NO_DRAFT

    def _places(self, sequence: Sequence) -> dict[tuple[int, ...], int]:
        """Where each n-gram was last followed by a token: the index of that token. Reads each token once."""
        tokens = sequence.token_ids
        num_read, places = self._seen.get(sequence, (1, {}))
        for place in range(num_read, len(tokens)):
            for size in range(self.shortest, min(self.longest, place) + 1):
                places[tuple(tokens[place - size : place])] = place
        self._seen[sequence] = (len(tokens), places)
        return places
