"""Prompts of conversations: what a message may hold, and the text that templates make of it."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from detcompile.errors import InvalidInput
from detcompile.serving.chat_template import ChatTemplate
from detcompile.serving.openai.messages import prompt_of
from detcompile.serving.openai.schema import ChatRequest, decode_body
from detcompile.serving.texts import Texts
from tests.serving.scripted_engine import HELLO

CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}\n{% endfor %}{% endfor %}"
ITEMS = CALLS.replace("c.function | tojson", "c.function.arguments.items() | list")


def prompt(messages: list[dict[str, Any]], template: str) -> str:
    """The prompt of a conversation as the server reads it, without a server."""
    asked = decode_body(json.dumps({"messages": messages}).encode(), ChatRequest)
    service: Any = SimpleNamespace(
        template=ChatTemplate(template), tool_family=None, hello=HELLO, texts=Texts(HELLO), name="scripted"
    )
    return service.texts.decode(asyncio.run(prompt_of(service, asked.messages)), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("arguments", "read", "items"),
    [
        ('{"city": "Oslo"}', {"city": "Oslo"}, [("city", "Oslo")]),
        ('{"city": "Os', '{"city": "Os', []),
        ("null", {}, []),
        ("", {}, []),
        ("[1]", "[1]", []),
        ('"Oslo"', '"Oslo"', []),
    ],
)
def test_arguments_of_any_text_are_read_as_history(arguments: str, read: Any, items: list) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert json.loads(prompt(messages, CALLS)) == {"name": "f", "arguments": read}
    assert prompt(messages, ITEMS) == f"{items}\n"
    with pytest.raises(InvalidInput, match="no such thing"):
        prompt(messages, "{{ raise_exception('no such thing') }}")


def test_parts_of_text_are_lines() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    assert prompt([{"role": "user", "content": parts}], "{{ messages[0].content }}") == "one\ntwo"
