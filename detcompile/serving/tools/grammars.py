"""Grammars of calls: texts that a Reader reads as calls of known functions, with arguments of their schemas."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.tools.families import Family
from detcompile.serving.tools.reader import SPLITS

__all__ = ["Function", "free_grammar", "required_grammar"]

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates show JSON
ANYTHING = r"/(.|\n)*/"


class Function(NamedTuple):
    """A function that may be called.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: arguments match it wherever the function is called.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False


def required_grammar(
    family: Family, functions: Sequence[Function], token_of: Callable[[str], int | None], *, single: bool
) -> Grammar:
    """Nothing but calls: one at least, with arguments that match their schemas.

    Args:
        token_of: the id of a special token, by its text; None where it is none.
        single: one at most.
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
    """Any text, with calls in it or none: functions that are strict have arguments that match their schemas.

    Args:
        token_of, single: the same as of ``required_grammar``.
    """
    known = [own if own.strict else own._replace(parameters={"type": "object"}) for own in functions]
    alone = single or not family.array or token_of(SPLITS) is not None
    calls = required_grammar(family, known, token_of, single=alone).source.removeprefix("start: ")
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
    for place, own in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(own.name)}, "{key}": ')
        rules.append(f'function_{place}: {head} arguments_{place} "}}"')
        rules.append(f"arguments_{place}: {_schema(own)}")
    return rules


def _named_rules(
    functions: Sequence[Function], splits: str, token_of: Callable[[str], int | None]
) -> list[str]:
    rules = ["function: " + " | ".join(f"function_{place}" for place in range(len(functions)))]
    for place, own in enumerate(functions):
        rules.append(f"function_{place}: {json.dumps(own.name)} {_mark(splits, token_of)} arguments_{place}")
        rules.append(f"arguments_{place}: {_schema(own)}")
    return rules


def _schema(function: Function) -> str:
    schema = {"type": "object", **function.parameters, "title": function.name, "x-guidance": COMPACT}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _mark(text: str, token_of: Callable[[str], int | None]) -> str:
    """A text, or the special token of it, as Lark has it."""
    token = token_of(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
