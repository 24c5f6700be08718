"""Grammars of answers with reasoning: free text up to the closing marker, then the request's grammar."""

import json
import re
from collections.abc import Callable
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.grammars.json_schemas import WHITESPACE
from detcompile.serving.reasoning import GPT_OSS, PARSERS, Thinking

__all__ = ["after_reasoning"]

ADVICE = "switch thinking off in the chat template (chat_template_kwargs), or give a JSON schema, a regex or a choice"
UNESCAPED_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def after_reasoning(
    grammar: Grammar, thinking: Thinking, token_of: Callable[[str], int | None], *, composed: bool
) -> Grammar:
    """Return the grammar of reasoning followed by text that matches a grammar, up to four spaces or newlines apart.

    The reasoning is optional unless the prompt opens it. It is part of the request's grammar, so that receipts, the
    journal and resumed answers have it.

    Args:
        token_of: returns the id of a marker that is one token, or None.
        composed: the grammar is one of tools/grammars.py, which starts with its start rule.

    Raises:
        InvalidInput: the grammar cannot be combined with reasoning.
    """
    parser = PARSERS[thinking.parser]
    if parser is GPT_OSS:
        raise InvalidInput("grammars after the reasoning of gpt-oss's format are not supported")
    answer, rules = _answer(grammar, composed=composed)
    opens, closes = ((json.dumps(mark) if (token := token_of(mark)) is None else f"<[{token}]>", token is not None)
                     for mark in (parser.opens, parser.closes))  # fmt: skip
    lines = [f"reasoning: REASONING {closes[0]}", r"REASONING: /(.|\n)*/"]
    if not closes[1]:  # the marker is text: end at its first occurrence
        lines = [rf"reasoning[lazy]: /(.|\n)*/ {closes[0]}"]
    before = "reasoning" if thinking.begun else f"({opens[0]} reasoning)?"
    return Grammar.lark("\n".join([f"start: {before} GAP ({answer})", r"GAP: /[ \n]{0,4}/", *lines, *rules]))


def _answer(grammar: Grammar, *, composed: bool) -> tuple[str, list[str]]:
    """Return a grammar as the right-hand side of a Lark rule, and further rules."""
    if grammar.kind in ("json_schema", "json_object"):
        schema: Any = json.loads(grammar.source) if grammar.source else {"type": "object"}
        if isinstance(schema, dict) and "x-guidance" in schema:
            raise InvalidInput("x-guidance sets options of llguidance, which are fixed here: leave it out")
        schema = ({} if schema is True else schema) | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return "answer", ["answer: %json " + json.dumps(schema, ensure_ascii=False)]
    if grammar.kind == "choice":
        return " | ".join(map(json.dumps, sorted(set(json.loads(grammar.source))))), []
    if grammar.kind == "regex":
        pattern = UNESCAPED_SLASH.sub(lambda match: match[1] or r"\/", grammar.source).replace("\n", r"\n")
        return f"/{pattern}/", []
    if not composed:
        raise InvalidInput(f"a {grammar.kind} grammar after reasoning is not supported: {ADVICE}")
    start, *rules = grammar.source.removeprefix("start: ").split("\n")
    return start, rules
