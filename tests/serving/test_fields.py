"""Fields that would change an answer are served or refused by name, on every route; others are ignored."""

import json
import re
import time
from typing import Any

import httpx
import msgspec
import pytest
from anthropic.types import message_create_params
from openai.types import chat, completion_create_params, embedding_create_params, responses
from openai.types.responses import Response

from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.anthropic.schema import MessagesRequest
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai import fields, schema
from detcompile.serving.openai.parameters import completion_params, grammar_of
from detcompile.serving.openai.response_schema import ResponsesRequest, chat_request
from detcompile.serving.openai.schema import (
    ChatRequest,
    ChatTokensRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    decode_body,
)
from detcompile.serving.pooling.routes import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from detcompile.serving.tokens.generate import GenerateRequest, GenerateSampling
from detcompile.serving.tokens.sglang import SGLangRequest, SGLangSampling
from tests.serving.scripted_engine import HELLO
from tests.serving.scripted_service import running, scripted

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
ROUTES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": [5], "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/responses": (ResponsesRequest, {"input": "x", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, CHAT),
    "/v1/chat/completions/tokens": (ChatTokensRequest, CHAT | {"tokens": [5]}),
    "/inference/v1/generate": (GenerateRequest, {"token_ids": [5], "sampling_params": {"max_tokens": 1}}),
    "/generate": (SGLangRequest, {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
KNOWN = {  # some that other servers document
    "adapter_id", "adaptive_target", "bad_words", "best_of", "documents", "ebnf", "grammar", "grammar_lazy",
    "input_ids", "json_schema", "logprob_token_ids", "logprobs", "lora_request", "max_length", "max_tokens",
    "min_length", "mirostat", "moderation", "n", "n_predict", "no_repeat_ngram_size", "num_beams", "parse_tool_calls",
    "prompt_logprobs", "reasoning_budget_tokens", "reasoning_effort", "regex", "repeat_penalty", "response_format",
    "return_meta_info", "return_token_offsets", "stop", "structural_tag", "structured_outputs", "task", "tools",
    "typical_p", "watermarking", "xtc_probability",
}  # fmt: skip
NESTED = {  # routes whose sampling parameters are an object, with its type
    "/inference/v1/generate": GenerateSampling,
    "/generate": SGLangSampling,
}
POOLING = [EmbeddingRequest, ClassifyRequest, ScoreRequest, RerankRequest]
ODD = {"odd": "value"}  # that no field takes for nothing
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SERVED = {  # fields that are served on each route, beside OpenAI's and Anthropic's own
    CompletionRequest: {"best_of", "echo", "min_p", "repetition_penalty", "grammar", "json_schema", "regex", "ebnf"},
    ChatRequest: {"min_p", "grammar", "json_schema", "regex", "ebnf", "tools", "add_special_tokens"},
    ResponsesRequest: {"min_p", "repetition_penalty", "tools", "stop", "ignore_eos"},
    MessagesRequest: {"min_p", "receipt", "tools"},
    TokenizeRequest: set(),
    DetokenizeRequest: set(),
    ChatTokensRequest: {"tools", "top_logprobs", "cache_salt"},
    GenerateRequest: {"cache_salt", "priority"},
    SGLangRequest: {"return_sampling_mask"},
}  # fmt: skip


async def test_unsupported_fields_are_refused_per_route(in_the_root: None) -> None:
    async with running(scripted(chat_template=TEMPLATE)) as http:
        for path, (kind, good) in ROUTES.items():
            refused = fields._refused(kind)
            assert not SERVED[kind] & refused.keys()
            assert (
                path.endswith("tokenize") or path in NESTED or not KNOWN - refused.keys() - set(kind.__struct_fields__)
            )
            for name in refused:
                await refused_by_name(http, path, good, name)
            for name in fields._refused(NESTED[path]) if path in NESTED else ():
                nested = good | {"sampling_params": good["sampling_params"] | {name: ODD}}
                error = (await http.post(path, json=nested)).json()["error"]
                assert error["param"] == f"sampling_params.{name}" and error["code"] == "unsupported_parameter"
            idle = {name: values[0] for name, values in refused.items() if values}
            answer = await http.post(path, json=good | idle | {"a_field_of_tomorrow": 1})
            assert answer.status_code == 200, answer.text
        counted = {"messages": CHAT["messages"], "temperature": 3, "min_tokens": 5}
        assert (await http.post("/v1/messages/count_tokens", json=counted)).status_code == 200
        await refused_by_name(http, "/v1/messages/count_tokens", counted, "chat_template")


CLIENTS: list[tuple[type, type]] = [
    (ChatRequest, chat.completion_create_params.CompletionCreateParamsBase),
    (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    (ResponsesRequest, responses.response_create_params.ResponseCreateParamsBase),
    (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
    (MessagesRequest, message_create_params.MessageCreateParamsBase),
]
INERT = {  # fields of the clients that change no answer: who asks, how it is billed, cached and routed
    "access_programs", "background_options", "cache_control", "diagnostics", "image", "inference_geo", "metadata",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "speed",
    "stream_options", "user", "user_profile_id", "workspace_id",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "params"), CLIENTS)
def test_every_client_field_is_known(kind: type, params: type) -> None:
    """Each field that client packages document is served or refused, never ignored."""
    assert not params.__annotations__.keys() - set(kind.__struct_fields__) - INERT


async def test_tokenize_gives_chat_prompt_tokens(in_the_root: None) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{{ thinking }}{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

    async with running(scripted(chat_template=template)) as http:

        async def tokens(**requests: Any) -> list[int]:
            answer = await http.post("/tokenize", json={"messages": CHAT["messages"]} | requests)
            assert answer.status_code == 200, answer.text
            return answer.json()["tokens"]

        for tools in ([], [tool]):
            answer = await http.post("/v1/chat/completions", json=CHAT | {"tools": tools})
            assert answer.json()["usage"]["prompt_tokens"] == len(await tokens(tools=tools))
        assert len(await tokens(tools=[tool])) > len(await tokens())
        assert len(await tokens()) > len(await tokens(add_generation_prompt=False))
        more = {"chat_template_kwargs": {"thinking": "so"}}
        assert len(await tokens(**more)) == len(await tokens()) + 1
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
            sizes = [await prompt_size(http, path, requests) for requests in ({}, more)]
            assert sizes[1] == sizes[0] + 1, path
        answer = (await http.post("/tokenize", json={"prompt": "import json", "return_token_strs": True})).json()
        assert "".join(answer["token_strs"]) == "importĠjson" and len(answer["token_strs"]) == answer["count"]
        assert "tokenizer_class" in (await http.get("/tokenizer_info")).json()
        long = {"prompt": "a b" * 5000, "return_token_strs": True}
        assert {"a", "Ġb", "b"} >= set((await http.post("/tokenize", json=long)).json()["token_strs"])
        last = HELLO.vocab_size - 1
        for tokens_sent, status in ([], 200), ([5, last], 200), ([5, last + 1], 400), ([(1 << 31) - 1] * 5000, 400):
            answer = await http.post("/detokenize", json={"tokens": tokens_sent})
            assert answer.status_code == status and (status == 200 or "vocabulary" in answer.text)


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200), ("Identity", 200)])
async def test_compressed_body_is_refused(in_the_root: None, coding: str, status: int) -> None:
    async with running(scripted()) as http:
        answer = await http.post("/detokenize", json={"tokens": [5]}, headers={"Content-Encoding": coding})
        assert answer.status_code == status and (status == 200 or coding in answer.json()["error"]["message"])


async def prompt_size(http: httpx.AsyncClient, path: str, requests: dict[str, Any]) -> int:
    answer = await http.post(
        path, json=(ROUTES[path][1] if path in ROUTES else {"messages": CHAT["messages"]}) | requests
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json().get("usage", answer.json())
    return usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]


async def refused_by_name(http: httpx.AsyncClient, path: str, good: dict[str, Any], name: str) -> None:
    answer = await http.post(path, json=good | {name: ODD})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"] == f"{name} is not supported: omit it", (path, name)
    assert path.startswith("/v1/messages") or (error["param"], error["code"]) == (name, "unsupported_parameter")


LONG = "word " * 9000
LONG_PROMPTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["x", [5] * 2048]}, "prompt"),
    ("/v1/completions", {"prompt": "word " * 2100, "stream": True}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2100}]}, "messages"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/chat/completions/tokens", CHAT | {"tokens": [5] * 2048}, "tokens"),
    ("/inference/v1/generate", {"token_ids": [5] * 2048, "sampling_params": {}}, "token_ids"),
    ("/generate", {"input_ids": [[5], [5] * 2048]}, "input_ids"),
    ("/generate", {"text": LONG}, "text"),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}, "messages"),
]


