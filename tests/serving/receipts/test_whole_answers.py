"""A saved answer is compared with its receipt: every changed field is named."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from detcompile.commands.receipts.whole_answers import require_known, uncovered
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine_config import EngineConfig
from detcompile.serving.engines.engine_process import hello_of
from detcompile.serving.tokenizer_pool import TokenizerPool
from tests.model_cases import compiled
from tests.serving.receipts.receipt_cases import PROMPT, comparison

CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "seed": 5, "receipt": True}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}
CALLED = {"tool_choice": "required", "max_tokens": 60}
SHORT = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "seed": 5, "receipt": True}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", SHORT | {"n": 2, "logprobs": 1, "echo": True, "return_token_ids": True}),
    "completion with logprobs of all kinds": (
        "/v1/completions", SHORT | {"logprobs": 0, "prompt_logprobs": 1, "return_sampling_mask": True, "top_k": 3},
    ),
    "completion of prompts": ("/v1/completions", SHORT | {"prompt": [PROMPT, [5, 6]], "echo": True}),
    "scored prompt": ("/v1/completions", SHORT | {"max_tokens": 0, "logprobs": 0, "echo": True}),
    "stop string": ("/v1/completions", SHORT | {"temperature": 0, "stop": [")", "\n"], "max_tokens": 60}),
    "chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    "chat with logprobs of all kinds": (
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "prompt_logprobs": 0, "return_sampling_logprobs": True, "return_token_ids": True},
    ),
    "call": ("/v1/chat/completions", CHAT | CALLED | {"tools": [{"type": "function", "function": TOOL}]}),
    "message": ("/v1/messages", CHAT),
    "message with a call": (
        "/v1/messages",
        CHAT
        | {
            "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
            "max_tokens": 60,
        },
    ),
    "token ids": (
        "/inference/v1/generate",
        {"token_ids": [5, 6, 7], "return_token_ids": True, "receipt": True, "request_id": "mine",
         "sampling_params": {"max_tokens": 4, "seed": 5, "logprobs": 1, "prompt_logprobs": 1}},
    ),
    "response": (
        "/v1/responses",
        {"input": PROMPT, "max_output_tokens": 4, "seed": 5, "receipt": True, "top_logprobs": 1,
         "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}},
    ),
    "response with a call": (
        "/v1/responses",
        {"input": PROMPT, "max_output_tokens": 60, "seed": 5, "receipt": True, "tool_choice": "required",
         "tools": [TOOL | {"type": "function"}]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return compiled("tiny", torch.bfloat16)


@pytest.fixture(scope="module")
def texts(model: CompiledModel) -> TokenizerPool:
    return TokenizerPool(hello_of(model, EngineConfig(), 0, "tiny", {}))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all values that are not empty."""
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*path, key))


def forged(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return value + "x" if isinstance(value, str) else [*value, "x"] if isinstance(value, list) else value | {"x": 1}


def changes(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each place of an answer by its name, with the answer that has another value there, and none."""
    for *path, key in paths(fields):
        for leaves_out in (False, True):
            changed = copy.deepcopy(fields)
            holder = functools.reduce(lambda part, item: part[item], path, changed)
            if leaves_out and (holder[key] is None or isinstance(holder, list)):
                continue
            holder[key] = None if leaves_out else forged(holder[key])
            yield ".".join(map(str, (*path, key))), changed


@pytest.mark.parametrize("kind", ASKED)
def test_every_changed_field_is_named(
    kind: str, http: httpx.Client, model: CompiledModel, texts: TokenizerPool
) -> None:
    path, body = ASKED[kind]
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    fields, compare = comparison(answer.content, model, texts)
    free = uncovered(fields)
    assert compare(fields) is None and "usage" not in free
    for place, changed in changes(fields):
        if place in ("object", "type"):
            with pytest.raises(InvalidInput):
                require_known(changed)
            continue
        actual = compare(changed)
        is_free = any(f"{place}.".startswith(f"{name}.") for name in free)
        assert actual is not None or is_free, place
        assert actual is None or (actual.outcome == "differs" and actual.field.startswith("answer.")), actual


NO_CHOICES = [(kind, lambda fields: fields.update(choices=[]), "choices") for kind in ("chat", "message", "response")]
NO_LIST = ("completion", lambda fields: fields["choices"][0]["logprobs"].update(tokens=5), "choices[0].logprobs.tokens")


@pytest.mark.parametrize(("kind", "change", "field"), [*NO_CHOICES, NO_LIST])
def test_value_of_another_type_is_named(
    kind: str,
    change: Callable[[dict[str, Any]], None],
    field: str,
    http: httpx.Client,
    model: CompiledModel,
    texts: TokenizerPool,
) -> None:
    path, body = ASKED[kind]
    fields, compare = comparison(http.post(path, json=body).content, model, texts)
    change(fields)
    actual = compare(fields)
    assert actual is not None and actual.field == f"answer.{field}"
