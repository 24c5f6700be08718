"""Incremental parser of answers: content and tool calls, however the text is cut.

Also the tool-call formats of models.
"""

import json
from collections.abc import Generator
from typing import Any, NamedTuple

from detcompile.reasoning.formats import SPACE, Piece, overlap

ARGUMENTS = ("arguments", "parameters")
SPLITS = "[ARGS]"  # between name and arguments in formats without a JSON object around both
MOST_ESCAPE = 12  # characters of a surrogate pair's two escapes
MOST_NAME = 256  # characters of a plain name up to and including its arguments' brace
MOST_DEPTH = 200  # nesting that json can encode even if Python's stack is already deep
Parser = Generator[None, None, bool]  # each yield waits for more text


class Family(NamedTuple):
    """A tool-call format: calls are JSON objects with a name and arguments.

    Attributes:
        opens: text before calls.
        closes: text after each call; "" for none.
        key: key of the arguments in a call.
        array: calls are in a JSON list, or each is a name, "[ARGS]" and its arguments.
        short_ids: templates need call ids of nine characters.
        bare: an answer that starts with a JSON object is a call, even without ``opens``.
        harmony: calls are messages of gpt-oss's format, which reasoning/formats.py reads.
    """

    name: str
    opens: str
    closes: str = ""
    key: str = "arguments"
    array: bool = False
    bare: bool = False
    short_ids: bool = False
    harmony: bool = False


HERMES = Family("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = Family("llama3", "<|python_tag|>", key="parameters", bare=True)
MISTRAL = Family("mistral", "[TOOL_CALLS]", array=True, short_ids=True)
OPENAI = Family("openai", "<|channel|>", harmony=True)
FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL, OPENAI)}


def family_of(template: str) -> Family | None:
    """Return the format whose markers a chat template contains; None if there are none."""
    for family in (OPENAI, HERMES, MISTRAL):
        if family.opens in template:
            return family
    return LLAMA3 if '"parameters":' in template else None


