"""Reasoning of thinking models: apart from content and calls, on each route, whole and streamed."""

import functools
import itertools
import json
import os
import shutil
import signal
import typing
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import httpx2
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from benchmarks.kill_drill import engine_processes
from detcompile.commands.serve import Chat
from detcompile.reasoning.formats import PARSERS, Piece, Thinking, reasoning_parser_of
from detcompile.reasoning.grammars import after_reasoning, within_budget
from detcompile.runtime.grammars.compiler import GrammarCompiler
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.app import new_app
from detcompile.serving.engines.answers import Answer, AuxiliaryTask
from detcompile.serving.engines.protocol import Delta, Hello, SampleDelta, Token
from detcompile.serving.reasoning import AnswerReader
from detcompile.serving.service import Service
from detcompile.serving.tokenizer_pool import TokenizerPool
from detcompile.serving.tools.grammars import Function, required_grammar
from detcompile.serving.tools.reader import FAMILIES as CALLS
from detcompile.serving.tools.reader import HERMES
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import TEMPLATE, model_of, started
from tests.serving.instant_fleet import InstantFleet
from tests.serving.reasoning_cases import CALL, CONTENT, FAMILIES, REASONING, Transcript, with_think_tokens
from tests.serving.scripted_engine import HELLO
from tests.serving.scripted_service import SPEC

USER = [{"role": "user", "content": "x"}]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@functools.cache
def hello_of(markers: tuple[str, ...], added: tuple[str, ...] = ()) -> Hello:
    tokenizer = Tokenizer.from_str(HELLO.tokenizer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in markers])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in added])
    if "<|channel|>" in markers:  # in the public tokenizer these are one token each
        tokenizer.add_tokens([AddedToken(word, single_word=True) for word in ("analysis", "final")])
    special = [*HELLO.special_ids, *map(tokenizer.token_to_id, markers)]
    return replace(HELLO, tokenizer=tokenizer.to_str(), special_ids=special, vocab_size=tokenizer.get_vocab_size())


@functools.cache
def ids_of(tokenizer: str, text: str) -> list[int]:
    return Tokenizer.from_str(tokenizer).encode(text, add_special_tokens=False).ids


class Fleet(InstantFleet):
    """Draws one text, a token a turn of the event loop; a grammar may force other tokens."""

    text = ""

    def add(self, answer: Answer) -> None:
        if not isinstance(answer, AuxiliaryTask):
            ids = forced(self.known.tokenizer, answer.params.grammar, ids_of(self.known.tokenizer, self.text))
            vars(self).setdefault("scripts", {})[answer] = stopped(self.known, answer.params, ids)
        super().add(answer)

    def _draw(self, answer: Answer) -> None:
        if answer.finished:
            return
        ids, stop_reason = self.scripts[answer]
        count = len(answer.samples[0].token_ids) + 1
        ended = count == min(len(ids), answer.params.max_tokens or len(ids))
        reason = None if not ended else "stop" if count == len(ids) else "length"
        token = ids[count - 1]
        logprobs = None if answer.params.logprobs is None else [Token(token, -0.5, [])]
        stop = stop_reason if reason == "stop" else None
        samples = [SampleDelta(n, [token], logprobs, reason, stop) for n in range(answer.params.n)]
        delta = Delta(answer.request_id, samples, ended, None, None, 0, None)
        answer.extend(delta)
        self._on_delta(answer, delta)
        answer.signal.notify()
        self._later(self._draw, answer)


@functools.cache
def compiler_of(tokenizer: str) -> GrammarCompiler:
    backend = Tokenizer.from_str(tokenizer)
    return GrammarCompiler(SimpleNamespace(backend_tokenizer=backend), backend.get_vocab_size(), [0])


