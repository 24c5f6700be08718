"""Function calls over HTTP by the unmodified client: required calls are there, streamed or not."""

import json

import httpx
import openai
import pydantic
import pytest
from tokenizers import AddedToken, Tokenizer

from detcompile.errors import InvalidInput
from detcompile.models.hub import TINY_FOLDER
from detcompile.runtime.grammars.compiler import GrammarCompiler
from detcompile.serving.tools.grammars import Function, free_grammar, required_grammar
from detcompile.serving.tools.reader import HERMES, LLAMA3, MISTRAL
from tests.serving.conftest import TEMPLATE, Server
from tests.serving.test_tool_reader import read

MESSAGES = [{"role": "user", "content": "What is it?"}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["x", "y"]}},
    "required": ["a", "kind"],
    "additionalProperties": False,
}
SUB = {"$ref": "#/$defs/own", "$defs": {"own": {"type": "object", "properties": {"b": {"type": "boolean"}},
       "required": ["b"], "additionalProperties": False}}}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "sub", "parameters": SUB}},
]
ASKED = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_completion_tokens": 120, "temperature": 0.8}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def check(call) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        assert arguments.keys() == {"a", "kind"} and 0 <= arguments["a"] <= 99 and arguments["kind"] in ("x", "y")
    else:
        assert call.function.name == "sub" and isinstance(arguments["b"], bool)


@pytest.mark.parametrize("seed", range(4))
def test_required_call_is_always_made(client: openai.OpenAI, seed: int) -> None:
    requests = ASKED | {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    whole = client.chat.completions.create(n=2, **requests)
    with client.chat.completions.stream(n=2, **requests) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for choice, other in zip(whole.choices, streamed.choices, strict=True):
        [call], [again] = choice.message.tool_calls, other.message.tool_calls
        check(call)
        assert choice.message.content is None and choice.finish_reason == other.finish_reason == "tool_calls"
        assert (call.function.name, call.function.arguments) == (again.function.name, again.function.arguments)
    ids = [choice.message.tool_calls[0].id for choice in (*whole.choices, *streamed.choices)]
    assert len(set(ids)) == 4 and all(name.startswith("call_") for name in ids)


def test_arguments_are_streamed_as_deltas(client: openai.OpenAI) -> None:
    requests = ASKED | {"tool_choice": "required", "seed": 1, "stream": True, "parallel_tool_calls": False}
    deltas = [chunk.choices[0].delta.tool_calls or [] for chunk in client.chat.completions.create(**requests)]
    calls = [call for delta in deltas for call in delta]
    assert len(calls) > 2 and calls[0].id and calls[0].function.name and not any(call.id for call in calls[1:])
    assert {call.index for call in calls} == {0}
    json.loads("".join(call.function.arguments for call in calls))


def test_named_function_is_called(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "sub"}}
    answer = client.chat.completions.create(tool_choice=choice, seed=3, **ASKED).choices[0]
    [call] = answer.message.tool_calls
    check(call)
    assert call.function.name == "sub" and answer.finish_reason == "stop"


class Sub(pydantic.BaseModel):
    """What the function takes."""

    b: bool


def test_parse_returns_arguments_as_class(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Sub, name="sub")
    requests = ASKED | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": 2}
    answer = client.chat.completions.parse(**requests)
    assert all(isinstance(call.function.parsed_arguments, Sub) for call in answer.choices[0].message.tool_calls)


def test_text_without_tool_choice_is_not_parsed(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(seed=5, **ASKED).choices[0]
    assert free.message.content and free.message.tool_calls is None
    reported, none = (
        client.post("/chat/completions", body=ASKED | {"seed": 5, "tool_choice": choice}, cast_to=object)
        for choice in ("auto", "none")
    )
    assert reported["choices"][0]["message"]["content"] == free.message.content
    assert none["usage"]["prompt_tokens"] < reported["usage"]["prompt_tokens"]  # the template is told of none
    assert "tool_calls" not in none["choices"][0]["message"]


def test_conversation_continues_after_a_call(client: openai.OpenAI, http: httpx.Client) -> None:
    requests = ASKED | {"tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(seed=1, **requests).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in answer.tool_calls]
    messages = [*MESSAGES, answer.model_dump(exclude_none=True), *results]
    [call, *_] = answer.tool_calls
    reported = f'{{"name": "{call.function.name}", "arguments": {json.dumps(json.loads(call.function.arguments))}}}'
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert f"<tool_call>{reported}</tool_call>" in text and "<tool>7\n" in text
    again = client.chat.completions.create(seed=1, **ASKED | {"messages": messages})
    assert again.usage.prompt_tokens > len(ids)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        *(({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}, "tools")
          for parameters in ({"type": "array"}, {"type": ["object", "null"]}, {"x-guidance": {"lenient": True}})),
    ],
)  # fmt: skip
def test_invalid_tool_fields_are_refused(http: httpx.Client, changes: dict, param: str) -> None:
    answer = http.post("/v1/chat/completions", json=ASKED | changes)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_response_truncated_in_a_call_can_be_continued(http: httpx.Client) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    requests = {"input": "x", "tools": tools, "tool_choice": "required", "max_output_tokens": 24, "seed": 4}
    first = http.post("/v1/responses", json=requests).json()
    [call] = first["output"]
    assert first["status"] == "incomplete" and not call["arguments"].endswith("}")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "failed"}
    for before in ({"previous_response_id": first["id"], "input": [result]}, {"input": [call, result]}):
        answer = http.post("/v1/responses", json={"tools": tools, "max_output_tokens": 2} | before)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("keyword", [{"oneOf": [{"minimum": 1}, {"maximum": 3}]}, {"uniqueItems": True}, {"not": {}}])
