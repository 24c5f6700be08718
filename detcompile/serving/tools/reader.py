"""Reader: an answer's text, as it comes, to content and calls. A text has one reading, however it is cut."""

from collections.abc import Generator
from typing import NamedTuple

from detcompile.serving.tools.families import Family
from detcompile.serving.tools.written_json import read_json

__all__ = ["Piece", "Reader"]

SPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")
SPLITS = "[ARGS]"  # between a name and its arguments, where they are no JSON together
MOST_ESCAPE = 12  # letters of a surrogate pair's two escapes
MOST_NAME = 256  # letters of a name that is no JSON, up to its arguments and with their first one
Reading = Generator[None, None, bool]  # waits for more text at each yield


class Piece(NamedTuple):
    """What is new: content, or of a call its name, once, or a part of its arguments.

    Attributes:
        call: index of the call; None for content.
        name: the function's; None but in the first piece of a call.
        text: content, or arguments as the model wrote them.
    """

    call: int | None
    name: str | None
    text: str


class Reader:
    """Reads one answer. What was begun as a call and has no name is content.

    Attributes:
        num_calls: calls whose name is known.
    """

    def __init__(self, family: Family) -> None:
        self.num_calls = 0
        self._family = family
        self._text = ""
        self._at = 0
        self._last = False
        self._found: list[Piece] = []
        self._reading = self._answer()

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """What a text that goes on gives; with ``last`` also what is held back until then."""
        self._text += text
        self._last = last
        next(self._reading, None)
        found, self._found = self._found, []
        return found

    def _answer(self) -> Reading:
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

    def _content(self) -> Reading:
        """Up to what opens calls; whether there is any."""
        opens = self._family.opens
        while True:
            found = self._text.find(opens, self._at)
            held = 0 if self._last else _overlap(self._text[self._at :], opens)
            stop = found if found >= 0 else len(self._text) - held
            self._give(Piece(None, None, self._text[self._at : stop]))
            self._at = stop
            if found >= 0 or self._last:
                return found >= 0
            yield

    def _calls(self, start: int) -> Reading:
        """The calls behind what opens them, which stands at ``start``, and the spaces after them."""
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

    def _named(self) -> Reading:
        """A call that is a name, perhaps SPLITS, and arguments."""
        start, end = self._at, self._at + MOST_NAME
        while "{" not in self._text[start:end] and not self._last and len(self._text) < end:
            yield
        name, brace, _ = self._text[start:end].partition("{")
        if not brace:
            return False  # another call may open in there
        self._at += len(name)
        plain = name.strip(SPACE).removesuffix(SPLITS).strip(SPACE)
        if not plain:
            return False
        self._begin(plain)
        yield from self._value(self.num_calls - 1)
        return True

    def _object(self) -> Reading:
        """A call as a JSON object; whether it is whole."""
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
                    found: str | None = yield from self._value(call if first else None)
                else:
                    found = _arguments_of((yield from self._value(None)))
                    if first and found is not None and call is not None:
                        self._give(Piece(call, None, found))
                if call is not None and not first and found is not None:
                    return False  # twice
                arguments = arguments if found is None else found
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
        """A JSON value as it stands, given to ``call`` as it comes; what ends a scalar is not read."""
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
        """A JSON string's value; None where there is none."""
        if not (yield from self._next_is('"')):
            return None
        try:
            found = read_json((yield from self._value(None)))
        except ValueError:
            return None
        assert isinstance(found, str)
        return found

    def _space(self) -> Reading:
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text) or self._last:
                return True
            yield

    def _next_is(self, mark: str) -> Reading:
        """Whether a text stands here."""
        while not self._last and mark.startswith(self._text[self._at :]) and len(self._text) - self._at < len(mark):
            yield
        return self._text.startswith(mark, self._at)

    def _skip(self, mark: str) -> Reading:
        """Go behind a text that stands here; whether it does. Nothing stands everywhere."""
        found = yield from self._next_is(mark)
        self._at += len(mark) if found else 0
        return found

    def _begin(self, name: str) -> None:
        self.num_calls += 1
        self._give(Piece(self.num_calls - 1, name, ""))

    def _give(self, piece: Piece) -> None:
        """Give a piece; parts of one thing are joined."""
        if self._found and piece.name is None and self._found[-1].call == piece.call:
            self._found[-1] = self._found[-1]._replace(text=self._found[-1].text + piece.text)
        elif piece.text or piece.name is not None:
            self._found.append(piece)


def _arguments_of(written: str) -> str | None:
    """Arguments that are no JSON object: the text of one, decoded, or what is written; None for null."""
    if written == "null":
        return None
    cuts = (written[: len(written) - cut] + '"' for cut in range(MOST_ESCAPE))  # where the text was cut
    for whole in (written, *cuts):
        try:
            text = read_json(whole)
        except ValueError:
            continue
        return text if isinstance(text, str) and text.lstrip(SPACE).startswith("{") else written
    return written


def _overlap(text: str, mark: str) -> int:
    """Letters at the end of a text that may begin a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
