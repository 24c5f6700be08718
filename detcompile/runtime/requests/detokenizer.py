"""Detokenizer: text of a request as its tokens arrive, and where a stop string ends it.

The pieces that ``append`` and ``finish`` give out, joined, are the decoded text of all tokens, cut at the first stop
string. A token's text depends on its neighbours (a character may take several tokens, a decoder may drop a leading
space), so a window of the last tokens is decoded with and without the new one. The window is short, so a token costs
the same however long the text is. Decoders with byte fallback (of SentencePiece's vocabularies) make one string of a
whole run of byte tokens, or, if one byte of the run belongs to no character, a replacement mark of each: the text of a
run is certain when it ends. A decoder that only joins bytes (ByteLevel's) needs no neighbours: behind a whole character
the window begins anew.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders

from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["Detokenizer"]

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
MAX_BYTES = 4  # of a character in UTF-8
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Turns the tokens of one request into text.

    A token that ends a request and shall not be read (an end-of-sequence token, a stop token) is not appended.

    Args:
        tokenizer: a tokenizer of transformers, or what decodes like one.

    Attributes:
        stopped_by: the stop string that ended the request, or None. The text is cut before it, or after it with
            include_stop_str_in_output. It may begin in the first min_tokens tokens, and ends behind them.
            Of several, the one that is complete first; then the one that began first.
        num_tokens: tokens that were read; those after the one that completed a stop string are not.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self.stopped_by: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._params = params
        self._window: list[int] = []
        self._num_read = 0  # tokens at the window's start whose text is known
        self._known = ""  # that text
        self._held = ""  # text that may begin a stop string
        self._finished = False
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._joins_bytes = isinstance(backend, Tokenizer) and isinstance(backend.decoder, decoders.ByteLevel)
        self._read = backend.decode if self._joins_bytes else tokenizer.decode
        self._special = frozenset(tokenizer.all_special_ids if params.skip_special_tokens else ())

    def append(self, token_ids: Sequence[int]) -> str:
        """Read the next tokens; returns the text that is certain by now and was not returned before."""
        assert not self._finished, "tokens for a request whose text has been finished"
        released = []
        for token in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            if token in self._special and not self._decode([token]):
                continue  # it is not in the text, nor in the way of its neighbours
            self._window.append(token)
            if self._joins_bytes or not self._is_byte(token):
                released.append(self._match(self._advance(), last=False))
        return "".join(released)

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """Read the last tokens; returns the rest of the text, in which a stop string may be found.

        Nothing can be appended afterwards. Where these are all tokens, and no stop string is looked for, they are
        decoded at once: the same text, at a tenth of the cost or less.
        """
        assert not self._finished, "text that has been finished"
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
        """Whether a decoder may join it with the bytes that follow."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and BYTE_TOKEN.fullmatch(token) is not None

    def _advance(self) -> str:
        """New text of the window that later tokens cannot change."""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return self._cut(text)
        new = text[len(self._known) :]
        if new:
            self._restart(len(self._window) if self._joins_bytes else self._num_read, len(self._window))
        return new

    def _restart(self, start: int, num_read: int) -> None:
        """Drop the window's first tokens; the text up to ``num_read`` is known."""
        self._window = self._window[start:]
        self._num_read = num_read - start
        self._known = self._decode(self._window[: self._num_read]) if self._num_read else ""

    def _cut(self, text: str) -> str:
        """New text up to a token where the window may be parted, so that bytes of no character do not pile up.

        A place is right if both sides decode to what the whole does, and as many tokens follow as a character has
        bytes. Of that many places in a row, one is not inside a character.
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
        """Text to give out, now that ``new`` is certain; keeps what may begin a stop string, unless it is the last."""
        text = self._held + new
        stops = self._params.stop
        ends = stops if self.num_tokens > self._params.min_tokens else ()
        # One that ended earlier is no end: it was within min_tokens, and held as the beginning of another.
        places = {stop: text.find(stop, max(0, len(self._held) + 1 - len(stop))) for stop in ends}
        found = [(place + len(stop), place, stop) for stop, place in places.items() if place >= 0]
        if found:
            end, start, self.stopped_by = min(found)
            self._held = ""
            return text[:end] if self._params.include_stop_str_in_output else text[:start]
        kept = 0 if last else max((_overlap(text, stop) for stop in stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