def forced(tokenizer: str, grammar: Grammar | None, ids: list[int]) -> list[int]:
    """Return tokens of a model that writes ``ids``; a forced token moves it to that token's place in them."""
    if grammar is None:
        return ids
    matcher, drawn, place = compiler_of(tokenizer).matcher(grammar, (0,)), [], 0
    while place < len(ids):
        token = ids[place]
        if matcher.mask((token,)) is None:
            token = int(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little").nonzero()[0][0])
        place = place + ids[place:].index(token) + 1 if token in ids[place:] else place
        drawn.append(token)
        matcher.append(token)
        if matcher.complete:
            break
    return drawn


def stopped(known: Hello, params: SamplingParams, ids: list[int]) -> tuple[list[int], str | None]:
    """Return the tokens up to and including a stop string."""
    detokenizer = Detokenizer(TokenizerPool(known), params)
    for place, token in enumerate(ids, 1):
        detokenizer.append([token])
        if detokenizer.stopped_by is not None:
            return ids[:place], detokenizer.stopped_by
    return ids, None


@asynccontextmanager
async def served(family: Transcript, text: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service that answers every request with a text."""
    fleet = type("Scripted", (Fleet,), {"text": text, "known": hello_of(family.markers, family.added)})
    service = Service(chat_template=family.template, fleet=fleet, **options)
    app = new_app(service, "test")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30) as client:
        await service.start(SPEC)
        yield client
        await service.stop()


def merged(pieces: list[Piece]) -> list[Piece]:
    """Join neighboring pieces of one kind."""
    actual: list[Piece] = []
    for piece in pieces:
        if actual and piece.name is None and (actual[-1].call, actual[-1].reasoning) == (piece.call, piece.reasoning):
            actual[-1] = actual[-1]._replace(text=actual[-1].text + piece.text)
        elif piece.text or piece.name is not None:
            actual.append(piece)
    return actual


MARKS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|end|>", "<|start|>assistant", "<|call|>",
    "<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>", "<", "<|", "</", " ", "\n", "a",
]  # fmt: skip
texts = st.lists(st.sampled_from(MARKS), max_size=8).map("".join)


@given(
    text=st.one_of(texts, st.sampled_from([t for each in FAMILIES.values() for t in (each.text, each.call) if t])),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    parser=st.sampled_from([None, *sorted(PARSERS)]),
    begun=st.booleans(),
    family=st.sampled_from([None, *sorted(CALLS)]),
)
def test_parsed_pieces_are_equal_for_any_chunking(
    text: str, cuts: list[int], parser: str | None, begun: bool, family: str | None
) -> None:
    thinking = None if parser is None else Thinking(parser, begun)

    def read(parts: list[str]) -> tuple[list[Piece], int]:
        reader = AnswerReader(thinking, None if family is None else CALLS[family])
        pieces = [piece for part in parts[:-1] for piece in reader.feed(part)]
        return merged(pieces + reader.feed(parts[-1], last=True)), reader.num_calls

    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = read([text])
    assert read([text[start:end] for start, end in itertools.pairwise(places)]) == whole == read([*text, ""])
    if family is None and parser not in (None, "openai_gptoss"):  # nothing but a marker is lost
        assert sum(len(piece.text) for piece in whole[0]) >= len(text.strip()) - len("<seed:think></seed:think>")


def reading(parser: str, text: str, *, begun: bool = False) -> tuple[str, str]:
    pieces = AnswerReader(Thinking(parser, begun), None).feed(text, last=True)
    parts = ["".join(piece.text for piece in pieces if piece.reasoning is reasons) for reasons in (True, False)]
    return parts[0], parts[1]


@pytest.mark.parametrize(
    ("parser", "text", "begun", "expected"),
    [
        ("qwen3", "<think>\na\n</think>\n\nb", False, ("\na\n", "\n\nb")),
        ("qwen3", "a</think>b", True, ("a", "b")),
        ("qwen3", "<think>a</think>b", True, ("a", "b")),
        ("qwen3", "a", True, ("a", "")),
        ("qwen3", "a <think>b</think>", False, ("", "a <think>b</think>")),
        ("qwen3", "<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("qwen3", "<think></think>", False, ("", "")),
        ("qwen3", "<thi", False, ("", "<thi")),
        ("qwen3", "a</thi", True, ("a</thi", "")),
        ("mistral", "a[/THINK]b", False, ("", "a[/THINK]b")),
        ("seed_oss", "<seed:think>a</seed:think>b", False, ("a", "b")),
        ("openai_gptoss", "plain", False, ("", "plain")),
        ("openai_gptoss", "<|channel|>final<|message|>b<|return|>", False, ("", "b")),
        ("openai_gptoss", "<|channel|>analysis<|message|>a", False, ("a", "")),
        ("openai_gptoss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>c"
         "<|end|><|start|>assistant<|channel|>commentary<|message|>d<|end|><|start|>assistant<|channel|>final<|message|>b",
         False, ("a\nc", "d\nb")),
        ("openai_gptoss", "<|channel|>commentary to=browser.open json<|message|>a<|call|>", False, ("a", "")),
        ("openai_gptoss", "<|channel|>analysis<|mess", False, ("", "")),
    ],
)  # fmt: skip
def test_reasoning_ends_at_its_marker(parser: str, text: str, begun: bool, expected: tuple[str, str]) -> None:
    assert reading(parser, text, begun=begun) == expected


@pytest.mark.parametrize("parser", [parser for parser in PARSERS.values() if parser.assumed], ids=lambda p: p.name)
async def test_assumed_reasoning_needs_no_marker(parser: Any) -> None:
    family = Transcript(parser.name, "{{ messages[0].content }}", f"{REASONING}</think>{CONTENT}", None)

    async with served(family, family.text, reasoning_parser=parser.name) as http:
        message = (await chat(http))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (REASONING, CONTENT)


async def chat(http: httpx.AsyncClient, **requested: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json={"messages": USER} | requested)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", FAMILIES)
def test_template_chooses_its_parser(name: str) -> None:
    chosen, named = reasoning_parser_of(FAMILIES[name].template), PARSERS[FAMILIES[name].parser]
    assert chosen is not None and (chosen.opens, chosen.closes) == (named.opens, named.closes)
    assert reasoning_parser_of("{% for m in messages %}{{ m.content }}{% endfor %}I think") is None


def test_option_names_are_the_parsers() -> None:
    hints = typing.get_type_hints(Chat)
    for option, names in (("reasoning_parser", {*PARSERS, "none"}), ("tool_parser", {*CALLS})):
        literal = next(each for each in typing.get_args(hints[option]) if typing.get_args(each))
        assert set(typing.get_args(literal)) == names


# Not every family calls functions.
TRANSCRIPTS = [(name, tools) for name, each in FAMILIES.items() for tools in (False, True) if not tools or each.call]


@pytest.mark.parametrize(("name", "tools"), TRANSCRIPTS)
async def test_openai_client_gets_reasoning_apart(name: str, tools: bool) -> None:
    family = FAMILIES[name]
    text = family.call if tools else family.text
    assert text is not None
    requested: dict[str, Any] = {"model": "scripted", "messages": USER}
    body = {"chat_template_kwargs": {"thinking": True}}
    if tools:
        requested["tools"] = [{"type": "function", "function": ADD}]

    async with served(family, text) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        whole = await client.chat.completions.create(**requested, extra_body=body)
        message = whole.choices[0].message
        assert message.reasoning == message.reasoning_content == REASONING
        assert message.content == (None if tools else CONTENT)
        assert [call.function.arguments for call in message.tool_calls or ()] == ['{"a": 1}'] * tools
        usage = whole.usage
        assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
        options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": body}
        chunks = [chunk async for chunk in await client.chat.completions.create(**requested, **options)]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        for field, expected in (("reasoning", REASONING), ("reasoning_content", REASONING),
                                ("content", "" if tools else CONTENT)):  # fmt: skip
            assert "".join(getattr(delta, field, None) or "" for delta in deltas) == expected
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert "".join(call.function.arguments for call in calls) == '{"a": 1}' * tools
        assert chunks[-1].usage.completion_tokens_details == usage.completion_tokens_details
        finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert finish == [whole.choices[0].finish_reason] == ["tool_calls" if tools else "stop"]

        response = await client.responses.create(model="scripted", input="x", extra_body=body | ({
            "tools": [{"type": "function", **ADD}]} if tools else {}))  # fmt: skip
        reasoning, other = response.output
        assert reasoning.type == "reasoning" and [part.text for part in reasoning.content] == [REASONING]
        assert other.type == ("function_call" if tools else "message")
        assert tools or other.content[0].text == CONTENT
        details = response.usage.output_tokens_details
        assert details.reasoning_tokens == usage.completion_tokens_details.reasoning_tokens


@pytest.mark.parametrize("name", FAMILIES)
async def test_responses_stream_has_reasoning_items(name: str) -> None:
    family = FAMILIES[name]

    async with served(family, family.text) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        more = {"chat_template_kwargs": {"thinking": True}, "include": ["message.output_text.logprobs"]}
        events = []
        async with client.responses.stream(model="scripted", input="x", extra_body=more) as stream:
            async for event in stream:
                events.append(event)
            final = await stream.get_final_response()
        deltas = {kind: "".join(event.delta for event in events if event.type == kind)
                  for kind in ("response.reasoning_text.delta", "response.output_text.delta")}  # fmt: skip
        assert list(deltas.values()) == [REASONING, CONTENT]
        done = [event.text for event in events if event.type == "response.reasoning_text.done"]
        assert done == [REASONING] and final.output[0].content[0].text == REASONING
        shown = final.output[1].content[0]
        assert shown.text == CONTENT and "".join(entry.token for entry in shown.logprobs).endswith(CONTENT[-4:])
        again = await client.responses.retrieve(final.id)
        assert again.output[0] == final.output[0] and again.output[1].content[0].text == CONTENT


@pytest.mark.parametrize(("name", "tools"), TRANSCRIPTS)
async def test_anthropic_client_gets_thinking_blocks(name: str, tools: bool) -> None:
    family = FAMILIES[name]
    text = family.call if tools else family.text
    assert text is not None
    requested: dict[str, Any] = {"model": "scripted", "messages": USER, "max_tokens": 999}
    requested["extra_body"] = {"chat_template_kwargs": {"thinking": True}}
    if tools:
        requested["tools"] = [{"name": "add", "input_schema": ADD["parameters"]}]

    async with served(family, text) as http:
        app = http._transport.app
        element = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test", timeout=30)
        client = anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=element)
        whole = await client.messages.create(**requested)
        async with client.messages.stream(**requested) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            thinking, other = message.content
            assert (thinking.type, thinking.thinking) == ("thinking", REASONING) and thinking.signature
            assert other.input == {"a": 1} if tools else other.text == CONTENT
            assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
        assert (streamed.content[0], streamed.stop_reason) == (whole.content[0], whole.stop_reason)
        history = [*USER, {"role": "assistant", "content": [block.model_dump() for block in whole.content]}]
        if not tools:
            sizes = [
                (await client.messages.count_tokens(model="scripted", messages=[*messages, *USER])).input_tokens
                for messages in (history, [*USER, {"role": "assistant", "content": CONTENT}])
            ]
            assert sizes[0] > sizes[1] or "deepseek r1" in name  # whose template drops it


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.off is not None])
async def test_answers_without_thinking_are_content(name: str) -> None:
    family = FAMILIES[name]

    async with served(family, CONTENT) as http:
        answer = await chat(http, chat_template_kwargs=family.off)
        message = answer["choices"][0]["message"]
        assert message["content"] == CONTENT and "reasoning" not in message
        requested = {"messages": USER, "max_tokens": 99, "thinking": {"type": "disabled"}}
        [block] = (await http.post("/v1/messages", json=requested)).json()["content"]
        assert block == {"type": "text", "text": CONTENT}


async def test_reasoning_is_left_out_or_unparsed_on_request() -> None:
    family = FAMILIES["qwen3"]

    async with served(family, family.text) as http:
        answer = await chat(http, include_reasoning=False)
        message = answer["choices"][0]["message"]
        assert message["content"] == CONTENT and "reasoning" not in message
        requested = {"messages": USER, "include_reasoning": False, "stream": True}
        stream = await http.post("/v1/chat/completions", json=requested)
        assert "reasoning" not in stream.text
    async with served(family, family.text, reasoning_parser="none") as http:
        assert (await chat(http))["choices"][0]["message"]["content"] == family.text


async def test_reasoning_cut_by_its_length_has_no_content() -> None:
    family = FAMILIES["qwen3 thinking"]

    async with served(family, family.text) as http:
        answer = await chat(http, max_tokens=4)
        choice, usage = answer["choices"][0], answer["usage"]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
        assert REASONING.startswith(choice["message"]["reasoning"])
        assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 4
        response = (await http.post("/v1/responses", json={"input": "x", "max_output_tokens": 4})).json()
        assert response["status"] == "incomplete" and [item["type"] for item in response["output"]] == ["reasoning"]


async def test_conversation_continues_with_its_reasoning() -> None:
    family = FAMILIES["qwen3"]

    async with served(family, family.text) as http:
        first = (await http.post("/v1/responses", json={"input": "x"})).json()
        sizes = []
        for before in (
            {"previous_response_id": first["id"], "input": "y"},
            {"input": [*USER, *first["output"], {"role": "user", "content": "y"}]},
            {"input": [*USER, first["output"][1], {"role": "user", "content": "y"}]},
        ):
            answer = await http.post("/v1/responses", json=before)
            assert answer.status_code == 200, answer.text
            sizes.append(answer.json()["usage"]["input_tokens"])
        assert sizes[0] == sizes[1] > sizes[2]
        for field in ("reasoning", "reasoning_content"):
            before = {"role": "assistant", "content": CONTENT, field: REASONING}
            history = [*USER, before, {"role": "user", "content": "y"}]
            assert (await chat(http, messages=history))["usage"]["prompt_tokens"] == sizes[0]


@functools.cache
def marked(kind: str) -> "Marked":
    return Marked(kind)


class Marked:
    """A tokenizer of transformers whose markers are added tokens, or text."""

    def __init__(self, kind: str) -> None:
        self.backend_tokenizer = Tokenizer.from_str(HELLO.tokenizer)
        if kind != "text":
            marks = [mark for parser in PARSERS.values() for mark in (parser.opens, parser.closes)]
            special = kind == "special"
            self.backend_tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])

        self.compiler = GrammarCompiler(self, self.backend_tokenizer.get_vocab_size(), [0])

    def added_id(self, text: str) -> int | None:
        token = self.backend_tokenizer.token_to_id(text)
        return None if token is None or token < HELLO.vocab_size else token


def fits(tokenizer: Marked, grammar: Grammar, text: str) -> bool:
    """Return whether a grammar accepts a text as complete."""
    matcher = tokenizer.compiler.matcher(grammar, (0,))
    for token in tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids:
        if matcher.mask((token,)) is None:
            return False
        matcher.append(token)
    return bool(int(matcher.mask()[0]) & 1)


GRAMMARS = {
    "schema": (Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
               "additionalProperties": False}), '{"a": 1}', '{"b": 1}'),
    "object": (Grammar.json_object(), '{"b": 1}', "b"),
    "regex": (Grammar.regex(r"a/[/b]\d+\/"), "a/b12/", "a/b12"),
    "choice": (Grammar.choice(["yes", 'n"o']), 'n"o', "no"),
    "tools": (required_grammar(HERMES, [Function("add", ADD["parameters"])], lambda _: None, single=True),
              CALL, "2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "parser"), [("text", "qwen3"), ("added", "qwen3"), ("added", "mistral"), ("special", "mistral")]
)
@pytest.mark.parametrize("name", GRAMMARS)
def test_grammar_begins_after_reasoning(kind: str, parser: str, name: str) -> None:
    tokenizer, (given, good, bad) = marked(kind), GRAMMARS[name]
    opens, closes = PARSERS[parser].opens, PARSERS[parser].closes
    for begun in (True, False):
        first = "" if begun else opens
        made = after_reasoning(given, Thinking(parser, begun), tokenizer.added_id, composed=name == "tools")
        for gap in ("", "\n\n"):
            assert fits(tokenizer, made, f"{first}{REASONING}\n{closes}{gap}{good}")
        assert not fits(tokenizer, made, f"{first}{REASONING}{closes}{bad}")
        assert not fits(tokenizer, made, f"{first}{REASONING}")
        assert fits(tokenizer, made, good) is not begun


BUDGETED = [name for name in FAMILIES if name != "olmo 3"]  # families whose markers are tokens


async def by_every_client(http: httpx.AsyncClient, budget: int, **requested: Any) -> list[tuple[str, str]]:
    """Reasoning and content by three routes and two clients, whole and streamed."""
    actual, body = [], {"thinking_token_budget": budget, "chat_template_kwargs": {"thinking": True}} | requested
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
    chat = {"model": "scripted", "messages": USER, "extra_body": body}
    message = (await client.chat.completions.create(**chat)).choices[0].message
    actual.append((message.reasoning or "", message.content or ""))
    chunks = [chunk async for chunk in await client.chat.completions.create(**chat, stream=True)]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    parts = ("".join(getattr(delta, name, None) or "" for delta in deltas) for name in ("reasoning", "content"))
    actual.append(tuple(parts))
    response = await client.responses.create(model="scripted", input="x", extra_body=body)
    kinds = {item.type: item.content[0].text for item in response.output}
    actual.append((kinds.get("reasoning", ""), kinds.get("message", "")))
    element = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(http._transport.app), base_url="http://test", timeout=30
    )
    claude = anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=element)
    requested = {
        "model": "scripted",
        "messages": USER,
        "max_tokens": 999,
        "stop_sequences": requested.get("stop") or (),
    }
    requested["thinking"] = {"type": "enabled", "budget_tokens": budget}
    whole = await claude.messages.create(**requested)
    async with claude.messages.stream(**requested) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        kinds = {block.type: block for block in message.content}
        thinking, text = kinds.get("thinking"), kinds.get("text")
        actual.append((thinking.thinking if thinking else "", text.text if text else ""))
    return actual


@pytest.mark.parametrize("name", BUDGETED)
async def test_budget_ends_the_reasoning(name: str) -> None:
    family = FAMILIES[name]

    async with served(family, family.text) as http:
        tokenizer = Tokenizer.from_str(hello_of(family.markers, family.added).tokenizer)
        thoughts = tokenizer.encode(REASONING, add_special_tokens=False).ids
        for budget in (0, 1, 3, len(thoughts), 1 << 40):
            kept = tokenizer.decode(thoughts[:budget], skip_special_tokens=False)
            assert await by_every_client(http, budget) == [(kept, CONTENT)] * 5
        answer = await chat(http, thinking_token_budget=3, chat_template_kwargs={"thinking": True})
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3 + 4  # and the markers


@pytest.mark.parametrize("name", [name for name, tools in TRANSCRIPTS if tools and name != "gpt-oss"])
async def test_calls_are_forced_after_the_budget(name: str) -> None:
    family = FAMILIES[name]
    tools = [{"type": "function", "function": ADD | {"strict": True}}]

    async with served(family, family.call) as http:
        for choice in ("required", "auto"):
            for budget in (2, None):
                requested = {"tools": tools, "tool_choice": choice, "thinking_token_budget": budget}
                message = (await chat(http, **requested))["choices"][0]["message"]
                assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1}]
                assert REASONING.startswith(message["reasoning"]) is True
                assert (message["reasoning"] == REASONING) is (budget is None)


@given(data=st.data(), kind=st.sampled_from(["added", "special"]), begun=st.booleans(), budget=st.integers(0, 5))
def test_unused_budget_changes_nothing(data: st.DataObject, kind: str, begun: bool, budget: int) -> None:
    tokenizer = marked(kind)
    token_of, size = tokenizer.backend_tokenizer.token_to_id, tokenizer.backend_tokenizer.get_vocab_size()
    opens, closes = token_of("<think>"), token_of("</think>")
    matcher = tokenizer.compiler.matcher(within_budget(Thinking("qwen3", begun), token_of, budget), (0,))
    left, over = budget if begun else None, False
    for token in data.draw(st.lists(st.sampled_from([1, 2, opens, closes]), max_size=12)):
        allowed = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:size].nonzero()[0].tolist()
        assert allowed == ([closes] if left == 0 and not over else list(range(size)))
        token = token if token in allowed else closes
        if left is None:
            left = budget if token == opens else None
        elif not over:
            left, over = left - 1, token == closes
        matcher.append(token)


async def test_impossible_budgets_are_refused() -> None:
    async def refusal(http: httpx.AsyncClient, path: str, **requested: Any) -> str:
        answer = await http.post(path, json=requested)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"]

    chats, messages = "/v1/chat/completions", "/v1/messages"
    requested = {"messages": USER, "thinking_token_budget": 3}
    async with served(FAMILIES["olmo 3"], "a") as http:
        assert "<think> is one token" in await refusal(http, chats, **requested)
        assert (await http.post(chats, json=requested | {"thinking_token_budget": None})).status_code == 200
    async with served(FAMILIES["qwen3"], "a") as http:
        assert "thinking_token_budget" in await refusal(http, chats, **requested | {"thinking_token_budget": -1})
        assert "thinking_token_budget" in await refusal(http, "/v1/completions", prompt="a", thinking_token_budget=3)
        for thinking in ({"type": "disabled", "budget_tokens": 3}, {"type": "adaptive", "budget_tokens": 3}):
            given = {"messages": USER, "max_tokens": 9, "thinking": thinking}
            assert 'budget_tokens requires the type "enabled"' in await refusal(http, messages, **given)
        off = requested | {"chat_template_kwargs": FAMILIES["qwen3"].off}
        assert (await http.post(chats, json=off)).status_code == 200
    async with served(FAMILIES["qwen3"], "a", reasoning_parser="none") as http:
        assert "--reasoning-parser" in await refusal(http, chats, **requested)


@pytest.mark.parametrize("name", FAMILIES)
async def test_stop_strings_apply_to_content_only(name: str) -> None:
    family = FAMILIES[name]

    async with served(family, family.text) as http:
        budget = {"thinking_token_budget": 1 << 20} if name in BUDGETED else {}
        budget["chat_template_kwargs"] = {"thinking": True}
        for stop, content in ((" is", CONTENT.partition(" is")[0]), ("One", CONTENT)):
            message = (await chat(http, stop=stop, **budget))["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == (REASONING, content)
            if name in BUDGETED:
                actual = await by_every_client(http, 1 << 20, stop=[stop])
                assert actual == [(REASONING, content)] * 5


def read(lines: Iterator[str]) -> tuple[str, str, str]:
    """Reasoning, content and the call's arguments of a stream."""
    parts = ["", "", ""]
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
            delta = choice["delta"]
            calls = "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
            for place, text in enumerate((delta.get("reasoning"), delta.get("content"), calls)):
                parts[place] += text or ""
    return tuple(parts)


@pytest.mark.parametrize("tools", [pytest.param(tools, marks=EXHAUSTIVE) for tools in (False, True)])
def test_thinking_answer_survives_kills_and_replays(tools: bool, folder: Path, tmp_path: Path) -> None:
    model, template = tmp_path / "model", tmp_path / "think.jinja"
    shutil.copytree(model_of(folder), model)
    (model / "tokenizer.json").write_text(with_think_tokens((model / "tokenizer.json").read_text()))
    template.write_text(TEMPLATE + "<think>\n")
    options = ["--chat-template", str(template), "--journal", str(tmp_path / "journal")]
    requested: dict[str, Any] = {"messages": USER, "max_tokens": 150, "seed": 5, "temperature": 0.9, "receipt": True}
    requested |= {"thinking_token_budget": 40}
    if tools:
        requested |= {"tools": [{"type": "function", "function": ADD}], "tool_choice": "required"}
    server = started(tmp_path, *options, model=model)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            whole = http.post("/v1/chat/completions", json=requested).raise_for_status().json()
            message, receipt = whole["choices"][0]["message"], whole["receipt"]
            calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
            expected = (message["reasoning"], message["content"] or "", calls)
            assert bool(calls) is tools and whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 41
            verdict = http.post("/v1/verify", json=receipt).json()
            assert (verdict["outcome"], verdict["num_tokens"]) == ("equal", whole["usage"]["completion_tokens"])
            for victim in ("engine", "server"):
                headers = {"Idempotency-Key": victim}
                body = requested | {"stream": True}
                with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
                    lines = stream.iter_lines()
                    begun = list(itertools.islice(lines, 20))
                    if victim == "engine":
                        os.kill(engine_processes(server.process.pid)[0], signal.SIGKILL)
                        assert read(iter([*begun, *lines])) == expected
        server.process.kill()
        server.process.wait()
        server = started(tmp_path, *options, model=model)
        with httpx.Client(base_url=server.url, timeout=120) as http:
            for key in ("server", "engine"):
                headers = {"Idempotency-Key": key}
                answer = http.post("/v1/chat/completions", json=requested | {"stream": True}, headers=headers)
                assert read(iter(answer.text.splitlines())) == expected
    finally:
        server.process.kill()
        server.process.wait()


async def test_other_grammars_after_reasoning_are_refused() -> None:
    requested = {"messages": USER, "structured_outputs": {"grammar": 'start: "a"'}}

    family = FAMILIES["qwen3"]
    async with served(family, "a") as http:
        answer = await http.post("/v1/chat/completions", json=requested)
        assert answer.status_code == 400 and "after reasoning is not supported" in answer.text
        off = requested | {"chat_template_kwargs": family.off}
        assert (await http.post("/v1/chat/completions", json=off)).status_code == 200
    async with served(FAMILIES["gpt-oss"], "a") as http:
        answer = await http.post("/v1/chat/completions", json=requested | {"structured_outputs": {"json": {}}})
        assert answer.status_code == 400 and "gpt-oss" in answer.text
