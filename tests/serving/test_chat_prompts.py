"""Prompts of conversations: what a message may hold, and the text that templates make of it."""

import asyncio
import functools
import inspect
import json
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import transformers

from detcompile.errors import DetcompileError, InvalidInput
from detcompile.models.hub import TINY_FOLDER
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests import admission
from detcompile.serving import chat_template
from detcompile.serving.chat_template import ChatTemplate
from detcompile.serving.engines.engine_process import hello_of
from detcompile.serving.engines.protocol import Hello
from detcompile.serving.http_errors import HTTPError, OverdueError
from detcompile.serving.openai.messages import prompt_of, template_variables
from detcompile.serving.openai.schema import ChatRequest, decode_body
from detcompile.serving.tokenizer_pool import TokenizerPool
from tests.serving.chat_templates import TEMPLATES
from tests.serving.scripted_engine import HELLO

CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}\n{% endfor %}{% endfor %}"
compiled = functools.cache(ChatTemplate)
ITEMS = CALLS.replace("c.function | tojson", "c.function.arguments.items() | list")


def prompt(messages: list[dict[str, Any]], template: str) -> str:
    """Return the prompt that a server would build from a conversation."""
    requested = decode_body(json.dumps({"messages": messages}).encode(), ChatRequest)
    service: Any = SimpleNamespace(
        template=ChatTemplate(template), tool_family=None, hello=HELLO, texts=TokenizerPool(HELLO), name="scripted"
    )
    return service.texts.decode(asyncio.run(prompt_of(service, requested.messages)), skip_special_tokens=False)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "name"])
def test_templates_get_message_fields(field: str) -> None:
    messages = [{"role": "assistant", "content": "a", field: "because"}]
    assert prompt(messages, "{% for m in messages %}{{ m." + field + " }}{{ m.content }}{% endfor %}") == "becausea"
    assert prompt([{"role": "user", "content": "a"}], "{{ messages[0]." + field + " is defined }}") == "False"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("function_call", {"name": "f", "arguments": "{}"}),
        ("audio", {"id": "a"}),
        ("prefix", True),
        ("partial", True),
    ],
)
def test_other_fields_of_messages_are_refused_by_name(field: str, value: Any) -> None:
    requested = {"role": "assistant", "content": "a"}
    for idle in (None, *([False] if value is True else [])):
        assert prompt([requested | {field: idle}], "{{ messages[0].content }}") == "a"
    with pytest.raises(HTTPError, match=rf"messages\[1\]\.{field} is not supported"):
        prompt([requested, requested | {field: value}], "{{ messages[0].content }}")


async def test_long_conversations_do_not_delay_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a short one times out, its error names the wait, not its length."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    template, go = ChatTemplate("{{ messages[0] }}"), threading.Event()
    held: Any = type("Held", (), {"__str__": lambda _self: str(go.wait(10))})()
    short: Any = "short"

    long = [asyncio.create_task(template.render([held] * (chat_template.MANY + 1))) for _ in range(6)]
    await asyncio.sleep(0)
    assert await template.render([short]) == "short"
    first, *others = await asyncio.gather(*long, return_exceptions=True)
    assert isinstance(first, InvalidInput) and "for these messages" in str(first)
    assert all(isinstance(other, OverdueError) and other.status == 503 for other in others)
    go.set()
    assert await template.render([held] * (chat_template.MANY + 1)) == "True"


def test_endless_template_is_refused() -> None:
    with pytest.raises(InvalidInput, match="recursion"):
        prompt([{"role": "user", "content": "a"}], "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages) }}")


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


