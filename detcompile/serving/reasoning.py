"""Reader of answers: splits them into reasoning, content and tool calls, however the text is cut."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from detcompile.reasoning.formats import GPT_OSS, PARSERS, Harmony, Marked, Piece, Thinking
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.serving.engines.answers import Answer
from detcompile.serving.tokenizer_pool import TokenizerPool
from detcompile.serving.tools.reader import Family, Reader

AT_ONCE = 64  # tokens to count before yielding to the event loop


class AnswerReader:
    """Reads one answer.

    The reasoning's pieces have ``reasoning`` set. Their text and the content's are as the model wrote them, without the
    markers; whitespace before the opening marker is dropped.

    Args:
        thinking: None without reasoning.
        family: the tool-call format; None without tools.
    """

    def __init__(self, thinking: Thinking | None, family: Family | None) -> None:
        self._harmony: Harmony | None = None
        if (thinking is not None and thinking.parser == GPT_OSS.name) or (family is not None and family.harmony):
            self._harmony = Harmony(calls=family is not None)
        self._marked = None if thinking is None or self._harmony else Marked(PARSERS[thinking.parser], thinking.begun)
        self._calls = None if family is None or self._harmony else Reader(family)

    @property
    def num_calls(self) -> int:
        """Return the number of calls with a known name."""
        reader = self._harmony or self._calls
        return 0 if reader is None else reader.num_calls

    @property
    def shows(self) -> bool:
        """Return True unless the text so far ends within the reasoning, or in gpt-oss's format in a header."""
        return self._harmony.shows if self._harmony is not None else not self.reasons

    @property
    def reasons(self) -> bool:
        """Return True if the text so far ends within the reasoning or its markers."""
        reader = self._harmony or self._marked
        return reader is not None and reader.reasons

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """Append text and return the new pieces; with ``last``, also everything held back so far."""
        if self._harmony is not None:
            return self._harmony.feed(text, last=last)
        pieces: list[Piece] = []
        if self._marked is not None:
            reasoning, text = self._marked.feed(text, last=last)
            pieces = [Piece(None, None, reasoning, reasoning=True)] if reasoning else []
            if not self._marked.over:
                return pieces
        return pieces + ([Piece(None, None, text)] if self._calls is None else self._calls.feed(text, last=last))


async def num_reasoning_tokens(texts: TokenizerPool, answers: Sequence[Answer], thinking: Thinking | None) -> int:
    """Return the number of drawn tokens up to the end of the reasoning, including its markers, summed over samples."""
    if thinking is None or not texts.present:
        return 0
    count = 0
    for answer in answers:
        for sample in answer.samples:
            detokenizer = Detokenizer(texts, replace(answer.params, stop=()))
            reader, counted = AnswerReader(thinking, None), 0
            for place, token in enumerate(sample.token_ids, 1):
                before = reader.reasons
                reader.feed(detokenizer.append([token]))
                if reader.reasons and not counted:
                    counted = place  # earlier tokens are the opening marker's
                elif reader.reasons or before:
                    counted += 1
                if place % AT_ONCE == 0:
                    await asyncio.sleep(0)
            count += counted
    return count
