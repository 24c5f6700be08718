"""NGramDrafter: prompt lookup, which guesses what followed the same last few tokens earlier in the sequence.

Source: Saxena, "Prompt lookup decoding", 2023.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.drafter import NO_DRAFT, Drafter

NUM_KEPT = 64  # most recent tokens that can be undone without reading the sequence again


class NGramDrafter(Drafter):
    """Drafts the tokens that followed the last few tokens when they occurred earlier in the sequence.

    The longest match wins; among equal ones, the latest.

    Args:
        num_tokens: tokens per draft.
        longest: length of the longest match to look for.
        shortest: length of the shortest match that counts.

    Raises:
        InvalidInput: a number is out of range.
    """

    def __init__(self, num_tokens: int = 5, *, longest: int = 4, shortest: int = 1) -> None:
        if num_tokens < 1 or not 1 <= shortest <= longest:
            raise InvalidInput(
                f"NGramDrafter: num_tokens={num_tokens}, longest={longest}, shortest={shortest}: give at least one"
                " token, and 1 <= shortest <= longest"
            )
        self.num_tokens = num_tokens
        self.longest, self.shortest = longest, shortest
        self._ngrams: dict[Sequence, _NGrams] = {}

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """Return a chain for each sequence whose last tokens occurred before."""
        return [self._chain(sequence, depth) for sequence, depth in zip(sequences, max_depth, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Drop the n-grams of a sequence."""
        self._ngrams.pop(sequence, None)

    def _chain(self, sequence: Sequence, max_depth: int) -> DraftTree:
        tokens = sequence.token_ids
        ngrams = self._ngrams.get(sequence)
        if ngrams is None:
            # A drafter that runs ahead undoes at most its own drafts, so every such change is detected.
            ngrams = _NGrams(range(self.shortest, self.longest + 1), max(NUM_KEPT, self.num_tokens + 1))
            self._ngrams[sequence] = ngrams
        ngrams.read(tokens)
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            place = ngrams.places.get(tuple(tokens[-size:]))
            if place is not None:
                return DraftTree.chain(tokens[place : place + min(self.num_tokens, max_depth)])
        return NO_DRAFT


class _NGrams:
    """For each n-gram of a sequence, the index of the token that last followed it: ``places``.

    Each token is read once. The last ``num_kept`` tokens can be undone (fewer right after some were). If none of them
    is in its place any more, the sequence is read again. Changes before them are not detected.
    """

    def __init__(self, sizes: range, num_kept: int) -> None:
        self.places: dict[tuple[int, ...], int] = {}
        self._sizes = sizes
        self._num_read = 0
        # The most recent tokens, each with the earlier places of its n-grams.
        self._newest: deque[tuple[int, list[tuple[tuple[int, ...], int | None]]]] = deque(maxlen=num_kept)

    def read(self, tokens: SequenceOf[int]) -> None:
        """Update ``places``."""
        oldest = agreed = self._num_read - len(self._newest)
        for token, _ in self._newest:
            if agreed >= len(tokens) or tokens[agreed] != token:
                break
            agreed += 1
        if agreed == oldest > 0:
            self.places.clear()
            self._newest.clear()
            self._num_read = agreed = 0
        for _ in range(self._num_read - agreed):
            self._undo()
        for place in range(agreed, len(tokens)):
            ngrams = [tuple(tokens[place - size : place]) for size in self._sizes if size <= place]
            self._newest.append((tokens[place], [(ngram, self.places.get(ngram)) for ngram in ngrams]))
            self.places |= dict.fromkeys(ngrams, place)
        self._num_read = len(tokens)

    def _undo(self) -> None:
        _, known = self._newest.pop()
        for ngram, place in known:
            if place is None:
                del self.places[ngram]
            else:
                self.places[ngram] = place
