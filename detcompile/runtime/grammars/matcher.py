"""Matcher: the state of a sequence in its grammar, and the tokens that may follow.

A mask depends only on the grammar, the tokenizer and the sequence's tokens, including drafted ones. It is therefore the
same after a preemption, on another engine that resumes the sequence, and anywhere in a step.

Legend: W words of 32 tokens each, one bit per token, lowest first.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detcompile.errors import GenerationError

Mask = NDArray[np.int32]  # [W]
NO_CONTINUATION = "NoExtensionBias"  # start of llguidance's error if no token can follow
Path = tuple[int, ...]


class _State(NamedTuple):
    """What may follow some tokens.

    Attributes:
        matcher: llguidance's matcher; only the next state may consume it.
        mask: tokens that may be drawn, including end tokens if the text may end here.
        complete: the text is complete and cannot continue.
    """

    matcher: Any
    mask: Mask
    complete: bool


class Matcher:
    """Follows one sequence through a grammar.

    Args:
        matcher: llguidance's LLMatcher before the first token; this object takes ownership.
        ends: tokens that end the sequence wherever the text may end.
        ignored: tokens that are not text, such as llguidance's own end tokens; only those in ``ends`` may be drawn.
    """

    def __init__(self, matcher: Any, ends: Mask, ignored: Mask) -> None:
        self._ends = ends
        self._text = ~(ends | ignored)
        self._ignored = ~ignored
        self._root = self._state_of(matcher)
        self._known: dict[Path, _State | None] = {}  # states after drafted tokens

    @property
    def complete(self) -> bool:
        """True if the text is complete and cannot continue."""
        return self._root.complete

    def copy(self) -> "Matcher":
        """Return an independent matcher in the same state."""
        other = object.__new__(Matcher)
        vars(other).update(vars(self))
        other._root = self._root._replace(matcher=self._root.matcher.deep_copy())
        other._known = {}
        return other

    def append(self, token: int) -> None:
        """Advance by a token that does not end the sequence.

        Raises:
            GenerationError: the grammar forbids the token, allows nothing after it, or is too large at this point.
        """
        known, self._known = self._known, {}
        state = known.get((token,))
        if state is None:
            state = self._after(self._root.matcher, token)
        else:
            self._known = {path[1:]: later for path, later in known.items() if len(path) > 1 and path[0] == token}
        self._root = state

    def mask(self, drafted: Sequence[int] = ()) -> Mask | None:
        """Return the tokens that may follow ``drafted``; None if these are forbidden or end the sequence."""
        state = self._behind(tuple(drafted))
        return None if state is None else state.mask

    def along(self, tokens: Sequence[int]) -> Iterator[Mask | None]:
        """Advance along ``tokens``, yielding the mask before each; None after a forbidden or ending token."""
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
            return None  # if this token is really drawn, ``append`` raises the error

    def _after(self, matcher: Any, token: int) -> _State:
        if not matcher.consume_token(token):
            raise GenerationError(f"the grammar does not take token {token}: {_first_line(matcher.get_error())}")
        return self._state_of(matcher)

    def _state_of(self, matcher: Any) -> _State:
        allowed = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(self._ends)]
        if matcher.is_error():
            dead = matcher.get_error().startswith(NO_CONTINUATION)
            reason = "allows neither a token nor the end here" if dead else "is too large at this point"
            raise GenerationError(f"the grammar {reason}: {_first_line(matcher.get_error())}")
        accepts = matcher.is_accepting()
        mask = (allowed & self._ignored) | self._ends if accepts else allowed & self._ignored
        return _State(matcher, mask, accepts and not (allowed & self._text).any())


def token_bits(tokens: Sequence[int], num_words: int) -> Mask:
    """Return the mask [W] of these tokens; tokens beyond it are ignored."""
    words = np.zeros(num_words, np.uint32)
    for token in tokens:
        if token < 32 * num_words:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def _holds(mask: Mask, token: int) -> bool:
    return token < 32 * len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
