"""Structured output: the grammar that a request asks for, by OpenAI's field or other servers'."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.schema import ChatRequest, CompletionRequest, ResponseFormat

__all__ = ["grammar_of"]

CONSTRAINTS = {  # fields that are one each, and their names among vLLM's structured_outputs
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


def grammar_of(asked: CompletionRequest | ChatRequest) -> Grammar | None:
    """The grammar of a request; None where it asks for none.

    Raises:
        HTTPError: several, or one that is none, by the field's name.
    """
    given: dict[str, Mapping[str, Any]] = {
        field: {name: value}
        for field, name in CONSTRAINTS.items()
        if (value := getattr(asked, field)) is not None and value is not False
    }
    if asked.structured_outputs is not None:
        given["structured_outputs"] = asdict(asked.structured_outputs)
    if asked.response_format is not None and asked.response_format.type != "text":
        given["response_format"] = _constraint(asked.response_format)
    if not given:
        return None
    name, constraint = next(iter(given.items()))
    if len(given) > 1:
        raise HTTPError(400, f"{' and '.join(given)} both say what the text must be: give one", param=name)
    try:
        return Grammar.of(constraint)
    except InvalidInput as error:
        raise HTTPError(400, f"{name}: {error}", param=name) from error


def _constraint(asked: ResponseFormat) -> dict[str, Any]:
    if asked.json_schema is None and asked.schema is not None:
        return {"json": asked.schema}
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.json_schema is None:
        raise HTTPError(400, "response_format.json_schema is missing", param="response_format.json_schema")
    return {"json": asked.json_schema.schema}
