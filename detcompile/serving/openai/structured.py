"""Structured output: the grammar of a request, from OpenAI's field or other servers'."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.schema import ChatRequest, CompletionRequest, ResponseFormat

__all__ = ["grammar_of"]

CONSTRAINTS = {  # fields with one constraint, and its name in vLLM's structured_outputs
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",  # llama.cpp's and SGLang's
    "regex": "regex",  # SGLang's
    "grammar": "grammar",  # llama.cpp's
    "ebnf": "grammar",  # SGLang's
}


def grammar_of(request: CompletionRequest | ChatRequest) -> Grammar | None:
    """Return the grammar of a request; None without a constraint.

    Raises:
        HTTPError: several constraints or an invalid one; names the field.
    """
    constraints: dict[str, Mapping[str, Any]] = {
        field: {name: value}
        for field, name in CONSTRAINTS.items()
        if (value := getattr(request, field)) is not None and value is not False
    }
    if request.structured_outputs is not None:
        constraints["structured_outputs"] = asdict(request.structured_outputs)
    if request.response_format is not None and request.response_format.type != "text":
        constraints["response_format"] = _constraint(request.response_format)
    if not constraints:
        return None
    name, constraint = next(iter(constraints.items()))
    if len(constraints) > 1:
        raise HTTPError(400, f"{' and '.join(constraints)} both constrain the text: give one", param=name)
    try:
        return Grammar.of(constraint)
    except InvalidInput as error:
        raise HTTPError(400, f"{name}: {error}", param=name) from error


def _constraint(response_format: ResponseFormat) -> dict[str, Any]:
    if response_format.json_schema is None and response_format.schema is not None:
        return {"json": response_format.schema}
    if response_format.type == "json_object":
        return {"json_object": True}
    if response_format.json_schema is None:
        raise HTTPError(400, "response_format.json_schema is missing", param="response_format.json_schema")
    return {"json": response_format.json_schema.schema}
