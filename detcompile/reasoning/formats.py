"""Formats in which thinking models write their reasoning, and readers of their answers."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

ParserName = Literal[
    "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "kimi_k2", "minimax_m2", "mistral", "none", "olmo3",
    "openai_gptoss", "qwen3", "seed_oss", "step3",
]  # fmt: skip
SPACE = " \t\r\n"
TAIL = 32  # tokens at a prompt's end that may hold a marker and whitespace


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


GPT_OSS = ReasoningParser("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>")  # read by Harmony
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


def thinking_of(parser: ReasoningParser | None, decode: Callable[..., str], prompt: Sequence[int]) -> Thinking | None:
    """Return how the reasoning after a prompt is read; None for none.

    A prompt that ends with the closing marker is how templates switch thinking off.

    Args:
        decode: the tokenizer's.
    """
    if parser is None:
        return None
    tail = decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip(SPACE)
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


def split_reasoning(text: str, thinking: Thinking) -> tuple[str, str]:
    """Return the reasoning and the content of a whole answer."""
    if thinking.parser != GPT_OSS.name:
        return Marked(PARSERS[thinking.parser], thinking.begun).feed(text, last=True)
    pieces = Harmony(calls=False).feed(text, last=True)
    reasoning, content = ("".join(piece.text for piece in pieces if piece.reasoning is part) for part in (True, False))
    return reasoning, content


class Vocabulary:
    """Ids of the tokens that stand for markers.

    Args:
        tokenizer: None for a model without one.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.added: dict[int, Any] = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()

    def token_id(self, text: str) -> int | None:
        """Return the id of the vocabulary's entry with this text; None if there is none."""
        return None if self._tokenizer is None else self._tokenizer.token_to_id(text)

    def added_id(self, text: str) -> int | None:
        """Return the id of an added token, special or not, by its text; None if there is none.

        llguidance keeps all added tokens out of free text.
        """
        token = self.token_id(text)
        return token if token in self.added else None

    def is_special(self, text: str) -> bool:
        """Return True if a text is one special token."""
        token = self.added_id(text)
        return token is not None and bool(self.added[token].special)


class Piece(NamedTuple):
    """New content or reasoning, or a call's name (once) or new part of its arguments.

    Attributes:
        call: index of the call; None for content.
        name: the function's name, only in a call's first piece.
        text: content, reasoning, or arguments as the model wrote them.
        reasoning: the text is reasoning.
    """

    call: int | None
    name: str | None
    text: str
    reasoning: bool = False


class Marked:
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


class Harmony:
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


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
