"""Detokenizer: the text of a request as its tokens arrive, cut at the first stop string outside its reasoning.

The pieces returned by ``append`` and ``finish``, joined, equal the decoded text of all tokens, cut at the first stop
string. A token's text depends on its neighbors: a character may take several tokens, and a decoder may drop a leading
space. So a short window of recent tokens is decoded with and without the new token; the cost per token does not depend
on the length of the text. Decoders with byte fallback (SentencePiece vocabularies) decode a run of byte tokens as one
string, or as replacement marks if any byte of the run is invalid, so the text of a run is certain only when the run
ends. A decoder that only joins bytes (ByteLevel) needs no neighbors: its window restarts after every whole character.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders

from detcompile.runtime.requests.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # decoded from bytes that are not (yet) a character
MAX_BYTES = 4  # per character in UTF-8
WHITESPACE = " \t\r\n"  # may precede the opening marker of reasoning
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Turns the tokens of one request into text.

    Do not append a token that ends the request without being part of its text (an end-of-sequence or stop token).

    Args:
        tokenizer: a tokenizer of transformers, or an object with the same decode methods.

    Attributes:
        stopped_by: the stop string that ended the request, or None. The text is cut before it, or after it with
            include_stop_str_in_output. A stop string may begin within the first min_tokens tokens but must end after
            them. If several match, the one completed first wins; then the one that began first.
        num_tokens: tokens read, up to the one that completed a stop string.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.stopped_by: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._params = params
        self._window: list[int] = []
        self._num_read = 0  # tokens at the window's start whose text has been released
        self._known = ""  # that text
        self._held = ""  # text withheld because it may begin a stop string or the reasoning
        self._markers = params.reasoning_markers if params.stop else None  # None once the reasoning is over
        self._reasoning: str | None = None  # end of the reasoning so far; None before its opening marker
        self._finished = False
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._joins_bytes = isinstance(backend, Tokenizer) and isinstance(backend.decoder, decoders.ByteLevel)
        self._read = backend.decode if self._joins_bytes else tokenizer.decode
        self._special = _special_ids(tokenizer) if params.skip_special_tokens else frozenset()

    def append(self, token_ids: Sequence[int]) -> str:
        """Read the next tokens. Return the text that has become certain."""
        assert not self._finished, "tokens for a request whose text has been finished"
        released = []
        for token in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            if token in self._special and not self._decode([token]):
                continue  # not part of the text, and its neighbors decode without it
            self._window.append(token)
            if self._joins_bytes or not self._is_byte(token):
                released.append(self._match(self._advance(), last=False))
        return "".join(released)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """Read the last tokens. Return the rest of the text, which may contain a stop string.

        Nothing can be appended afterwards. If these are all tokens and there are no stop strings, they are decoded at
        once: the same text at a tenth of the cost or less.
        """
        assert not self._finished, "finish() called twice"
        if not self._params.stop and self.num_tokens == 0:
            self._finished, self.num_tokens = True, len(token_ids)
            return self._decode(list(token_ids))
        text = self.append(token_ids)
        self._finished = True
        if self.stopped_by is not None:
            return text
        return text + self._match(self._decode(self._window)[len(self._known) :], last=True)

    def _decode(self, token_ids: list[int]) -> str:
        skip = self._params.skip_special_tokens
        if self._joins_bytes:
            return self._read(token_ids, skip_special_tokens=skip)
        return self._read(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    def _is_byte(self, token_id: int) -> bool:
        """Return True if a decoder may join the token with the bytes that follow."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and BYTE_TOKEN.fullmatch(token) is not None

    def _advance(self) -> str:
        """Return the window's new text that later tokens cannot change."""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return self._cut(text)
        new = text[len(self._known) :]
        if new:
            self._restart(len(self._window) if self._joins_bytes else self._num_read, len(self._window))
        return new

    def _restart(self, start: int, num_read: int) -> None:
        """Drop the window's first ``start`` tokens; the text up to ``num_read`` is known."""
        self._window = self._window[start:]
        self._num_read = num_read - start
        self._known = self._decode(self._window[: self._num_read]) if self._num_read else ""

    def _cut(self, text: str) -> str:
        """Split the window at a safe token and return the text before it, so that invalid bytes do not pile up.

        A split is safe if both sides decode to the same text as the whole, and at least as many tokens follow as a
        character has bytes. Of MAX_BYTES consecutive positions, at least one is not inside a character.
        """
        last = len(self._window) - MAX_BYTES
        if last - MAX_BYTES < self._num_read:
            return ""
        for place in range(last, last - MAX_BYTES, -1):
            before = self._decode(self._window[:place])
            if before + self._decode(self._window[place:]) == text:
                new = before[len(self._known) :]
                self._restart(place, place)
                return new
        return ""

    def _match(self, new: str, last: bool) -> str:
        """Return text to release now that ``new`` is certain; hold back a possible stop string unless ``last``."""
        if self._markers is None:
            return self._search(new, last)
        opens, closes = self._markers
        if self._reasoning is None:
            new, self._held = self._held + new, ""
            begun = new.lstrip(WHITESPACE)
            if not last and len(begun) < len(opens) and opens.startswith(begun):
                self._held = new
                return ""
            if not begun.startswith(opens):
                self._markers = None
                return self._search(new, last)
            start = len(new) - len(begun) + len(opens)
            self._reasoning, released, new = "", new[:start], new[start:]
            return released + self._match(new, last)
        text = self._reasoning + new
        place = text.find(closes)
        if place < 0:
            self._reasoning = text[-(len(closes) - 1) :] if len(closes) > 1 else ""
            return new
        end = place + len(closes) - len(self._reasoning)
        self._markers = None
        return new[:end] + self._search(new[end:], last)

    def _search(self, new: str, last: bool) -> str:
        text = self._held + new
        stops = self._params.stop
        ends = stops if self.num_tokens > self._params.min_tokens else ()
        # A match that ended earlier does not count: it ended within min_tokens and was held as another's beginning.
        places = {stop: text.find(stop, max(0, len(self._held) + 1 - len(stop))) for stop in ends}
        matches = [(place + len(stop), place, stop) for stop, place in places.items() if place >= 0]
        if matches:
            end, start, self.stopped_by = min(matches)
            self._held = ""
            return text[:end] if self._params.include_stop_str_in_output else text[:start]
        kept = 0 if last else max((_overlap(text, stop) for stop in stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens; none if the tokenizer does not know them."""
    try:
        return frozenset(tokenizer.all_special_ids)
    except (AttributeError, RecursionError):  # the latter if unk_token is not in the vocabulary of transformers' class
        return frozenset()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
