"""Grammars of answers with reasoning: at most a budget of tokens up to the closing marker, then the answer.

The grammar is one of the request's parameters, so receipts, the journal and resumed answers have it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.reasoning.formats import GPT_OSS, PARSERS, Thinking, Vocabulary, searched_after
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.grammars.json_schemas import WHITESPACE
from detcompile.runtime.requests.sampling_params import SamplingParams

ADVICE = "switch thinking off in the chat template (chat_template_kwargs), or give a JSON schema, a regex or a choice"
MAX_REPEATS = (1 << 31) - 1  # llguidance's limit of a repetition, beyond any context
UNESCAPED_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def params_of_answers(
    params: SamplingParams, thinking: Thinking, vocabulary: Vocabulary, *, composed: bool, budget: int | None
) -> SamplingParams:
    """Return the parameters of answers with reasoning: grammar and stop strings begin after it, and markers are text.

    Args:
        composed, budget: see ``after_reasoning``.

    Raises:
        InvalidInput: the grammar cannot begin after the reasoning, or the budget cannot be kept.
    """
    grammar, parser = params.grammar, PARSERS[thinking.parser]
    if grammar is not None:
        grammar = after_reasoning(grammar, thinking, vocabulary.added_id, composed=composed, budget=budget)
    elif budget is not None:
        grammar = within_budget(thinking, vocabulary.token_id, budget)
    special = parser is GPT_OSS or any(map(vocabulary.is_special, (parser.opens, parser.closes)))
    return replace(
        params,
        grammar=grammar,
        skip_special_tokens=params.skip_special_tokens and not special,
        reasoning_markers=searched_after(thinking) if params.stop else None,
    )


def after_reasoning(
    grammar: Grammar,
    thinking: Thinking,
    token_of: Callable[[str], int | None],
    *,
    composed: bool,
    budget: int | None = None,
) -> Grammar:
    """Return the grammar of reasoning followed by text that matches a grammar, up to four spaces or newlines apart.

    The reasoning is optional unless the prompt opens it.

    Args:
        token_of: returns the id of a marker that is one token, or None.
        composed: the grammar is one of tools/grammars.py, which starts with its start rule.
        budget: most tokens between the markers; None for any number.

    Raises:
        InvalidInput: the grammar cannot be combined with reasoning, or a budget needs markers that are tokens.
    """
    parser = PARSERS[thinking.parser]
    if parser is GPT_OSS:
        raise InvalidInput("grammars after the reasoning of gpt-oss's format are not supported")
    answer, rules = _answer(grammar, composed=composed)
    opens, closes = ((json.dumps(mark) if (token := token_of(mark)) is None else f"<[{token}]>", token)
                     for mark in (parser.opens, parser.closes))  # fmt: skip
    if budget is not None:
        lines = [f"reasoning: {_thoughts(budget)} {closes[0]}", f"thought: <[^{_token(parser.closes, token_of)}]>"]
    elif closes[1] is not None:
        lines = [f"reasoning: REASONING {closes[0]}", r"REASONING: /(.|\n)*/"]
    else:  # the marker is text: end at its first occurrence
        lines = [rf"reasoning[lazy]: /(.|\n)*/ {closes[0]}"]
    before = "reasoning" if thinking.begun else f"(GAP {opens[0]} reasoning)?"
    return Grammar.lark("\n".join([f"start: {before} GAP ({answer})", r"GAP: /[ \n]{0,4}/", *lines, *rules]))


def within_budget(thinking: Thinking, token_of: Callable[[str], int | None], budget: int) -> Grammar:
    """Return the grammar of any answer whose reasoning ends after ``budget`` tokens between its markers.

    Until then every token may be drawn, so that an answer with less reasoning is the same as without a budget. In
    gpt-oss's format, another message must follow <|end|>, and the budget is that of all analysis messages before the
    first other one.

    Args:
        token_of: returns the id of a text that is one token, or None.

    Raises:
        InvalidInput: the markers are not tokens.
    """
    parser = PARSERS[thinking.parser]
    if parser is GPT_OSS:
        names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis")
        channel, message, end, start, analysis = (_token(name, token_of) for name in names)
        begins = f"<[{channel}]> <[{analysis}]> <[^{message}]>* <[{message}]> reasoning"
        next_channel = f"<[{end}]> <[{start}]> <[^{channel}]>* <[{channel}]>"
        lines = [
            f"start: ({begins} | <[{channel}]> <[^{analysis}]> <[*]>* | <[^{channel}]> <[*]>*)?",
            f"ending: {next_channel} <[^{analysis}]>",
            f"thought: <[^{end}]> | {next_channel} <[{analysis}]>",
        ]
    else:
        opens, closes = _token(parser.opens, token_of), _token(parser.closes, token_of)
        lines = [
            "start: reasoning" if thinking.begun else f"start: <[^{opens}]>* (<[{opens}]> reasoning)?",
            f"ending: <[{closes}]>",
            f"thought: <[^{closes}]>",
        ]
    cut = [] if budget == 0 else [_thoughts(budget - 1)]  # an end token may end the answer within its reasoning
    reasoning = " | ".join([f"{_thoughts(budget)} ending <[*]>*", *cut])
    return Grammar.lark("\n".join([*lines, f"reasoning: {reasoning}"]))


def _thoughts(most: int) -> str:
    return f"thought{{0,{min(most, MAX_REPEATS)}}}" if most else ""


def _token(text: str, token_of: Callable[[str], int | None]) -> int:
    token = token_of(text)
    if token is None:
        raise InvalidInput(f"a budget of thinking tokens needs a tokenizer in which {text} is one token")
    return token


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
