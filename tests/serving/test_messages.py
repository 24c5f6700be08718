"""Anthropic's Messages by its unmodified client: the tokens of the same chat, streamed or not, and its errors."""

import hashlib
import json
from typing import Any

import httpx
import pytest

from tests.serving.conftest import Server
from tests.serving.test_tools import ADD

anthropic = pytest.importorskip("anthropic", reason="needs the extra `test`: pip install -e .[test]")
SAID = [{"role": "user", "content": "Write a function."}]
ASKED = {"model": "tiny", "max_tokens": 40, "messages": SAID}
OURS = {"seed": 5}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": ADD, "strict": True}]
FUNCTION = {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", timeout=120, max_retries=0)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def chatted(http: httpx.Client, **requests: Any) -> dict[str, Any]:
    """The choice of a chat, and its seed."""
    answer = http.post("/v1/chat/completions", json=requests)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: Any, **requests: Any) -> Any:
    with client.messages.stream(**requests) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


@pytest.mark.parametrize(
    ("item", "chats"),
    [
        ({}, {}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"stop_sequences": ["e", "\n"]}, {"stop": ["e", "\n"]}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": ADD}}, "max_tokens": 200},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": ADD}}, "max_tokens": 200},
        ),
    ],
    ids=["drawn", "greedy", "filtered", "stopped", "structured"],
)
def test_message_equals_chat_answer(client: Any, http: httpx.Client, item: dict, chats: dict) -> None:
    whole = client.messages.create(**ASKED, system="Be brief.", extra_body=item | OURS)
    again = streamed(client, **ASKED, system=[{"type": "text", "text": "Be brief."}], extra_body=item | OURS)
    history = [{"role": "system", "content": "Be brief."}, *SAID]
    chat = chatted(http, **{"messages": history, "max_tokens": 40} | chats | OURS)
    [choice] = chat["choices"]
    assert {digest(actual.content[0].text) for actual in (whole, again)} == {digest(choice["message"]["content"])}
    stopped = isinstance(choice["stop_reason"], str)
    reason = "max_tokens" if choice["finish_reason"] == "length" else "stop_sequence" if stopped else "end_turn"
    for actual in (whole, again):
        assert actual.stop_reason == reason and actual.stop_sequence == (choice["stop_reason"] if stopped else None)
        assert (actual.type, actual.role, actual.model, actual.seed) == ("message", "assistant", "tiny", 5)
        assert actual.system_fingerprint == chat["system_fingerprint"]
        used = actual.usage
        assert used.input_tokens + used.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
        assert used.output_tokens == chat["usage"]["completion_tokens"]


def test_tool_calls_and_results(client: Any, http: httpx.Client) -> None:
    requests = ASKED | {"tools": TOOLS, "max_tokens": 120}
    whole = client.messages.create(**requests, tool_choice={"type": "any", "disable_parallel_tool_use": True},
                                   extra_body=OURS)  # fmt: skip
    again = streamed(client, **requests, tool_choice={"type": "tool", "name": "add"}, extra_body=OURS)
    chat = {"messages": SAID, "max_tokens": 120, "tools": CHAT_TOOLS, "parallel_tool_calls": False} | OURS
    [call] = chatted(http, **chat, tool_choice="required")["choices"][0]["message"]["tool_calls"]
    for actual in (whole, again):
        [block] = actual.content
        assert actual.stop_reason == "tool_use" and block.type == "tool_use" and block.id.startswith("call_")
        assert (block.name, block.input) == (call["function"]["name"], json.loads(call["function"]["arguments"]))
    given = [
        *SAID,
        {"role": "assistant", "content": [{"type": "text", "text": "So:"}, whole.content[0].model_dump()]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": [{"type": "text", "text": "7"}]},
            {"type": "text", "text": "And "}, {"type": "text", "text": "now?"},
        ]},
    ]  # fmt: skip
    calls = client.messages.create(**ASKED | {"messages": given, "tools": TOOLS}, extra_body=OURS)
    history = [
        *SAID,
        {"role": "assistant", "content": "So:", "tool_calls": [call | {"id": whole.content[0].id}]},
        {"role": "tool", "tool_call_id": whole.content[0].id, "content": "7"},
        {"role": "user", "content": "And \nnow?"},
    ]
    chat = {"messages": history, "max_tokens": 40, "tools": CHAT_TOOLS} | OURS
    assert calls.content[0].text == chatted(http, **chat)["choices"][0]["message"]["content"]
    counted = client.messages.count_tokens(model="tiny", messages=given, tools=TOOLS)
    assert counted.input_tokens == calls.usage.input_tokens + calls.usage.cache_read_input_tokens


def test_events_are_in_order(http: httpx.Client) -> None:
    text = http.post("/v1/messages", json=ASKED | OURS | {"stream": True}).text
    events = [event.split("\ndata: ") for event in text.split("\n\n") if event]
    names, contents = [name for name, _ in events], [json.loads(data) for _, data in events]
    assert names == [f"event: {content['type']}" for content in contents]
    assert names[:2] == ["event: message_start", "event: content_block_start"]
    assert set(names[2:-3]) == {"event: content_block_delta"} and len(names) > 8
    assert names[-3:] == ["event: content_block_stop", "event: message_delta", "event: message_stop"]


def test_a_receipt_of_a_message_replays(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json=ASKED | OURS | {"receipt": True})
    calls = http.post("/v1/messages", json=ASKED | OURS | {"receipt": True, "stream": True}).text
    [delta] = [json.loads(part.partition("data: ")[2]) for part in calls.split("\n\n") if "message_delta" in part]
    for receipt in (answer.json()["receipt"], delta["receipt"]):
        assert http.post("/v1/verify", json=receipt).json()["outcome"] == "equal"
    assert answer.headers["X-Detcompile-Receipt"] and answer.headers["Request-Id"] == answer.json()["id"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*SAID, {"role": "assistant", "content": "So"}]}, "must have the role user"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages[0].content is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is missing"),
        ({"system": [{"type": "text"}]}, "system[0].text is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "needs the format of the model's reasoning"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' are not supported"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "no tool is named 'sub'"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_unsupported_fields_get_anthropic_errors(http: httpx.Client, changes: dict, message: str) -> None:
    for sent in (ASKED | changes, ASKED | changes | {"stream": True}):
        answer = http.post("/v1/messages", json=sent)
        assert answer.status_code == 400 and answer.json()["type"] == "error", answer.text
        error = answer.json()["error"]
        assert error.keys() == {"type", "message"} and error["type"] == "invalid_request_error"
        assert message in error["message"]


def test_client_raises_matching_error_types(client: Any, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**ASKED | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
        client.messages.create(**ASKED | {"messages": []})
    assert http.get("/v1/messages/batches").json()["error"]["type"] == "not_found_error"
    refused = http.post("/v1/messages", content=b"{", headers={"Content-Type": "application/json"})
    assert refused.status_code == 400 and refused.json()["type"] == "error"
