"""Request fields to SamplingParams, always with a seed, so that every answer can be reproduced."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from msgspec.structs import asdict

from detcompile.errors import InvalidInput
from detcompile.reasoning.formats import Thinking
from detcompile.reasoning.grammars import params_of_answers
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.http_errors import HTTPError, error_of
from detcompile.serving.openai.schema import ChatRequest, CompletionRequest, ResponseFormat
from detcompile.serving.openai.tools import ToolUse
from detcompile.serving.receipts.receipt import MAX_STOPS
from detcompile.serving.service import Service

MAX_PROMPTS = 2048
MOST_MASKED = 2048  # tokens of a sampling mask
FRESH_SEEDS = 1 << 53  # exact in JavaScript's numbers
NAMES = frozenset(field.name for field in fields(SamplingParams))
SAME = (  # fields with the same name and meaning in SamplingParams
    "n", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "allowed_token_ids",
)  # fmt: skip
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


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of POST /v1/completions. For max_tokens 0, one token is drawn and hidden.

    Args:
        defaults: values of omitted fields; its max_tokens also caps the request's.

    Raises:
        HTTPError: names a field that is out of range.
    """
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise HTTPError(400, "best_of must equal n: no more samples are drawn than returned", param="best_of")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise HTTPError(400, f"max_tokens {request.max_tokens} must be at least 0", param="max_tokens")
    if request.max_tokens == 0 and (request.min_tokens or 0) > 0:
        raise HTTPError(400, "min_tokens is above max_tokens", param="min_tokens")
    echoed = request.logprobs if request.echo else None
    of_prompt = [count for count in (echoed, request.prompt_logprobs) if count is not None]
    length = None if request.max_tokens is None else max(1, request.max_tokens)
    others: dict[str, Any] = {"logprobs": request.logprobs, "grammar": grammar_of(request)}
    others["prompt_logprobs"] = max(of_prompt, default=None)
    return _params(request, defaults, length, **others)


def chat_params(request: ChatRequest, defaults: Mapping[str, Any], use: ToolUse | None = None) -> SamplingParams:
    """Return the parameters of POST /v1/chat/completions. Without a limit, the answer may fill the context.

    Args:
        defaults: values of omitted fields; its max_tokens also caps the request's.
        use: the request's tools.

    Raises:
        HTTPError: names a field that is out of range.
    """
    if request.echo:
        raise HTTPError(400, "echo is only supported by /v1/completions", param="echo")
    if request.top_logprobs is not None and not request.logprobs:
        raise HTTPError(400, "top_logprobs requires logprobs: true", param="top_logprobs")
    length = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    others: dict[str, Any] = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
    others["prompt_logprobs"] = request.prompt_logprobs
    if use is not None:
        others["skip_special_tokens"] = False  # some formats write calls with them
    return _params(request, defaults, length, grammar=_with_tools(grammar_of(request), use), **others)


def with_reasoning(
    params: SamplingParams, service: Service, thinking: Thinking | None, use: ToolUse | None, budget: int | None
) -> SamplingParams:
    """Return the parameters of answers with reasoning: grammar and stop strings begin after it, and markers are text.

    Args:
        budget: most tokens of the reasoning; None for any number.

    Raises:
        HTTPError: the grammar cannot begin after reasoning, or the budget cannot be kept.
    """
    if budget is not None and service.reasoning_parser is None:
        message = "a budget of thinking tokens needs the format of the model's reasoning (--reasoning-parser)"
        raise HTTPError(400, message, param="thinking_token_budget", code="unsupported_parameter")
    if thinking is None:
        return params
    composed = use is not None and use.grammar is not None
    try:
        return params_of_answers(params, thinking, service.texts.vocabulary, composed=composed, budget=budget)
    except InvalidInput as error:
        constrained = "tools" if composed else "structured_outputs"
        param = "thinking_token_budget" if params.grammar is None else constrained
        raise HTTPError(400, f"{param}: {error}", param=param, code="unsupported_parameter") from error