def test_unsupported_schema_names_tool_and_keyword(http: httpx.Client, keyword: dict) -> None:
    function = {"name": "Find_it", "parameters": {"type": "object", "properties": {"a": {"type": "array", **keyword}}}}
    requests = ASKED | {"tools": [*TOOLS, {"type": "function", "function": function}], "tool_choice": "required"}
    answer = http.post("/v1/chat/completions", json=requests)
    expected_text = answer.json()["error"]["message"]
    assert answer.status_code == 400 and next(iter(keyword)) in expected_text and "Find_it" in expected_text


def test_function_without_parameters_gets_empty_arguments(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    requests = ASKED | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    [call] = http.post("/v1/chat/completions", json=requests).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
FUNCTIONS = [Function("add", ADD, strict=True), Function("sub", SUB)]


class Wrapped:
    """A tokenizer as transformers' are, as far as grammars look at it."""

    def __init__(self, special: bool | None) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json"))
        if special is not None:
            marks = [AddedToken(mark, special=special, normalized=False) for mark in MARKS]
            self.backend_tokenizer.add_tokens(marks)

    def added_id(self, text: str) -> int | None:
        return self.backend_tokenizer.token_to_id(text)


def longest_prefix(tokenizer: Wrapped, grammar, text: str) -> tuple[bool, bool]:
    """Return whether a grammar accepts a text as complete."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    size = tokenizer.backend_tokenizer.get_vocab_size()
    matcher = GrammarCompiler(tokenizer, size, [0]).matcher(grammar, (0,))
    for token in ids:
        if matcher.mask((token,)) is None:
            return False, False
        matcher.append(token)
    return True, bool(int(matcher.mask()[0]) & 1)


@pytest.mark.parametrize("special", [None, False, True], ids=["text", "added", "special"])
@pytest.mark.parametrize("family", [HERMES, LLAMA3, MISTRAL], ids=lambda family: family.name)
def test_call_grammars_accept_what_the_parser_reads(family, special) -> None:
    tokenizer = Wrapped(special)
    good, other, bad = (
        json.dumps({"name": name, family.key: arguments})
        for name, arguments in (("add", {"a": 5, "kind": "y"}), ("sub", {"b": True}), ("add", {"a": "5"}))
    )
    named = family is MISTRAL and special is not None
    one, two, wrong = {
        HERMES: [
            f"<tool_call>\n{item}\n</tool_call>" for item in (good, f"{good}\n</tool_call>\n<tool_call>\n{other}", bad)
        ],
        LLAMA3: [good, f"{good}; {other}", bad],
        MISTRAL: [f"[TOOL_CALLS][{item}]" for item in (good, f"{good}, {other}", bad)],
    }[family]
    if named:
        one, wrong = '[TOOL_CALLS]add[ARGS]{"a": 5, "kind": "y"}', '[TOOL_CALLS]add[ARGS]{"a": "5"}'
        two = one + '[TOOL_CALLS]sub[ARGS]{"b": true}'
    for single in (True, False):
        required = required_grammar(family, FUNCTIONS, tokenizer.added_id, single=single)
        free = free_grammar(family, FUNCTIONS, tokenizer.added_id, single=single)
        for grammar in (required, free):
            assert longest_prefix(tokenizer, grammar, one) == (True, True)
            assert longest_prefix(tokenizer, grammar, two) == ((True, True) if not single else (False, False))
            assert longest_prefix(tokenizer, grammar, wrong) == (False, False)
        assert longest_prefix(tokenizer, required, "Hello") == (False, False)
        assert longest_prefix(tokenizer, free, "Hello") == (True, True)
        assert longest_prefix(tokenizer, free, "") == (True, True) != longest_prefix(tokenizer, required, "")
        if not family.bare:
            assert longest_prefix(tokenizer, free, f"Hello {one}") == (True, True)
            assert longest_prefix(tokenizer, free, f"Hello {wrong}") == (False, False)
    assert read(family, [one]) == ("", [("add", '{"a": 5, "kind": "y"}')])
    assert read(family, [two]) == ("", [("add", '{"a": 5, "kind": "y"}'), ("sub", '{"b": true}')])


def test_template_family_and_schema_size_limit() -> None:
    assert "<tool_call>" in TEMPLATE
    with pytest.raises(InvalidInput, match="65536 at most"):
        required_grammar(HERMES, [Function("f", {"enum": ["x" * 70_000]})], lambda _: None, single=True)
