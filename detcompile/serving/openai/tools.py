"""Tools of a request: which functions may or must be called, and the calls in its answers."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from detcompile.errors import InvalidInput
from detcompile.reasoning.formats import Piece, Thinking
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.schema import NamedTool, Tool, ToolChoice
from detcompile.serving.reasoning import AnswerReader
from detcompile.serving.service import Service
from detcompile.serving.tools.grammars import Function, free_grammar, required_grammar
from detcompile.serving.tools.reader import FAMILIES, Family

MOST_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}  # of a function without parameters


class ToolUse(NamedTuple):
    """How a request uses tools.

    Attributes:
        tools: functions for the template.
        grammar: constraint on the answers; None for free text.
        named: one given function must be called; like OpenAI, finish_reason is then "stop".
    """

    family: Family
    tools: Sequence[Tool]
    grammar: Grammar | None
    named: bool


def tool_use(
    service: Service, tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """Return how a request uses tools; None if no function may be called.

    Raises:
        HTTPError: an unknown chosen tool, parameters that are not an object, or a chat template without tools.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise HTTPError(400, "tool_choice requires a call, but there are no tools", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    if len(tools) > MOST_TOOLS or len(set(names)) < len(names):
        raise HTTPError(400, f"tools has more than {MOST_TOOLS} entries, or two with the same name", param="tools")
    for tool in tools:
        _require_object(tool)
    if choice == "none":
        return None
    if service.tool_template is None or not service.tool_template.takes_tools or service.tool_family is None:
        message = "the model's chat template has no tools, or its tool-call format is unknown (--tool-parser)"
        raise HTTPError(400, f"tools: {message}", param="tools", code="unsupported_parameter")
    wanted = list(tools)
    if isinstance(choice, NamedTool):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise HTTPError(400, f"tool_choice: no tool is named {choice.function.name!r}", param="tool_choice")
    named = isinstance(choice, NamedTool)
    grammar = _grammar(service, wanted, required=choice not in (None, "auto"), single=named or parallel is False)
    return ToolUse(service.tool_family, tools, grammar, named)


def _require_object(tool: Tool) -> None:
    """Reject parameters that are not the schema of an object.

    Raises:
        HTTPError: names the function.
    """
    name, schema = tool.function.name, tool.function.parameters or {}
    message = None
    if schema.get("type", "object") != "object":
        message = f'must be the schema of an object, "type": "object", and not {str(schema["type"])[:40]!r}'
    elif "x-guidance" in schema:
        message = "contain x-guidance, whose options are fixed here: omit it"
    if message is not None:
        raise HTTPError(400, f"tools: the parameters of {name!r} {message}", param="tools")


def _grammar(service: Service, tools: Sequence[Tool], *, required: bool, single: bool) -> Grammar | None:
    functions = [
        Function(spec.name, NO_PARAMETERS if spec.parameters is None else spec.parameters, bool(spec.strict))
        for spec in (tool.function for tool in tools)
    ]
    family = service.tool_family
    assert family is not None
    if family.harmony:  # its messages hold one call each
        if required or any(function.strict for function in functions):
            message = "required, named and strict functions are not supported in gpt-oss's format"
            raise HTTPError(400, f"tools: {message}", param="tools", code="unsupported_parameter")
        return None
    try:
        if required:
            return required_grammar(family, functions, service.texts.vocabulary.added_id, single=single)
        if single or any(function.strict for function in functions):
            return free_grammar(family, functions, service.texts.vocabulary.added_id, single=single)
    except InvalidInput as error:
        raise HTTPError(400, f"tools: {error}", param="tools") from error
    return None


def recorded_use(family: str | None, choice: ToolChoice | None) -> ToolUse | None:
    """Return how to read the calls in an answer, by the family that its job names; None for an answer without calls.

    The server's template and family may have changed since the answer was drawn.
    """
    return None if family is None else ToolUse(FAMILIES[family], (), None, isinstance(choice, NamedTool))


class AnswerParts:
    """Reasoning, content and calls in the text of one choice.

    Args:
        thinking: how to read reasoning; None for none.
        use: the request's tools; None if no tool may be called.
        name: unique prefix of the ids of its calls.
    """

    def __init__(self, thinking: Thinking | None, use: ToolUse | None, name: str) -> None:
        self._reader = AnswerReader(thinking, None if use is None else use.family)
        self._named = use is not None and use.named
        self._name = name

    def read(self, text: str, *, last: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the reasoning, the content and the deltas of calls in new text."""
        reasoning = content = ""
        calls: dict[int, dict[str, Any]] = {}
        for piece in self._reader.feed(text, last=last):
            if piece.reasoning:
                reasoning += piece.text
            elif piece.call is None:
                content += piece.text
            elif piece.call in calls:
                calls[piece.call]["function"]["arguments"] += piece.text
            else:
                calls[piece.call] = self._delta(piece.call, piece)
        return reasoning, content, list(calls.values())

    def reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason for a choice with these calls."""
        return "tool_calls" if reason == "stop" and self._reader.num_calls and not self._named else reason

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        if piece.name is None:
            return {"index": index, "function": {"arguments": piece.text}}
        function = {"name": piece.name, "arguments": piece.text}
        return {"index": index, "id": call_id(self._name, index), "type": "function", "function": function}


def call_id(name: str, index: int) -> str:
    """Return the id of a call, derived from the answer's, so that it is the same every time."""
    return "call_" + hashlib.sha256(f"{name}/{index}".encode()).hexdigest()[:24]