def prompts_of(prompts: str | Sequence[str | int | list[int]], param: str) -> list[str | list[int]]:
    """Return the prompts of a request, one or many, each a text or token ids.

    Args:
        param: the request field.

    Raises:
        HTTPError: none, too many, or a mix of tokens and prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(part, int) for part in prompts):
        return [prompts]  # type: ignore[list-item]
    if not prompts or len(prompts) > MAX_PROMPTS or any(isinstance(part, int) for part in prompts):
        wanted = f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these"
        raise HTTPError(400, f"{param} must be {wanted}", param=param)
    return prompts  # type: ignore[return-value]


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
    response_format = None if request.response_format is None else _constraint(request.response_format)
    if response_format is not None:
        constraints["response_format"] = response_format
    if not constraints:
        return None
    name, constraint = next(iter(constraints.items()))
    if len(constraints) > 1:
        raise HTTPError(400, f"{' and '.join(constraints)} both constrain the text: give one", param=name)
    try:
        return Grammar.of(constraint)
    except InvalidInput as error:
        raise HTTPError(400, f"{name}: {error}", param=name) from error


def _constraint(response_format: ResponseFormat) -> dict[str, Any] | None:
    """Return the constraint of a response_format; None for free text.

    Raises:
        HTTPError: a schema that the type does not use, two schemas, or a missing one.
    """
    kind, json_schema, schema = response_format.type, response_format.json_schema, response_format.schema
    fault = None
    if json_schema is not None and (kind != "json_schema" or schema is not None):
        fault = f"response_format.json_schema requires type json_schema and no schema beside it; type is {kind}"
    elif schema is not None and kind == "text":
        fault = "response_format.schema requires type json_object or json_schema; type is text"
    elif kind == "json_schema" and json_schema is None and schema is None:
        fault = "response_format.json_schema is missing"
    if fault is not None:
        raise HTTPError(400, fault, param=fault.split(" ", 1)[0])
    if json_schema is not None:
        return {"json": json_schema.schema}
    if schema is not None:
        return {"json": schema}
    return {"json_object": True} if kind == "json_object" else None


def _with_tools(requested: Grammar | None, use: ToolUse | None) -> Grammar | None:
    if requested is not None and use is not None:
        raise HTTPError(400, "tools and response_format cannot be combined: give one", param="tools")
    return requested if use is None else use.grammar


def _require_stream_options(request: CompletionRequest | ChatRequest) -> None:
    options = request.stream_options
    message = None
    if options is not None and not request.stream:
        message = "stream_options requires stream: true"
    elif options is not None and options.continuous_usage_stats and not options.include_usage:
        message = "stream_options: continuous_usage_stats requires include_usage: true"
    if message is not None:
        raise HTTPError(400, message, param="stream_options")


def _params(
    request: CompletionRequest | ChatRequest, defaults: Mapping[str, Any], length: int | None, **others: Any
) -> SamplingParams:
    _require_stream_options(request)
    params = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    lengths = [most for most in (length, defaults.get("max_tokens")) if most is not None]
    fixed = {"max_tokens": min(lengths, default=None), "seed": _seed(request)}
    if len(request.stop or ()) > MAX_STOPS and isinstance(request.stop, list):
        raise HTTPError(400, f"stop has more than {MAX_STOPS} strings", param="stop")
    _require_digits(request.logit_bias or {})
    try:
        return _reported(request, SamplingParams(**{**defaults, **params, **others, **fixed}))
    except InvalidInput as error:
        raise error_of(error, NAMES) from error


def _reported(request: CompletionRequest | ChatRequest, params: SamplingParams) -> SamplingParams:
    """Return the parameters with the log-probabilities that a request wants of the distributions drawn from.

    Raises:
        HTTPError: they need logprobs, or a mask may have the vocabulary's size.
    """
    names = [name for name in ("return_sampling_mask", "return_sampling_logprobs") if getattr(request, name)]
    if names and params.logprobs is None:
        raise HTTPError(400, f"{names[0]} requires logprobs", param=names[0])
    if request.return_sampling_mask:
        size = 1 if params.greedy else params.top_k
        if not 1 <= size <= MOST_MASKED:
            wanted = f"temperature 0, or top_k from 1 to {MOST_MASKED}, which bounds the mask's size"
            raise HTTPError(400, f"return_sampling_mask requires {wanted}", param="return_sampling_mask")
        return replace(params, sampling_logprobs=size)
    return replace(params, sampling_logprobs=0) if names else params


def _seed(request: CompletionRequest | ChatRequest) -> int:
    if request.seed is None:
        return secrets.randbelow(FRESH_SEEDS)
    if not -(1 << 63) <= request.seed < 1 << 64:
        raise HTTPError(400, f"seed {request.seed} must be a 64-bit integer", param="seed")
    return request.seed % (1 << 64)


def _require_digits(biases: Mapping[str, float]) -> None:
    wrong = next((key for key in biases if not (key.isascii() and key.isdecimal() and len(key) < 19)), None)
    if wrong is not None:
        raise HTTPError(400, f"logit_bias has the key {wrong[:40]!r}: give token ids", param="logit_bias")
