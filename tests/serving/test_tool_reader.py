"""Tool calls in texts: each family's format, broken calls, and the same result for every cut."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from detcompile.reasoning.formats import Piece
from detcompile.serving.tools.reader import FAMILIES, HERMES, LLAMA3, MISTRAL, Family, Reader, family_of

ONE = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
TWO = '{"arguments": {"x": "\\"{"}, "name": "sub"}'
SLASH = r'{"name": "open", "arguments": {"x": "C:\\", "y": "}"}}'
ADD, SUB = ("add", '{"a": 1, "b": [2, "}"]}'), ("sub", '{"x": "\\"{"}')
OPEN = ("open", r'{"x": "C:\\", "y": "}"}')
CASES = [
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", [ADD]),
    (HERMES, f"Well:\n<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n", "Well:\n", [ADD, SUB]),
    (HERMES, f"<tool_call>{ONE}</tool_call> and <tool_call>{TWO}</tool_call> more", "and more", [ADD, SUB]),
    (HERMES, f"<tool_call>{ONE}", "", [ADD]),
    (HERMES, f"<tool_call>{SLASH}</tool_call>\n<tool_call>{ONE}</tool_call>", "", [OPEN, ADD]),
    (HERMES, "<tool_call>nothing</tool_call> x", "<tool_call>nothing</tool_call> x", []),
    (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "id": 7, "arguments": {"a', "", [("add", '{"a')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', "",
     [("add", '{"a": "é"}')]),
    (HERMES, '<tool_call>{"arguments": " {\\"a\\": 1}", "name": "add"}', "", [("add", ' {"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud83d', "", [("add", '{"a": "\ufffd')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\u00', "", [("add", '{"a": "')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "Oslo"}</tool_call>', "", [("add", '"Oslo"')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1, {}]}</tool_call>', "", [("add", "[1, {}]")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": null}</tool_call>', "",
     [("add", '{"a": 1}')]),
    (LLAMA3, '{"name": "add", "parameters": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": "{\\"a\\": 1}"}]', "", [("add", '{"a": 1}')]),
    (HERMES, "a < b <tool_cal", "a < b <tool_cal", []),
    (HERMES, "", "", []),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "b", "parameters": {}}', "",
     [("add", "{}"), ("b", "{}")]),
    (LLAMA3, ' {"type": "function", "name": "add", "parameters": {"a": {}}}', "", [("add", '{"a": {}}')]),
    (LLAMA3, 'It is {"name": "add", "parameters": {}}', 'It is {"name": "add", "parameters": {}}', []),
    (LLAMA3, '{"no": "call"} at all', '{"no": "call"} at all', []),
    (LLAMA3, " plain", " plain", []),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}, {TWO}]", "", [ADD, SUB]),
    (MISTRAL, f"[TOOL_CALLS][{ONE}]", "", [ADD]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub{"b": {}}', "", [("add", '{"a": 1}'), ("sub", '{"b": {}}')]),
    (MISTRAL, "text [TOOL_CALLS] [] more", "text [TOOL_CALLS] [] more", []),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 300, "[TOOL_CALLS]" + "x" * 300, []),
    *((MISTRAL, f"[TOOL_CALLS]{'x' * size}[TOOL_CALLS]f{{}}", f"[TOOL_CALLS]{'x' * size}", [("f", "{}")])
      for size in (245, 250, 255, 256, 257, 300)),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 255 + "{}", "", [("x" * 255, "{}")]),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 256 + "{}", "[TOOL_CALLS]" + "x" * 256 + "{}", []),
    (MISTRAL, "[TOOL_CALLS]{}", "[TOOL_CALLS]{}", []),
]  # fmt: skip


def read(family: Family, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls that the pieces add up to."""
    reader, content, calls = Reader(family), "", []
    pieces: list[Piece] = []
    for index, part in enumerate(parts):
        pieces += reader.feed(part, last=index == len(parts) - 1)
    for piece in pieces:
        if piece.call is None:
            content += piece.text
        elif piece.name is not None:
            assert piece.call == len(calls)
            calls.append((piece.name, piece.text))
        else:
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    assert reader.num_calls == len(calls)
    return content, calls


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_each_family_is_parsed(family, text, content, calls) -> None:
    assert read(family, [text]) == (content, calls)
    assert all(read(family, [text[:at], text[at:]]) == (content, calls) for at in range(len(text)))
    assert read(family, [*text, ""]) == (content, calls)
    assert read(family, [text, ""]) == (content, calls)


TEXTS = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", ONE, TWO, "{", "}", '"name"', ":",
                     ",", "[", "]", ";", " ", "\n", '"a"', "\\", '"', "3", "[ARGS]", "arguments", "word", "<tool",
                     json.dumps(json.dumps({"é": '"'})), "\\ud83d\\ude00",
                     "x" * 100, "x" * 250]),
    max_size=14,
).map("".join)  # fmt: skip


@given(text=TEXTS, family=st.sampled_from(sorted(FAMILIES.values())), data=st.data())
@example(text='<tool_call>{"name":"a","arguments":{', family=HERMES, data=None)
def test_parsing_is_equal_for_any_chunking_and_loses_no_text(text, family, data) -> None:
    whole = read(family, [text])
    assert read(family, [*text, ""]) == whole
    if data is not None:
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
        assert read(family, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == whole
    if family.opens not in text and not family.bare:
        assert whole == (text, [])


def test_names_come_before_arguments_that_stream() -> None:
    reader = Reader(HERMES)
    assert reader.feed('hi <tool_call>{"name": "add", "argu') == [Piece(None, None, "hi "), Piece(0, "add", "")]
    assert reader.feed('ments": {"a"') == [Piece(0, None, '{"a"')]
    assert reader.feed(": 1}") == [Piece(0, None, ": 1}")]
    assert reader.feed("}</tool_call>", last=True) == []


def test_parsing_time_is_linear_in_call_length() -> None:
    arguments = json.dumps({"text": "x" * 300_000})
    parts = ['<tool_call>{"name": "f", "arguments": ', *(arguments[at : at + 8] for at in range(0, 300_000, 8))]
    _, [(_, actual)] = read(HERMES, [*parts, arguments[300_000:] + "}"])
    assert actual == arguments


def test_family_is_detected_from_template() -> None:
    assert family_of("... <tool_call></tool_call>") is HERMES and family_of("[TOOL_CALLS]") is MISTRAL
    assert family_of('{"name": function name, "parameters": ...}') is LLAMA3 and family_of("{{ messages }}") is None
