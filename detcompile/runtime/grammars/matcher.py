"""Matcher: where a sequence stands in its grammar, and which tokens may follow.

A mask is a function of the grammar, the tokenizer and the sequence's own tokens, drafted ones included. So it is the
same after a preemption, on another engine that goes on with the tokens, and wherever the row stands in a step.

Legend: W words of 32 tokens each, a bit a token, lowest first.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detcompile.errors import GenerationError

__all__ = ["Mask", "Matcher", "NO_CONTINUATION", "token_bits"]

Mask = NDArray[np.int32]  # [W]
NO_CONTINUATION = "NoExtensionBias"  # begins the error of a matcher that no token can go on with
Path = tuple[int, ...]


class _State(NamedTuple):
    """What may follow some tokens.

    Attributes:
        matcher: llguidance's; consumed by nobody but the state that takes its place.
        mask: tokens that may be drawn, among them those that end the sequence where the text may end.
        complete: the text is whole, and no token can go on with it.
    """

    matcher: Any
    mask: Mask
    complete: bool


class Matcher:
    """Follows one sequence through a grammar.

    Args:
        matcher: llguidance's LLMatcher before the first token; taken over.
        ends: tokens that end the sequence wherever the text may end.
        ignored: tokens that are no text, such as those that llguidance lets end one; only ``ends`` of them are drawn.
    """

    def __init__(self, matcher: Any, ends: Mask, ignored: Mask) -> None:
        self._ends = ends
        self._text = ~(ends | ignored)
        self._ignored = ~ignored
        self._root = self._state_of(matcher)
        self._known: dict[Path, _State | None] = {}  # behind drafted tokens

    @property
    def complete(self) -> bool:
        """Whether the text is whole, and no token can go on with it."""
        return self._root.complete

    def copy(self) -> "Matcher":
        """One that stands where this one does."""
        other = object.__new__(Matcher)
        vars(other).update(vars(self))
        other._root = self._root._replace(matcher=self._root.matcher.deep_copy())
        other._known = {}
        return other

    def append(self, token: int) -> None:
        """The sequence has a token more, which does not end it.

        Raises:
            GenerationError: the grammar forbids it, or nothing may follow, or it is too large to say what may.
        """
        known, self._known = self._known, {}
        state = known.get((token,))
        if state is None:
            state = self._after(self._root.matcher, token)
        else:
            self._known = {path[1:]: own for path, own in known.items() if len(path) > 1 and path[0] == token}
        self._root = state

    def mask(self, drafted: Sequence[int] = ()) -> Mask | None:
        """Tokens that may follow ``drafted`` ones; None where these are forbidden or end the sequence."""
        state = self._behind(tuple(drafted))
        return None if state is None else state.mask

    def along(self, tokens: Sequence[int]) -> Iterator[Mask | None]:
        """Follow these; what each of them may be, and None behind one that is forbidden or ends the sequence."""
        goes_on = True
        for token in tokens:
            yield self._root.mask if goes_on else None
            goes_on = goes_on and self.mask((token,)) is not None
            if goes_on:
                self.append(token)

    def _behind(self, path: Path) -> _State | None:
        if not path:
            return self._root
        if path not in self._known:
            self._known[path] = self._draft(self._behind(path[:-1]), path[-1])
        return self._known[path]

    def _draft(self, before: _State | None, token: int) -> _State | None:
        if before is None or not _holds(before.mask & self._text, token):
            return None
        try:
            return self._after(before.matcher.deep_copy(), token)
        except GenerationError:
            return None  # should this token be drawn, its request is told

    def _after(self, matcher: Any, token: int) -> _State:
        if not matcher.consume_token(token):
            raise GenerationError(f"the grammar does not take token {token}: {_first_line(matcher.get_error())}")
        return self._state_of(matcher)

    def _state_of(self, matcher: Any) -> _State:
        found = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(self._ends)]
        if matcher.is_error():
            dead = matcher.get_error().startswith(NO_CONTINUATION)
            reason = "lets nothing follow here, and no end" if dead else "is too large at this place"
            raise GenerationError(f"the grammar {reason}: {_first_line(matcher.get_error())}")
        accepts = matcher.is_accepting()
        mask = (found & self._ignored) | self._ends if accepts else found & self._ignored
        return _State(matcher, mask, accepts and not (found & self._text).any())


def token_bits(tokens: Sequence[int], num_words: int) -> Mask:
    """The mask [W] of some tokens; those beyond it are left out."""
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        if token < 32 * num_words:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def _holds(mask: Mask, token: int) -> bool:
    return token < 32 * len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
