"""Grammars of tool calls: texts that Reader parses as calls of known functions with valid arguments."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.tools.reader import SPLITS, Family

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # JSON as templates write it
ANYTHING = r"/(.|\n)*/"


class Function(NamedTuple):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: enforce the schema in every call.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False


def required_grammar(
    family: Family, functions: Sequence[Function], token_of: Callable[[str], int | None], *, single: bool
) -> Grammar:
    """Return the grammar of one or more calls with valid arguments and nothing else.

    Args:
        token_of: returns the id of an added token by its text, or None.
        single: allow one call only.
    """
    opens = _mark(family.opens, token_of)
    if family.array and token_of(SPLITS) is not None:
        rules, calls = _named_rules(functions, SPLITS, token_of), f"{opens} function"
        start = calls if single else f"({calls})+"
    else:
        rules = _object_rules(functions, family.key)
        if family.array:
            start = f'{opens} "[" function' + ("" if single else ' (", " function)*') + ' "]"'
        elif family.bare:
            start = "function" if single else 'function ("; " function)*'
        else:
            call = rf'{opens} "\n" function "\n" {_mark(family.closes, token_of)}'
            start = call if single else rf'{call} ("\n" {call})*'
    return Grammar.lark("\n".join([f"start: {start}", *rules]))


def free_grammar(
    family: Family, functions: Sequence[Function], token_of: Callable[[str], int | None], *, single: bool
) -> Grammar:
    """Return the grammar of any text with or without calls; arguments of strict functions must match their schemas.

    Args:
        token_of, single: see ``required_grammar``.
    """
    loose = [each if each.strict else each._replace(parameters={"type": "object"}) for each in functions]
    alone = single or not family.array or token_of(SPLITS) is not None
    calls = required_grammar(family, loose, token_of, single=alone).source.removeprefix("start: ")
    first, _, rules = calls.partition("\n")
    opens = _mark(family.opens, token_of)
    if family.bare:
        tagged = "" if opens.startswith('"') else f" | {opens} calls"
        more = "" if single else ' ("; " function)*'
        text = r"TEXT: /[ \t\r\n]*[^ \t\r\n{](.|\n)*/"
        return Grammar.lark("\n".join([f"start: (calls{tagged} | TEXT)?", f"calls: function{more}", text, rules]))
    body = first.removeprefix(opens)
    begins = f"TEXT {opens}" if not opens.startswith('"') else "opening"
    lines = [f"start: {'call | TEXT' if single else 'call* TEXT'}", f"call: {begins}{body}", f"TEXT: {ANYTHING}"]
    if begins == "opening":
        lines.append(f"opening[lazy]: {ANYTHING} {opens}")
    return Grammar.lark("\n".join([*lines, rules]))


def _object_rules(functions: Sequence[Function], key: str) -> list[str]:
    rules = ["function: " + " | ".join(f"function_{place}" for place in range(len(functions)))]
    for place, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{key}": ')
        rules.append(f'function_{place}: {head} arguments_{place} "}}"')
        rules.append(f"arguments_{place}: {_schema(function)}")
    return rules


def _named_rules(functions: Sequence[Function], splits: str, token_of: Callable[[str], int | None]) -> list[str]:
    rules = ["function: " + " | ".join(f"function_{place}" for place in range(len(functions)))]
    for place, function in enumerate(functions):
        rules.append(f"function_{place}: {json.dumps(function.name)} {_mark(splits, token_of)} arguments_{place}")
        rules.append(f"arguments_{place}: {_schema(function)}")
    return rules


def _schema(function: Function) -> str:
    schema = {"type": "object", **function.parameters, "title": function.name, "x-guidance": COMPACT}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _mark(text: str, token_of: Callable[[str], int | None]) -> str:
    """Return a text, or its token, as a Lark terminal."""
    token = token_of(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
