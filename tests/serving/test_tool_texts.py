"""Tool calls that JSON can hardly hold are reported as far as possible, and no client waits."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from detcompile.serving.anthropic.blocks import Blocks
from detcompile.serving.app import new_app
from detcompile.serving.http_errors import FAULT
from detcompile.serving.openai.recording import Recording
from detcompile.serving.openai.tools import ToolUse
from detcompile.serving.tools.reader import HERMES, read_json
from tests.serving.conftest import TEMPLATE
from tests.serving.scripted_service import running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")
HALF = '<tool_call>{"name": "a\\ud800b", "arguments": {"x\\udc00": ["\\ud83d", "\\ud83d\\ude00"]}}</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": TOOLS},
    "/v1/messages": {
        "messages": MESSAGES, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 99},
    "/v1/responses": {"input": "x", "tools": [{"type": "function"} | FUNCTION]},
}  # fmt: skip


def run(scenario: Callable[[httpx.AsyncClient], Any]) -> None:
    async def served() -> None:
        async with running(scripted(chat_template=TEMPLATE)) as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(served(), 20))


def test_lone_surrogates_are_replaced() -> None:
    assert read_json('{"a\\ud800": ["\\udfff.", {"\\ud83d\\ude00": 1}]}') == {"a\ufffd": ["\ufffd.", {"\U0001f600": 1}]}
    assert read_json('["\\ufeff", 1, null, "\\ud800\\ud800x"]') == ["\ufeff", 1, None, "\ufffd\ufffdx"]
    for depth in range(900, 1000, 3):  # near to Python's limit, which those who write it are nearer to
        with pytest.raises(ValueError, match="nested"):
            read_json("[" * depth + "]" * depth)
    deep = '{"x": ' + "[" * 150 + "]" * 150 + "}"
    blocks = Blocks("msg_1", ToolUse(HERMES, [], None, False))
    blocks.add(f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>', last=True)
    assert blocks.content[0]["input"] == json.loads(deep)


def test_lone_surrogates_in_calls_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_TEXT", HALF)

    async def scenario(client: httpx.AsyncClient) -> None:
        for path, requests in ASKED.items():
            whole = await client.post(path, json=requests)
            stream = await client.post(path, json=requests | {"stream": True})
            assert (whole.status_code, stream.status_code) == (200, 200), path
            assert "a\ufffdb" in whole.text and "a\ufffdb" in stream.text, path
            assert "error" not in stream.text or '"error":null' in stream.text, path
            if path == "/v1/messages":
                assert whole.json()["content"][0]["input"] == {"x\ufffd": ["\ufffd", "\U0001f600"]}
            if path == "/v1/responses":
                [call] = whole.json()["output"]
                result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
                more = {"previous_response_id": whole.json()["id"], "input": [result]}
                assert (await client.post(path, json=more)).status_code == 200

    run(scenario)


@pytest.mark.parametrize("place", ["_take", "_finish", "_send_response"])
def test_server_error_ends_response(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    item = getattr(Recording, place)

    def failing(self: Recording, *args: Any) -> None:
        if place != "_send_response" or "response.incomplete" in args:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "a fault")
        item(self, *args)

    monkeypatch.setattr(Recording, place, failing)

    async def scenario(client: httpx.AsyncClient) -> None:
        requests = {"input": "x", "max_output_tokens": 3}
        assert (await client.post("/v1/responses", json=requests)).status_code == 500
        assert (await client.post("/v1/responses", json=requests | {"stream": True})).status_code in (200, 500)
        name = (await client.post("/v1/responses", json=requests | {"background": True})).json()["id"]
        stream = await client.get(f"/v1/responses/{name}?stream=true")
        assert "response.failed" in stream.text
        calls = await client.get(f"/v1/responses/{name}")
        assert calls.json()["status"] == "failed" and calls.json()["error"]["code"] == "engine_error"
        assert (await client.post(f"/v1/responses/{name}/cancel")).json() == calls.json()

    run(scenario)


async def test_server_error_is_a_stream_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_args: Any) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "a fault")

    monkeypatch.setattr("detcompile.serving.openai.reply.Reply._tail", failing)
    monkeypatch.setattr("detcompile.serving.anthropic.messages.MessageReply._end", failing)

    service = scripted(chat_template=TEMPLATE)
    app = new_app(service, "test")
    async with running(service):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in ("/v1/chat/completions", "/v1/messages"):
                requests = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
                events = (await client.post(path, json=requests)).text.split("\n\n")
                assert "data: [DONE]" not in events and FAULT in events[-2], path
