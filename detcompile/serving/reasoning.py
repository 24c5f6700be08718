"""Reasoning of thinking models: formats of families, and the reader of answers.

The reader splits an answer into reasoning, content and tool calls, however the text is cut.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.serving.engines.answers import Answer
from detcompile.serving.tokenizer_pool import TokenizerPool
from detcompile.serving.tools.reader import SPACE, Family, Piece, Reader, overlap

__all__ = [
    "AnswerReader", "GPT_OSS", "PARSERS", "ReasoningParser", "Thinking", "num_reasoning_tokens", "reasoning_parser_of",
    "searched_after", "thinking_of",
]  # fmt: skip

TAIL = 32  # tokens at a prompt's end that may hold a marker and whitespace
AT_ONCE = 64  # tokens to count before yielding to the event loop


class ReasoningParser(NamedTuple):
    """A reasoning format: the text between two markers, at the answer's beginning.

    Attributes:
        name: vLLM's name of the parser.
        assumed: an answer begins with reasoning even if neither the prompt nor the answer opens it.
    """

    name: str
    opens: str
    closes: str
    assumed: bool = False


GPT_OSS = ReasoningParser("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>")  # read by _Harmony
PARSERS = {
    parser.name: parser
    for parser in (
        ReasoningParser("deepseek_r1", "<think>", "</think>", assumed=True),
        ReasoningParser("deepseek_v3", "<think>", "</think>"),
        ReasoningParser("ernie45", "<think>", "</think>", assumed=True),
        ReasoningParser("glm45", "<think>", "</think>"),
        ReasoningParser("kimi_k2", "<think>", "</think>", assumed=True),
        ReasoningParser("minimax_m2", "<think>", "</think>", assumed=True),
        ReasoningParser("mistral", "[THINK]", "[/THINK]"),
        ReasoningParser("olmo3", "<think>", "</think>", assumed=True),
        GPT_OSS,
        ReasoningParser("qwen3", "<think>", "</think>"),
        ReasoningParser("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningParser("step3", "<think>", "</think>", assumed=True),
    )
}
CHOSEN = ("mistral", "seed_oss", "qwen3")  # parsers that a template chooses by its markers; qwen3 for any <think>


def reasoning_parser_of(template: str) -> ReasoningParser | None:
    """Return the format whose markers a chat template contains; None if there are none."""
    if "<|channel|>" in template:
        return GPT_OSS
    return next((parser for name in CHOSEN if (parser := PARSERS[name]).closes in template
                 or parser.opens in template), None)  # fmt: skip


class Thinking(NamedTuple):
    """How the reasoning of an answer is read.

    Attributes:
        parser: name of the format.
        begun: the answer begins inside the reasoning, because the prompt opens it.
    """

    parser: str
    begun: bool


def thinking_of(parser: ReasoningParser | None, texts: TokenizerPool, prompt: Sequence[int]) -> Thinking | None:
    """Return how the reasoning after a prompt is read; None for none.

    A prompt that ends with the closing marker is how templates switch thinking off.
    """
    if parser is None or not texts.present:
        return None
    tail = texts.decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip(SPACE)
    if parser is GPT_OSS:
        return Thinking(parser.name, False)
    if tail.endswith(parser.closes):
        return None
    return Thinking(parser.name, parser.assumed or tail.endswith(parser.opens))


def searched_after(thinking: Thinking) -> tuple[str, str]:
    """Return the reasoning_markers of SamplingParams, which keep stop strings out of the reasoning."""
    parser = PARSERS[thinking.parser]
    if parser is GPT_OSS:
        return "<|channel|>analysis", "<|channel|>final<|message|>"
    return "" if thinking.begun else parser.opens, parser.closes


class AnswerReader:
    """Reads one answer.

    The reasoning's pieces have ``reasoning`` set. Their text and the content's are as the model wrote them, without the
    markers; whitespace before the opening marker is dropped.

    Args:
        thinking: None without reasoning.
        family: the tool-call format; None without tools.
    """

    def __init__(self, thinking: Thinking | None, family: Family | None) -> None:
        self._harmony: _Harmony | None = None
        if (thinking is not None and thinking.parser == GPT_OSS.name) or (family is not None and family.harmony):
            self._harmony = _Harmony(calls=family is not None)
        self._marked = None if thinking is None or self._harmony else _Marked(PARSERS[thinking.parser], thinking.begun)
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


class _Marked:
    """Splits text at the markers of a format."""

    def __init__(self, parser: ReasoningParser, begun: bool) -> None:
        self.reasons = begun
        self._parser = parser
        self._opening = True  # the text so far may be the opening marker's beginning
        self._held = ""

    @property
    def over(self) -> bool:
        """Return True if the rest of the answer is content."""
        return not (self._opening or self.reasons)

    def feed(self, text: str, *, last: bool) -> tuple[str, str]:
        """Append text and return the new reasoning and the new content."""
        text, self._held = self._held + text, ""
        if self._opening:
            rest, opens = text.lstrip(SPACE), self._parser.opens
            if not last and len(rest) < len(opens) and opens.startswith(rest):
                self._held = text
                return "", ""
            self._opening = False
            if rest.startswith(opens):
                self.reasons, text = True, rest.removeprefix(opens)
        if not self.reasons:
            return "", text
        reasoning, closing, content = text.partition(self._parser.closes)
        if closing:
            self.reasons = False
        elif not last:
            end = len(text) - overlap(text, self._parser.closes)
            reasoning, self._held = text[:end], text[end:]
        return reasoning, content


HEADERS = ("<|channel|>", "<|start|>", "<|message|>", "to=")  # beginnings of a message's header
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")  # what ends a message's body
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTION = re.compile(r"to=functions\.([^\s<]+)")
OTHER_TOOL = re.compile(r"to=(?!functions\.)[^\s<]+")


class _Harmony:
    """Reads gpt-oss's format: messages of a header with channel and recipient, and a body.

    The channel analysis, and messages to tools that no client runs, are reasoning; messages to functions are calls;
    all others are content. Bodies of one kind are joined by newlines. A header without a body is dropped.

    Args:
        calls: the request has functions; else messages to them are content.
    """

    def __init__(self, *, calls: bool) -> None:
        self.num_calls = 0
        self.reasons = False
        self._takes_calls = calls
        self._held = ""
        self._first = True  # nothing was read
        self._kind: Piece | None = None  # of the open body, without text; None in a header
        self._fresh = True  # the open body has no text yet
        self._before: set[Piece] = set()  # kinds of the earlier bodies with text

    @property
    def shows(self) -> bool:
        """Return True in a body that is not reasoning, and before anything was read."""
        return self._first or (self._kind is not None and not self.reasons)

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        """Append text and return the new pieces."""
        text, self._held = self._held + text, ""
        if self._first:
            rest = text.lstrip(SPACE)
            if not last and any(head.startswith(rest) and head != rest for head in HEADERS):
                self._held = text
                return []
            self._first = False
            if not rest.startswith(HEADERS):
                self._kind = Piece(None, None, "")  # an answer in another format is content
        pieces: list[Piece] = []
        while text:
            if self._kind is None:
                header, message, text = text.partition("<|message|>")
                if not message:
                    self._held = header
                    break
                pieces += self._open(header)
            place, end = min(((text.find(end), end) for end in ENDS if end in text), default=(len(text), ""))
            if not end and not last:
                place -= max(overlap(text, mark) for mark in ENDS)
                self._held = text[place:]
            pieces += self._body(text[:place])
            text = text[place + len(end) :] if end else ""
            if end:
                self._close()
        return pieces

    def _open(self, header: str) -> list[Piece]:
        """Start the body after a header; return the start of a call."""
        channel, function = CHANNEL.search(header), FUNCTION.search(header)
        self._kind = Piece(None, None, "")
        self._fresh = True
        if function is not None and self._takes_calls:
            self._kind = Piece(self.num_calls, None, "")
            self.num_calls += 1
            return [self._kind._replace(name=function[1])]
        self.reasons = bool(OTHER_TOOL.search(header)) or (channel is not None and channel[1] == "analysis")
        self._kind = self._kind._replace(reasoning=self.reasons)
        return []

    def _body(self, text: str) -> list[Piece]:
        kind = self._kind
        if not text or kind is None:
            return []
        joined = "\n" if self._fresh and kind in self._before else ""
        self._fresh = False
        self._before.add(kind)
        return [kind._replace(text=joined + text)]

    def _close(self) -> None:
        self._kind, self.reasons = None, False
