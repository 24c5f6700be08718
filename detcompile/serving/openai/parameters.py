"""From the fields of a request to SamplingParams, with a seed, so that every answer can be asked for again."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.http_errors import HTTPError, error_of
from detcompile.serving.openai.schema import ChatRequest, CompletionRequest
from detcompile.serving.openai.structured import grammar_of
from detcompile.serving.openai.tools import ToolUse
from detcompile.serving.receipts.receipt import MAX_STOPS

__all__ = ["chat_params", "completion_params", "prompts_of"]

MAX_PROMPTS = 2048
FRESH_SEEDS = 1 << 53  # JavaScript's numbers keep so many apart
NAMES = frozenset(own.name for own in fields(SamplingParams))
SAME = (  # fields that are parameters of one name and meaning
    "n", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "allowed_token_ids",
)  # fmt: skip


def completion_params(asked: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters of POST /v1/completions. Where no token is asked for, one is drawn, which nobody is shown.

    Args:
        defaults: fields where the request says nothing; of its max_tokens, what no request exceeds.

    Raises:
        HTTPError: a field that is out of range, by its name.
    """
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise HTTPError(400, "best_of is served where it equals n: no more are drawn than returned", param="best_of")
    if asked.max_tokens is not None and asked.max_tokens < 0:
        raise HTTPError(400, f"max_tokens {asked.max_tokens} must be at least 0", param="max_tokens")
    if asked.max_tokens == 0 and (asked.min_tokens or 0) > 0:
        raise HTTPError(400, "min_tokens is above max_tokens", param="min_tokens")
    echoed = asked.logprobs if asked.echo else None
    length = None if asked.max_tokens is None else max(1, asked.max_tokens)
    own = {"logprobs": asked.logprobs, "prompt_logprobs": echoed, "grammar": grammar_of(asked)}
    return _params(asked, defaults, length, **own)


def chat_params(asked: ChatRequest, defaults: Mapping[str, Any], use: ToolUse | None = None) -> SamplingParams:
    """Parameters of POST /v1/chat/completions; by default the answer has the room that the context leaves.

    Args:
        defaults: fields where the request says nothing; of its max_tokens, what no request exceeds.
        use: what it says of tools.

    Raises:
        HTTPError: a field that is out of range, by its name.
    """
    if asked.echo:
        raise HTTPError(400, "echo is served by /v1/completions alone", param="echo")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise HTTPError(400, "top_logprobs is served where logprobs is true", param="top_logprobs")
    length = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    others: dict[str, Any] = {"logprobs": (asked.top_logprobs or 0) if asked.logprobs else None}
    if use is not None:
        others["skip_special_tokens"] = False  # some families write calls with them
    return _params(asked, defaults, length, grammar=_with_tools(grammar_of(asked), use), **others)


def prompts_of(given: str | Sequence[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts of a request, one or many, each text or token ids.

    Args:
        param: the field that they stand in.

    Raises:
        HTTPError: none, too many, or a list of both tokens and prompts.
    """
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(part, int) for part in given):
        return [given]  # type: ignore[list-item]
    if not given or len(given) > MAX_PROMPTS or any(isinstance(part, int) for part in given):
        wanted = f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of these"
        raise HTTPError(400, f"{param} must be {wanted}", param=param)
    return given  # type: ignore[return-value]


def _with_tools(asked: Grammar | None, use: ToolUse | None) -> Grammar | None:
    if asked is not None and use is not None:
        raise HTTPError(400, "tools and response_format are not served together: give one", param="tools")
    return asked if use is None else use.grammar


def _require_stream_options(asked: CompletionRequest | ChatRequest) -> None:
    options = asked.stream_options
    said = None
    if options is not None and not asked.stream:
        said = "stream_options is only allowed where stream is true"
    elif options is not None and options.continuous_usage_stats:
        said = "stream_options: continuous_usage_stats is not served, only include_usage"
    if said is not None:
        raise HTTPError(400, said, param="stream_options")


def _params(
    asked: CompletionRequest | ChatRequest, defaults: Mapping[str, Any], length: int | None, **others: Any
) -> SamplingParams:
    _require_stream_options(asked)
    given = {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    lengths = [most for most in (length, defaults.get("max_tokens")) if most is not None]
    own = {"max_tokens": min(lengths, default=None), "seed": _seed(asked)}
    if len(asked.stop or ()) > MAX_STOPS and isinstance(asked.stop, list):
        raise HTTPError(400, f"stop holds over {MAX_STOPS} strings", param="stop")
    _require_digits(asked.logit_bias or {})
    try:
        return SamplingParams(**{**defaults, **given, **others, **own})
    except InvalidInput as error:
        raise error_of(error, NAMES) from error


def _seed(asked: CompletionRequest | ChatRequest) -> int:
    if asked.seed is None:
        return secrets.randbelow(FRESH_SEEDS)
    if not -(1 << 63) <= asked.seed < 1 << 64:
        raise HTTPError(400, f"seed {asked.seed} must be an integer of 64 bits", param="seed")
    return asked.seed % (1 << 64)


def _require_digits(biases: Mapping[str, float]) -> None:
    wrong = next((key for key in biases if not (key.isascii() and key.isdecimal() and len(key) < 19)), None)
    if wrong is not None:
        raise HTTPError(400, f"logit_bias has the key {wrong[:40]!r}: give token ids", param="logit_bias")
