"""JSON schemas as masks: wrong values are rejected in every spelling, and no accepted prefix is a dead end."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from detcompile.errors import GenerationError, InvalidInput
from detcompile.runtime.grammars.compiler import GrammarCompiler
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.grammars.matcher import Matcher
from detcompile.serving.tools.grammars import Function, required_grammar
from detcompile.serving.tools.reader import HERMES

EOS = 256
INTEGER = {"type": "integer"}
CLOSED = {"additionalProperties": False}
LOOP = {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/y"}]}, "y": {"$ref": "#/$defs/x"}}}
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [  # a schema, right values, wrong values
    ({"type": "object", "properties": {"a": INTEGER}}, [{"a": 1}, {"b": "x"}], [{"a": "x"}, {"b": 1, "a": None}]),
    ({"type": "object", "properties": {"é": INTEGER, "😀": INTEGER}}, [{"é": 1, "😀": 2}, {"é😀": "x"}],
     [{"é": "x"}, {"😀": "x"}]),
    ({"type": "object", "properties": {"a/b": INTEGER, 'q"': INTEGER, "t\n": INTEGER}}, [{"a/b": 1, 'q"': 2, "t\n": 3}],
     [{"a/b": "x"}, {'q"': "x"}, {"t\n": "x"}]),
    ({"type": "object", "properties": {"\x01": INTEGER}}, [{"\x01": 1}], [{"\x01": "x"}]),
    ({"type": "object", "required": ["a"], "additionalProperties": INTEGER}, [{"a": 1}, {"a": 1, "b": 2}],
     [{"b": 1}, {"a": "x"}, {"a": 1, "é": "x"}]),
    ({"type": "object", "properties": {"a": INTEGER}, **CLOSED}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "é": 1}]),
    ({"type": "object", "patternProperties": {"^x": INTEGER}}, [{"xa": 1}, {"a": "x"}],
     [{"xa": "x"}, {"a": 1, "x": []}]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "object", "required": ["a"], "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}, {"b": 1}]),
    ({"type": "object", "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", "properties": {"a": False}}, [{"b": 1}], [{"a": 1}, {"b": 1, "a": 2}]),
    ({"anyOf": [{"const": {"é": [1, "y"]}}, {"type": "null"}]}, [{"é": [1, "y"]}, None], [{"é": [1, "z"]}, {}, "null"]),
    ({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": INTEGER}, **CLOSED}}},
     [{"a": {"b": 1}}], [{"a": {"b": "x"}}, {"a": {"c": 1}}]),
    ({"allOf": [{"type": "object", "properties": {"a": INTEGER}}, {"properties": {"a": {"minimum": 3}}}]}, [{"a": 3}],
     [{"a": 2}, {"a": "x"}]),
    ({"type": "string", "maxLength": 1}, ["a", "é", "😀", ""], ["ab", "é😀"]),
    ({"type": "string", "pattern": "^a+$"}, ["a"], ["b", "ab", "é"]),
    ({"enum": ["a", "é", "/"]}, ["a", "é", "/"], ["b", "a/", "éa"]),
    ({"type": "array", "items": {"type": "string", "minLength": 2}, "uniqueItems": False}, [["ab"], []],
     [["a"], ["é"]]),
    ({"type": "string", "format": "password"}, ["x"], [1, {}]),
]  # fmt: skip
REFUSED: list[tuple[Any, str]] = [
    ({"type": "object", "minProperties": 2}, "minProperties 2 is not kept"),
    ({"type": "object", "properties": {"a": {"type": "object", "minProperties": 3, "required": ["a"]}}},
     "minProperties 3"),
    ({"$ref": "#/definitions/a/b", "definitions": {"a": {"b": {"type": "object", "minProperties": 2}}}},
     "minProperties 2"),
    ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    ({"type": "object", "x-guidance": {"json_allowed_escapes": "u"}}, "x-guidance"),
    (False, "object or true"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, "use anyOf"),
    ({"$ref": "#"}, "leads only to itself"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, **LOOP}, "leads only to itself"),
    ({"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^a$": INTEGER}, **CLOSED},
     "patternProperties"),
    ({"type": "object", "required": ["a"], "patternProperties": {"^a$": True, "x": False}, **CLOSED},
     "patternProperties"),
    ({"type": "object", "properties": {"a": {"enum": ["\x01", "\x7f"]}}}, "without"),
    ({"type": "array", "items": {"const": {"a": ["\x00"]}}}, "without"),
    ({"type": "array", "items": {"type": "string", "pattern": "^[\\x01-\\x03]$"}}, "without"),
    ({"type": "array", "items": {"type": "number", "minimum": 0.1, "maximum": 0.15, "multipleOf": 0.1}}, "no number"),
]  # fmt: skip
SERVED: list[Any] = [  # what is like one of these, and served
    {"type": "object", "properties": {"x-a": INTEGER}, "patternProperties": {"^x-": INTEGER}, **CLOSED},
    {"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^a$": INTEGER, "^b$": True}, **CLOSED},
    {"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^a$": INTEGER}},
    {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, **CLOSED},
    {"type": "array", "items": {"type": "string", "pattern": "^[\\u0041-\\u0043]+$"}},
    {"type": "array", "items": {"enum": ["\x01", "a"]}},
    {"type": "integer", "minimum": 3, "maximum": 9, "multipleOf": 4},
    {"type": "object", "properties": {"uniqueItems": {"const": False}, "minProperties": INTEGER}},
    True,
]


@functools.cache
def compiler_of_bytes() -> GrammarCompiler:
    """Of a tokenizer with a token for each byte, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return GrammarCompiler(SimpleNamespace(backend_tokenizer=backend), EOS + 1, [EOS])