async def test_too_long_prompt_error_is_recognized_by_clients(in_the_root: None) -> None:
    async with running(scripted(chat_template=TEMPLATE)) as http:
        for path, requests, param in LONG_PROMPTS:
            answer = await http.post(path, json=requests)
            error = answer.json()["error"]
            assert answer.status_code == 400 and "prompt is too long" in error["message"]  # LangChain's words
            assert error["message"].startswith("This model's maximum context length is 2048 tokens")  # LiteLLM's
            if path != "/v1/messages":  # Anthropic's errors have neither
                assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        counted = {"messages": [{"role": "user", "content": LONG}]}
        assert (await http.post("/v1/messages/count_tokens", json=counted)).json()["input_tokens"] > 9000


async def test_responses_have_all_fields_of_their_type(in_the_root: None) -> None:
    item = {"prompt_cache_key": "k", "safety_identifier": "s"}
    given = {"presence_penalty": 0.0, "frequency_penalty": 0.5, "reasoning": None, "max_tool_calls": None}
    requests = {"input": "x", "max_output_tokens": 1, "frequency_penalty": 0.5, **item}

    async with running(scripted(chat_template=TEMPLATE)) as http:
        start = int(time.time())
        whole = (await http.post("/v1/responses", json=requests)).json()
        streamed = (await http.post("/v1/responses", json=requests | {"stream": True})).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
        actual = [event["response"] for event in events if "response" in event]
        for response in (whole, *actual):
            assert response.items() >= (item | given | {"service_tier": "default"}).items()
            Response.model_validate_json(json.dumps(response), strict=True)
            ended = response["status"] != "in_progress"
            assert (response["completed_at"] is not None) == ended
            assert not ended or start <= response["completed_at"] <= time.time()
        again = (await http.get(f"/v1/responses/{whole['id']}")).json()
        assert again == whole
        counted = await http.post("/v1/responses/input_tokens", json={"input": "x"})
        expected = {"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]}
        assert counted.json() == expected


@pytest.mark.parametrize("kind", POOLING)
def test_unsupported_pooling_fields_are_refused_by_name(kind: type) -> None:
    needed = {"input": "x", "text_1": "x", "text_2": "x", "query": "x", "documents": ["x"]}
    refused = fields._refused(kind)
    needed = {name: value for name, value in needed.items() if name not in refused}
    for name in refused:
        with pytest.raises(HTTPError, match=f"^{name} is not supported"):
            fields.require_served(decode_body(msgspec.json.encode(needed | {name: ODD}), kind))


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(
    ("requests", "grammar"),
    [
        ({"grammar": 'root ::= "a"'}, Grammar.lark('root ::= "a"')),
        ({"ebnf": 'root ::= "a"'}, Grammar.lark('root ::= "a"')),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"json_schema": {"const": 1}}, Grammar.json_schema({"const": 1})),
        ({"json_schema": '{"const":1}'}, Grammar.json_schema('{"const":1}')),
        ({"guided_json_object": True}, Grammar.json_object()),
        ({"guided_json_object": False}, None),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, Grammar.json_schema({"const": 1})),
        ({"response_format": {"type": "json_schema", "schema": {"const": 1}}}, Grammar.json_schema({"const": 1})),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs"),
        ({"regex": "a", "ebnf": "b"}, "regex"),
    ],
)
def test_structured_output_accepts_field_names_of_other_servers(kind: type, requests: dict, grammar: Any) -> None:
    body = msgspec.json.encode({"prompt": "x", **CHAT, **requests})
    if isinstance(grammar, str):
        with pytest.raises(HTTPError) as refusal:
            grammar_of(decode_body(body, kind))
        assert refusal.value.content["error"]["param"] == grammar
    else:
        assert grammar_of(decode_body(body, kind)) == grammar


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_schema_of_a_response_needs_its_type(kind: str) -> None:
    requests = {"input": "x", "text": {"format": {"type": kind, "schema": {"const": 1}}}}
    with pytest.raises(HTTPError, match=r"text\.format\.schema requires type json_schema"):
        chat_request(decode_body(msgspec.json.encode(requests), ResponsesRequest), [])


@pytest.mark.parametrize(
    "kind", [item for name, item in vars(chat).items() if re.fullmatch("ChatCompletion[A-Z][a-z]+MessageParam", name)]
)
def test_every_field_of_a_message_is_known(kind: type) -> None:
    assert not kind.__annotations__.keys() - set(Message.__struct_fields__)


@pytest.mark.parametrize(
    ("requests", "served"),
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": True}}, False),
        ({"stream_options": {}}, False),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, False),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}, True),
        ({"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}}, True),
    ],
)
def test_stream_options_require_stream(requests: dict, served: bool) -> None:
    request = decode_body(msgspec.json.encode({"prompt": "x", **requests}), CompletionRequest)
    if served:
        assert completion_params(request, {}).max_tokens == 16
    else:
        with pytest.raises(HTTPError, match="stream_options"):
            completion_params(request, {})


def test_only_values_outside_of_strings_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_ELEMENTS", 10)
    text = '1,[],"\\' * 20
    assert decode_body(msgspec.json.encode({"prompt": text}), TokenizeRequest).prompt == text
    with pytest.raises(HTTPError, match="10 values"):
        decode_body(msgspec.json.encode({"tokens": [1] * 20}), DetokenizeRequest)