class Reader:
    """Reads one answer. A started call without a name is content.

    Attributes:
        num_calls: calls with a known name.
    """

    def __init__(self, family: Family) -> None:
        self.num_calls = 0
        self._family = family
        self._text = ""
        self._at = 0
        self._last = False
        self._pieces: list[Piece] = []
        self._parser = self._answer()

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """Append text and return the new pieces; with ``last``, also everything held back so far."""
        self._text += text
        self._last = last
        next(self._parser, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _answer(self) -> Parser:
        if self._family.bare:
            yield from self._space()
            if (yield from self._next_is("{")):
                yield from self._calls(0)
            else:
                self._at = 0
        while (yield from self._content()):
            start = self._at
            self._at += len(self._family.opens)
            yield from self._calls(start)
        return True

    def _content(self) -> Parser:
        """Parse content up to the next opening marker; return True if there is one."""
        opens = self._family.opens
        while True:
            position = self._text.find(opens, self._at)
            held = 0 if self._last else overlap(self._text[self._at :], opens)
            stop = position if position >= 0 else len(self._text) - held
            self._give(Piece(None, None, self._text[self._at : stop]))
            self._at = stop
            if position >= 0 or self._last:
                return position >= 0
            yield

    def _calls(self, start: int) -> Parser:
        """Parse the calls after an opening marker at ``start``, and the whitespace after them."""
        yield from self._space()
        family, before = self._family, self.num_calls
        listed = family.array and (yield from self._next_is("["))
        if listed or not family.array:
            self._at += listed
            while (yield from self._object()):
                yield from self._space()
                if not (yield from self._skip("," if listed else ";")):
                    break
                yield from self._space()
            yield from self._skip("]" if listed else family.closes)
        else:
            yield from self._named()
        if self.num_calls == before:
            self._give(Piece(None, None, self._text[start : self._at]))
            return False
        return (yield from self._space())

    def _named(self) -> Parser:
        """Parse a call in the form name, optional SPLITS, arguments."""
        start, end = self._at, self._at + MOST_NAME
        while "{" not in self._text[start:end] and not self._last and len(self._text) < end:
            yield
        name, brace, _ = self._text[start:end].partition("{")
        if not brace:
            return False  # the text may hold another call
        self._at += len(name)
        plain = name.strip(SPACE).removesuffix(SPLITS).strip(SPACE)
        if not plain:
            return False
        self._begin(plain)
        yield from self._value(self.num_calls - 1)
        return True

    def _object(self) -> Parser:
        """Parse a call in the form of a JSON object; return True if it is complete."""
        name: str | None = None
        arguments: str | None = None
        if not (yield from self._skip("{")):
            return False
        while True:
            yield from self._space()
            key = yield from self._string()
            yield from self._space()
            if key is None or not (yield from self._skip(":")):
                return False
            yield from self._space()
            if key in ARGUMENTS:
                call = None if name is None else self.num_calls - 1
                first = arguments is None
                if (yield from self._next_is("{")):
                    value: str | None = yield from self._value(call if first else None)
                else:
                    value = _arguments_of((yield from self._value(None)))
                    if first and value is not None and call is not None:
                        self._give(Piece(call, None, value))
                if call is not None and not first and value is not None:
                    return False  # duplicate key
                arguments = arguments if value is None else value
            elif key == "name" and name is None:
                name = yield from self._string()
                if name is None:
                    return False
                self._begin(name)
                if arguments is not None:
                    self._give(Piece(self.num_calls - 1, None, arguments))
            else:
                yield from self._value(None)
            yield from self._space()
            if not (yield from self._skip(",")):
                break
        whole = yield from self._skip("}")
        if whole and name is not None and arguments is None:
            self._give(Piece(self.num_calls - 1, None, "{}"))
        return whole and name is not None

    def _value(self, call: int | None) -> Generator[None, None, str]:
        """Parse a JSON value and return its text, sending it to ``call`` as it arrives.

        The character after a scalar is not read.
        """
        start = given = self._at
        depth, quoted, escaped = 0, False, False
        while True:
            over = False
            while self._at < len(self._text) and not over:
                letter = self._text[self._at]
                if quoted:
                    quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
                    over = not quoted and depth == 0
                elif depth == 0 and self._at > start and letter in ",}]" + SPACE:
                    break
                else:
                    quoted = letter == '"'
                    depth += (letter in "{[") - (letter in "}]")
                    over = letter in "}]" and depth <= 0
                self._at += 1
            if call is not None:
                self._give(Piece(call, None, self._text[given : self._at]))
                given = self._at
            if over or self._at < len(self._text) or self._last:
                return self._text[start : self._at]
            yield

    def _string(self) -> Generator[None, None, str | None]:
        """Parse a JSON string and return its value; None if there is none."""
        if not (yield from self._next_is('"')):
            return None
        try:
            value = read_json((yield from self._value(None)))
        except ValueError:
            return None
        assert isinstance(value, str)
        return value

    def _space(self) -> Parser:
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text) or self._last:
                return True
            yield

    def _next_is(self, mark: str) -> Parser:
        """Return True if the given text follows."""
        while not self._last and mark.startswith(self._text[self._at :]) and len(self._text) - self._at < len(mark):
            yield
        return self._text.startswith(mark, self._at)

    def _skip(self, mark: str) -> Parser:
        """Skip the given text if it follows; return True if it does. "" always follows."""
        follows = yield from self._next_is(mark)
        self._at += len(mark) if follows else 0
        return follows

    def _begin(self, name: str) -> None:
        self.num_calls += 1
        self._give(Piece(self.num_calls - 1, name, ""))

    def _give(self, piece: Piece) -> None:
        """Add a piece; join it with the previous one of the same call or content."""
        if self._pieces and piece.name is None and self._pieces[-1].call == piece.call:
            self._pieces[-1] = self._pieces[-1]._replace(text=self._pieces[-1].text + piece.text)
        elif piece.text or piece.name is not None:
            self._pieces.append(piece)


def read_json(text: str) -> Any:
    """Decode a text; lone surrogates, which UTF-8 cannot represent, are replaced.

    Raises:
        ValueError: invalid JSON, or too deep nesting.
    """
    try:
        return _repaired(json.loads(text), MOST_DEPTH)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _repaired(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, (dict, list)):
        return value
    if depth == 0:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} values")
    if isinstance(value, list):
        return [_repaired(item, depth - 1) for item in value]
    return {_repaired(name, 0): _repaired(item, depth - 1) for name, item in value.items()}


def _arguments_of(written: str) -> str | None:
    """Return arguments that are not a JSON object: a string that contains one is decoded, null becomes None."""
    if written == "null":
        return None
    cuts = (written[: len(written) - cut] + '"' for cut in range(MOST_ESCAPE))  # the text was cut within an escape
    for candidate in (written, *cuts):
        try:
            text = read_json(candidate)
        except ValueError:
            continue
        return text if isinstance(text, str) and text.lstrip(SPACE).startswith("{") else written
    return written
