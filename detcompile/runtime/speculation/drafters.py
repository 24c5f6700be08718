"""Drafters: guesses at the next tokens of a sequence. A guess can be wrong, late or missing; it never changes a bit."""

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree

__all__ = ["Drafter", "NGramDrafter", "NO_DRAFT", "require_fitting"]

NO_DRAFT = DraftTree({})
NUM_KEPT = 64  # tokens that can be taken back without reading a sequence again


class Drafter(Protocol):
    """What the engine asks of a drafter.

    It may have more: ``vocab_size`` and ``tokenizer``, which have to be the target's; ``draft_ahead()``, called while
    the target verifies what was proposed; ``give_distributions()``, called where guesses are accepted by rejection, so
    that its trees then tell what each guess was drawn from; ``reads_states = True`` with ``hidden_size`` and
    ``observe(rows, hidden)``, called after each step with the states [R, H] that tokens were drawn from and the row of
    each sequence's newest one. Where it raises for a sequence, in any of them, it is not asked about that one again.
    """

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
        self._ngrams: dict[Sequence, _NGrams] = {}

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """A chain for each sequence whose end stood in it before."""
        return [self._chain(sequence, depth) for sequence, depth in zip(sequences, max_depth, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Drop the places of a sequence's n-grams."""
        self._ngrams.pop(sequence, None)

    def _chain(self, sequence: Sequence, max_depth: int) -> DraftTree:
        tokens = sequence.token_ids
        ngrams = self._ngrams.get(sequence)
        if ngrams is None:
            # A drafter that runs ahead takes back its own drafts at most, so that this is always seen.
            ngrams = _NGrams(range(self.shortest, self.longest + 1), max(NUM_KEPT, self.num_tokens + 1))
            self._ngrams[sequence] = ngrams
        ngrams.read(tokens)
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            place = ngrams.places.get(tuple(tokens[-size:]))
            if place is not None:
                return DraftTree.chain(tokens[place : place + min(self.num_tokens, max_depth)])
        return NO_DRAFT


def require_fitting(drafter: Any, vocab_size: int, hidden_size: int, tokenizer: Any | None) -> None:
    """Refuse a drafter for another model.

    Args:
        hidden_size: of the states that the target gives; 0 if it gives none.

    Raises:
        InvalidInput: another vocabulary or tokenizer, or states of another size, where they are known.
    """
    own_size = getattr(drafter, "vocab_size", None)
    if own_size not in (None, vocab_size):
        raise InvalidInput(
            f"the drafter's vocabulary has {own_size} tokens, the model's {vocab_size}: a drafter needs the model's"
            " tokenizer"
        )
    if _known_to_differ(getattr(drafter, "tokenizer", None), tokenizer, vocab_size):
        raise InvalidInput("the drafter's tokenizer gives other ids than the model's: take a drafter made for this one")
    if not getattr(drafter, "reads_states", False):
        return
    if hidden_size == 0:
        raise InvalidInput(
            f"{type(drafter).__name__} reads hidden states, which this model does not hand out: take another drafter"
        )
    if drafter.hidden_size != hidden_size:
        raise InvalidInput(
            f"the drafter reads states of {drafter.hidden_size} values, the model's have {hidden_size}: take one that"
            " was made for this model"
        )


def _known_to_differ(own: Any | None, other: Any | None, vocab_size: int) -> bool:
    """Whether two tokenizers give other ids. Of a folder without one, transformers may make a stub with few tokens."""
    if own is None or other is None or own is other:
        return False
    vocabularies = own.get_vocab(), other.get_vocab()
    return min(map(len, vocabularies)) > vocab_size // 2 and vocabularies[0] != vocabularies[1]


class _NGrams:
    """Where each n-gram of a sequence was last followed by a token: ``places``, the indices of those tokens.

    Each token is read once. The last ``num_kept`` can be taken back; where none of them is in its place any more, the
    sequence is read again. What changed only before them is not seen.
    """

    def __init__(self, sizes: range, num_kept: int) -> None:
        self.places: dict[tuple[int, ...], int] = {}
        self._sizes = sizes
        self._num_read = 0
        # Tokens read last, each with the places that were known of its n-grams before.
        self._newest: deque[tuple[int, list[tuple[tuple[int, ...], int | None]]]] = deque(maxlen=num_kept)

    def read(self, tokens: list[int]) -> None:
        """Bring ``places`` up to date."""
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
            self._take_back()
        for place in range(agreed, len(tokens)):
            ngrams = [tuple(tokens[place - size : place]) for size in self._sizes if size <= place]
            self._newest.append((tokens[place], [(ngram, self.places.get(ngram)) for ngram in ngrams]))
            self.places |= dict.fromkeys(ngrams, place)
        self._num_read = len(tokens)

    def _take_back(self) -> None:
        _, known = self._newest.pop()
        for ngram, place in known:
            if place is None:
                del self.places[ngram]
            else:
                self.places[ngram] = place