@functools.cache
def ids_of_bytes() -> dict[int, int]:
    backend = compiler_of_bytes()._given.backend_tokenizer
    return {byte: backend.encode(chr(byte)).ids[-1] for byte in range(128)} | {
        text.encode()[place]: token
        for code in (*range(0x80, 0x800, 0x20), *range(0x80, 0xC0), *range(0x800, 0x10FFFF, 0x1000))
        if not 0xD800 <= code < 0xE000
        for text in [chr(code)]
        for place, token in enumerate(backend.encode(text).ids)
    }


def takes(start: Matcher, text: str) -> bool:
    """Whether masks let a text be drawn, and end."""
    matcher = start.copy()
    for byte in text.encode():
        token = ids_of_bytes()[byte]
        if not int(matcher.mask()[token // 32]) >> token % 32 & 1:
            return False
        matcher.append(token)
    return bool(int(matcher.mask()[EOS // 32]) >> EOS % 32 & 1)


def started(grammar: Grammar) -> Matcher:
    return compiler_of_bytes().matcher(grammar, (EOS,))


def _units(text: str) -> list[str]:
    """Escapes of all its letters, those beyond 16 bits as surrogate pairs."""
    data = text.encode("utf-16-be", "surrogatepass")
    return [f"\\u{data[at] << 8 | data[at + 1]:04x}" for at in range(0, len(data), 2)]


SPELLINGS: list[Callable[[str], str]] = [
    lambda text: json.dumps(text, ensure_ascii=False),
    lambda text: json.dumps(text),
    lambda text: json.dumps(text, ensure_ascii=False).replace("/", "\\/"),
    lambda text: f'"{"".join(_units(text))}"',
    lambda text: f'"{"".join(unit.upper().replace("U", "u") for unit in _units(text))}"',
    lambda text: f'"{"".join(_units(text[:1]))}{json.dumps(text[1:], ensure_ascii=False)[1:]}',
    lambda text: f'{json.dumps(text[:-1], ensure_ascii=False)[:-1]}{"".join(_units(text[-1:]))}"',
]


def written(value: Any, name: Callable[[str], str], string: Callable[[str], str], before: Any) -> str:
    """A value as JSON; ``before``, unless it is Ellipsis, stands under each name first, where parsers take the last."""
    if isinstance(value, str):
        return string(value)
    if isinstance(value, list):
        return "[" + ", ".join(written(item, name, string, before) for item in value) + "]"
    if isinstance(value, dict):
        parts = [f"{name(key)}: {written(item, name, string, before)}" for key, item in value.items()]
        doubles = [] if before is ... else [f"{name(key)}: {json.dumps(before)}" for key in value]
        return "{" + ", ".join([*doubles, *parts]) + "}"
    return json.dumps(value)


def spellings(value: Any) -> Iterator[str]:
    """All texts are one value to parsers."""
    doubles = (..., 1, "x") if "{" in json.dumps(value) else (...,)
    actual = {written(value, *how) for how in itertools.product(SPELLINGS, SPELLINGS, doubles)}
    assert all(json.loads(text) == value for text in actual)
    yield from actual


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS, ids=[json.dumps(item[0])[:40] for item in SCHEMAS])
def test_no_spelling_of_a_wrong_value_is_taken(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    rule = f"start: value\nvalue: %json {json.dumps(schema)}"
    for grammar in (Grammar.json_schema(schema), Grammar.lark(rule)):
        start = started(grammar)
        for value in right:
            assert takes(start, json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")), value
        assert [text for value in wrong for text in spellings(value) if takes(start, text)] == []


def test_no_spelling_of_wrong_arguments_is_taken() -> None:
    schema = {"type": "object", "properties": {"é": INTEGER}}
    start = started(required_grammar(HERMES, [Function("f", schema)], lambda _: None, single=True))
    call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    assert takes(start, call.format('{"é": 1, "b": "x"}'))
    assert not [text for text in spellings({"b": 1, "é": "x"}) if takes(start, call.format(text))]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_unsupported_schema_keyword_is_rejected_by_name(schema: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        started(Grammar.json_schema(schema))
    if isinstance(schema, dict):
        titled = json.dumps({"title": "the tool", "type": "object", **schema})
        with pytest.raises(InvalidInput, match="x-guidance" if message == "x-guidance" else "the tool"):
            started(Grammar.lark(f"start: value\nvalue: %json {titled}"))


@given(data=st.data())
@pytest.mark.parametrize("schema", SERVED, ids=lambda schema: json.dumps(schema)[:40])
def test_no_allowed_prefix_is_a_dead_end(schema: Any, data: st.DataObject) -> None:
    matcher = started(Grammar.json_schema(schema))
    preferred = {ids_of_bytes()[byte] for byte in b'{}[]":,ab0123456789x-'}
    for _ in range(30):
        allowed = [token for token in range(EOS) if int(matcher.mask()[token // 32]) >> token % 32 & 1]
        if not allowed:
            assert matcher.complete
            return
        matcher.append(data.draw(st.sampled_from(sorted(preferred & set(allowed)) or allowed)))


def test_an_end_that_was_not_foreseen_has_its_reason() -> None:
    matcher = started(Grammar.lark('start: "a" B\nB: /b/ & /c/'))
    with pytest.raises(GenerationError, match="neither a token nor the end"):
        matcher.append(ids_of_bytes()[ord("a")])


def test_json_schemas_inside_lark_are_parsed() -> None:
    source = 'start: "%json {" / %json x/ <%json> own // %json {"x-guidance": 3}\nown: %json {"type":"boolean"}'
    assert Grammar.lark(source)
    with pytest.raises(InvalidInput, match="special"):  # of this tokenizer's tokens none is called %json
        started(Grammar.lark(source))
    assert takes(started(Grammar.lark(source.replace("<%json>", ""))), "%json { %json xtrue")
    layout = '{"x-guidance": {"item_separator": " ; "}, "type": "array", "items": {"type": "null"}}'
    assert takes(started(Grammar.lark(f"start: own\nown: %json {layout}")), "[null ; null]")


CONTROLS = ["\x00", "\x01", "\x0b", "\x1f", "\x7f"]  # that have no escape but \u, or that llguidance gives none


@pytest.mark.parametrize("letter", CONTROLS)
def test_no_text_is_taken_without_its_control_letters(letter: str) -> None:
    text, number = f"a{letter}b", f"\\x{ord(letter):02x}"
    names = {"additionalProperties": False, "required": []}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"const": text}, '"ab"'),
        ({"const": [{"c": text}]}, '[{"c": "ab"}]'),
        ({"const": {text: 1}}, '{"ab": 1}'),
        ({"enum": [text, "c"]}, '"ab"'),
        ({"enum": [[text], "c"]}, '["ab"]'),
        ({"items": {"anyOf": [{"const": text}, {"const": "c"}]}}, '["ab"]'),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"enum": [text, "c"]}}}, '"ab"'),
        *[
            case
            for pattern in (
                text,
                f"a{number}b",
                f"a\\u{ord(letter):04x}b",
                f"a\\x{{{ord(letter):x}}}b",
                f"a[{number}]b",
            )
            for case in (
                ({"type": "string", "pattern": f"^(c|{pattern})$"}, '"ab"'),
                (
                    {"type": "object", "patternProperties": {f"^(c|{pattern})$": {"type": "integer"}}, **names},
                    '{"ab": 1}',
                ),
            )
        ],
    ]
    for schema, wrong in cases:
        try:
            start = started(Grammar.json_schema(schema))
        except InvalidInput as refusal:
            assert "\\u" in str(refusal)
            continue
        assert not takes(start, wrong), schema
        rest = "c" if "c" in json.dumps(schema) else None
        assert rest is None or any(takes(start, text) for text in ('"c"', '{"c": 1}', '["c"]', "[]")), schema


def test_classes_of_letters_keep_those_that_can_be_written() -> None:
    for pattern, right in (
        (r"^[^\x00-\x1f]+$", "ab"),
        (r"^a[\x00-\x20]b$", "a b"),
        (r"^\\x01$", "\\x01"),
        ("^a\x01*b$", "ab"),
    ):
        assert takes(started(Grammar.json_schema({"type": "string", "pattern": pattern})), json.dumps(right)), pattern
