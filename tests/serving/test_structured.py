"""Structured output over HTTP: every field that asks for it, by the unmodified client, with one sha256 a request."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from contextlib import nullcontext

import httpx
import openai
import pydantic
import pytest

from detcompile.errors import InvalidInput, WorkerError
from detcompile.models.hub import TINY_FOLDER
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.serving.grammar_check import GrammarCheck
from detcompile.serving.openai.schema import ChatRequest, CompletionRequest
from tests.serving.conftest import Server
from tests.serving.test_openai import MESSAGES, sha256, streamed, whole


class Verdict(pydantic.BaseModel):
    """What the model has to answer."""

    ok: bool
    kind: str = pydantic.Field(pattern="^(yes|no)$")
    size: int = pydantic.Field(ge=0, le=99)


SCHEMA = Verdict.model_json_schema() | {"additionalProperties": False}
FIELDS = {
    "guided_json": {"guided_json": SCHEMA},
    "guided_json as text": {"guided_json": json.dumps(SCHEMA)},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def test_schema_gives_same_answer_through_every_field(client: openai.OpenAI) -> None:
    digests = {}
    for name, field in FIELDS.items():
        extra = {"return_token_ids": True, **field}
        for way, ask in (("whole", whole), ("stream", streamed)):
            first, second = ask(client, n=2, max_tokens=60, extra_body=extra)
            digests[name, way] = sha256(first), sha256(second)
            Verdict.model_validate_json(first["text"])
            assert first["finish_reason"] == "stop"
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "(ab|cd){3}"}, r"(ab|cd){3}"),
        ({"guided_choice": ["first", "second one"]}, r"first|second one"),
        ({"guided_grammar": 'start: "[" /[0-9]{2}/ "]"'}, r"\[[0-9]{2}\]"),
        ({"guided_grammar": 'root ::= "[" [0-9] [0-9] "]"'}, r"\[[0-9]{2}\]"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, r"x|y"),
    ],
)
def test_guided_output_matches(client: openai.OpenAI, extra: dict, pattern: str) -> None:
    [text] = [choice["text"] for choice in whole(client, extra_body={"return_token_ids": True} | extra)]
    assert re.fullmatch(pattern, text), text


def test_parse_returns_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Verdict, seed=4)
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, response_format=Verdict, seed=4) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_json_mode_returns_object(client: openai.OpenAI) -> None:
    mode = {"type": "json_object"}
    requests = {
        "model": "tiny",
        "messages": MESSAGES,
        "response_format": mode,
        "max_tokens": 200,
        "logit_bias": {"95": 9},
    }
    answer = client.chat.completions.create(seed=1, **requests)
    text = answer.choices[0].message.content
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("field", "expected_text"),
    [
        ({"guided_regex": "("}, "regex cannot be served"),
        ({"guided_json": {"type": "never"}}, "json_schema cannot be served"),
        ({"guided_json": "{"}, "json_schema cannot be read"),
        ({"guided_regex": "a" * 70_000}, "65536 at most"),
    ],
)
def test_invalid_grammars_are_refused(http: httpx.Client, field: dict, expected_text: str) -> None:
    for sent in (field, field | {"stream": True}):
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | sent)
        assert answer.status_code == 400 and expected_text in answer.json()["error"]["message"], answer.text
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_slow_grammar_does_not_delay_others(http: httpx.Client) -> None:
    endless = " & ".join(f"/(.*[a-f].{{{40 + place}}})+x.*/" for place in range(100))
    start = time.monotonic()
    answer = http.post("/v1/completions", json={"prompt": "a", "guided_grammar": f"start: A\nA: {endless}"})
    assert answer.status_code == 400 and "takes over 2 s" in answer.json()["error"]["message"]
    assert time.monotonic() - start < 10
    answer = http.post("/v1/completions", json={"prompt": "a", "guided_regex": "ab", "max_tokens": 9})
    assert answer.json()["choices"][0]["text"] == "ab"


def test_a_grammar_is_checked_beside_large_mappings(monkeypatch: pytest.MonkeyPatch, in_the_root: None) -> None:
    """Threads and libraries of a large machine map gigabytes, which must not count as the grammar's memory."""
    mapped = "memory = mmap.mmap(-1, 6 << 30, flags=mmap.MAP_PRIVATE)"
    code = f"import mmap, runpy, sys; {mapped}; runpy.run_module(sys.argv[1], run_name='__main__')"
    monkeypatch.setattr("detcompile.serving.grammar_check.BOUND", (sys.executable, "-c", code))

    async def checked() -> None:
        check = GrammarCheck((TINY_FOLDER / "tokenizer.json").read_text(), 60, lambda *_: nullcontext())
        await check.require(Grammar.regex("a"), "")
        await check.stop()

    asyncio.run(checked())


def test_failed_grammar_checker_reports_exit(monkeypatch: pytest.MonkeyPatch, in_the_root: None) -> None:
    monkeypatch.setattr("detcompile.serving.grammar_check.BOUND", (sys.executable, "-c", "raise SystemExit(7)"))

    async def checked() -> None:
        check = GrammarCheck((TINY_FOLDER / "tokenizer.json").read_text(), 60, lambda *_: nullcontext())
        with pytest.raises(WorkerError, match="it ended with exit code 7, and its output is in the server's log"):
            await check.require(Grammar.regex("a"), "")
        await check.stop()

    asyncio.run(checked())


def test_grammar_that_crashes_checker_is_refused(monkeypatch: pytest.MonkeyPatch, in_the_root: None) -> None:
    async def refusals() -> list[str]:
        check, actual = GrammarCheck((TINY_FOLDER / "tokenizer.json").read_text(), 60, lambda *_: nullcontext()), []
        for grammar in (Grammar.regex("a"), Grammar.regex("("), Grammar.regex("b")):
            try:
                await check.require(grammar, "")
                actual.append("")
                os.kill(check._process.pid, signal.SIGKILL)
                await check._process.wait()
            except InvalidInput as error:
                actual.append(str(error))
        monkeypatch.setattr("detcompile.serving.grammar_check.COMPILE_SECONDS", 0.0001)
        with pytest.raises(InvalidInput, match="too much memory"):
            await check.require(Grammar.regex("c" * 60_000), "")
        await check.require(Grammar.regex("a"), "")  # which is known by now
        await check.stop()
        with pytest.raises(InvalidInput, match="no tokenizer"):
            await GrammarCheck(None, 60, lambda *_: nullcontext()).require(Grammar.regex("a"), "")
        return actual

    actual = asyncio.run(refusals())
    assert actual[0] == actual[2] == "" and "regex cannot be served" in actual[1]


def test_both_request_types_accept_structured_fields() -> None:
    wanted = {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    assert wanted <= set(CompletionRequest.__struct_fields__) & set(ChatRequest.__struct_fields__)