def test_text_parts_are_joined_as_lines() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    assert prompt([{"role": "user", "content": parts}], "{{ messages[0].content }}") == "one\ntwo"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Où? <b> & 'c'",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["°C", "°F"]}},
            "required": ["town"],
        },
    },
}
FUNCTION = {"name": "weather", "arguments": {"town": "Ås", "days": [1]}}
CALL = {"id": "call12345", "type": "function", "function": FUNCTION}
USER = {"role": "user", "content": '  Is it cold in Ås?\n\nTell <me> & "all".  '}
CONVERSATIONS = {
    "a question": ([USER], None),
    "a system": ([{"role": "system", "content": "Be brief."}, USER], None),
    "turns": ([USER, {"role": "assistant", "content": "Yes. "}, {"role": "user", "content": "東京 🎉?"}], None),
    "reasoning": ([USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it? It is."}, USER], None),
    "tools": ([USER], [TOOL]),
    "a call": ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call12345", "content": "-3 °C"}], [TOOL]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    actual = transformers.AutoTokenizer.from_pretrained(TINY_FOLDER)
    actual.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return actual


def hello(tokenizer: Any) -> Hello:
    """Return the tokenizer as an engine sends it to the front end."""
    certificate = SimpleNamespace(to_json=lambda: "{}")
    model: Any = SimpleNamespace(
        fingerprint_parts={}, tokenizer=tokenizer, certificate=certificate, max_context=2048,
        vocab_size=len(tokenizer), dtype="float32",
    )  # fmt: skip
    return hello_of(model, EngineConfig(num_blocks=8), 8, "x", {})


@functools.cache
def texts_of(tokenizer: Any) -> tuple[Hello, TokenizerPool]:
    known = hello(tokenizer)
    return known, TokenizerPool(known)


def server_ids(tokenizer: Any, template: str, messages: list[Any], tools: list[Any] | None, **fields: Any) -> list[int]:
    """Return the prompt that the server builds from a request."""
    written = json.loads(json.dumps(messages))
    for message in written:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    requested = decode_body(json.dumps({"messages": written, "tools": tools, **fields}).encode(), ChatRequest)
    known, texts = texts_of(tokenizer)
    made = compiled(template)
    service: Any = SimpleNamespace(
        template=made, tool_template=made, tool_family=None, hello=known, texts=texts, name="x"
    )
    variables = template_variables(requested)
    return asyncio.run(prompt_of(service, requested.messages, requested.tools or (), variables=variables))


@pytest.mark.parametrize("family", TEMPLATES)
def test_prompts_equal_those_of_transformers(tokenizer: Any, family: str) -> None:
    template, served = TEMPLATES[family], 0
    for name, (messages, tools) in CONVERSATIONS.items():
        how = {"chat_template": template, "tools": tools, "add_generation_prompt": True}
        try:
            expected = tokenizer.apply_chat_template(messages, **how)["input_ids"]
        except (jinja2.TemplateError, TypeError, ValueError):
            with pytest.raises(InvalidInput):
                server_ids(tokenizer, template, messages, tools)
            continue
        assert server_ids(tokenizer, template, messages, tools) == expected, name
        served += 1
    assert served


VARIABLES = (  # shows which variables are defined, and how
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ bos_token }}"
    "{% for v in [enable_thinking, thinking, reasoning_effort, level] %}{{ '-' if v is undefined else v | tojson }} "
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [VARIABLES, TEMPLATES["qwen 3"]])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "high", "enable_thinking": False},
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
        ({"chat_template_kwargs": {}}, {}),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "level": [1, {"a": None}]}},
            {"enable_thinking": False, "level": [1, {"a": None}]},
        ),
        ({"chat_template_kwargs": {"thinking": True, "bos_token": "<b>"}}, {"thinking": True, "bos_token": "<b>"}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
    ],
)
def test_template_variables_equal_those_of_transformers(
    tokenizer: Any, template: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    ids = tokenizer.apply_chat_template([USER], chat_template=template, **expected)["input_ids"]
    assert server_ids(tokenizer, template, [USER], None, **fields) == ids


@pytest.mark.parametrize("name", [
    name for name in inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters
    if name != "kwargs"
])  # fmt: skip
def test_renderer_arguments_are_not_template_variables(tokenizer: Any, name: str) -> None:
    for reserved in (name, "messages"):
        with pytest.raises(HTTPError, match=rf"chat_template_kwargs\.{reserved} is not supported"):
            server_ids(tokenizer, VARIABLES, [USER], None, chat_template_kwargs={reserved: None})


@pytest.mark.parametrize("template", [TEMPLATES["hermes"], TEMPLATES["qwen 2"], "{{ tools[0].function.description }}"])
@pytest.mark.parametrize(
    "fields", [{}, {"description": ""}, {"strict": True}, {"strict": False}, {"description": "d", "strict": True}]
)
def test_template_gets_tools_as_given(tokenizer: Any, template: str, fields: dict[str, Any]) -> None:
    strict = {name: value for name, value in fields.items() if name == "strict"}
    described = {name: value for name, value in fields.items() if name != "strict"}
    function = {"name": "f", **described, "parameters": {"type": "object", "properties": {}}, **strict}
    tools = [{"type": "function", "function": function}]
    expected = tokenizer.apply_chat_template([USER], tools=tools, chat_template=template)["input_ids"]
    assert server_ids(tokenizer, template, [USER], tools) == expected
    no_values = [{"type": "function", "function": {"description": None, "strict": None} | function}]
    assert server_ids(tokenizer, template, [USER], no_values) == expected


def test_tool_use_template_is_used_with_tools() -> None:
    actual = transformers.AutoTokenizer.from_pretrained(TINY_FOLDER)
    actual.chat_template = {"default": "plain", "tool_use": "{{ tools | tojson }} <tool_call>", "rag": "other"}
    known = hello(actual)
    assert known.chat_template == "plain" and known.tool_template == actual.chat_template["tool_use"]
    for tools in (None, [TOOL]):
        expected = actual.apply_chat_template([USER], tools=tools)["input_ids"]
        source = known.tool_template if tools else known.chat_template
        assert server_ids(actual, source, [USER], tools) == expected
    actual.chat_template = "one"
    assert (hello(actual).chat_template, hello(actual).tool_template) == ("one", None)


def test_split_special_tokens_setting_is_respected(tmp_path: Path) -> None:
    shutil.copytree(TINY_FOLDER, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "medusa"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    lengths = {}
    for splits in (False, True):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": splits}))
        actual = transformers.AutoTokenizer.from_pretrained(tmp_path)
        special = "".join(actual.all_special_tokens)
        expected = actual(f"a{special}b")["input_ids"]
        assert TokenizerPool(hello(actual))._encode(f"a{special}b", True) == expected
        lengths[splits] = len(expected)
    assert lengths[True] > lengths[False]


@pytest.mark.parametrize(
    ("changes", "ends", "named"),
    [
        ({}, [0], ()),
        ({"eos_token": "<|pad|>"}, [0], ("eos_token '<|pad|>' (token 1)",)),
        ({"eos_token": "<|pad|>"}, [0, 1], ()),
        ({"eos_token": "<|pad|>"}, [], ("end tokens []",)),
        ({"extra_special_tokens": {"eot_token": "<|pad|>"}}, [0], ("eot_token '<|pad|>' (token 1)",)),
        ({"eos_token": None}, [0], ()),
    ],
)
def test_end_token_only_in_tokenizer_warns_once(changes: dict, ends: list, named: tuple, caplog) -> None:
    admission._warn_of_end.cache_clear()
    actual = transformers.AutoTokenizer.from_pretrained(TINY_FOLDER, **changes)
    for _ in range(2):
        admission.Admission(actual, max_context=64, vocab_size=4096, end_tokens=lambda: ends)
    assert len(caplog.records) == len(named)
    assert all(words in caplog.text for words in named)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_random_tokenizer_is_refused(dropout: float) -> None:
    actual = transformers.AutoTokenizer.from_pretrained(TINY_FOLDER)
    actual.backend_tokenizer.model.dropout = dropout
    refused = pytest.raises(DetcompileError, match=r"at random \(dropout 0.3\)") if dropout else nullcontext()
    with refused:
        hello(actual)
    with refused:
        admission.Admission(actual, max_context=64, vocab_size=4096, end_tokens=lambda: [0])


@pytest.mark.parametrize(
    ("role", "template", "read"),
    [
        ("developer", "{{ messages[0].role }}", "system"),
        ("developer", "{% if messages[0].role == 'developer' %}dev{% endif %}", "dev"),
        ("observation", '{{ "observation" if messages[0].role == "observation" }}', "observation"),
        ("observer", "{{ messages[0].role if messages[0]['role'] in ('user', 'observer') }}", "observer"),
        ("observer", "{{ {'user': 'U', 'observer': 'O'}[messages[0].role] }}", "O"),
        ("tool", "{{ messages[0].role }}", "tool"),
        ("function", "{{ messages[0]['role'] }}{% if tools and tools[0]['function'] != 'x' %}t{% endif %}", None),
        ("content", "{{ messages[0]['role'] }}{{ messages[0]['content'] }}", None),
        ("narrator", "{{ messages[0].role }}", None),
        ("", "{{ messages[0].role }}", None),
    ],
)
def test_roles_are_accepted_or_refused(role: str, template: str, read: str | None) -> None:
    messages = [{"role": role, "content": "x"}]
    if read is not None:
        assert prompt(messages, template) == read
    else:
        with pytest.raises(HTTPError, match=r"messages\[0\].role") as refusal:
            prompt(messages, template)
        assert refusal.value.status == 400 and refusal.value.content["error"]["param"] == "messages[0].role"
