"""Clients that others wrote, unmodified: lm-eval, LangChain's, GuideLLM, and Schemathesis over the schema.

They need the extra `clients`, which `make test-all` installs.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
import torch

import detcompile
from detcompile.models.hub import TINY_FOLDER
from tests.draws import seed_of_run
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import compiled
from tests.serving.conftest import Server, model_of, started
from tests.serving.test_tools import ADD, check

MISSING = "needs the extra `clients`: pip install -e .[test,clients]"
pytestmark = EXHAUSTIVE
TEXTS = Path(TINY_FOLDER, "prompts.txt").read_text().split("\n---\n")[:6]
TOOL = {"type": "function", "function": {"name": "add", "parameters": ADD}}


def harness(server: Server, route: str, **options: Any) -> Any:
    """The harness' own client of a route."""
    pytest.importorskip("lm_eval", reason=MISSING)
    pytest.importorskip("tenacity", reason=MISSING)
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    kind = LocalChatCompletion if route == "chat/completions" else LocalCompletionsAPI
    return kind(base_url=f"{server.url}/v1/{route}", model="tiny", **options)


def instances(kind: str, given: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, place) for place, each in enumerate(given)]


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 3}, {"num_concurrent": 4}, {"tokenized_requests": False, "batch_size": 2}],
    ids=["alone", "batches", "at once", "as text"],
)
def test_lm_eval_gets_exact_engine_loglikelihoods(server: Server, options: dict) -> None:
    client = harness(server, "completions", **options)
    assert client.tokenizer_backend == "remote"  # it found /tokenizer_info and /tokenize
    cuts = [min(len(text) // 2, 40 + 9 * place) for place, text in enumerate(TEXTS)]
    pairs = [(text[:cut], text[cut : 2 * cut + 20]) for text, cut in zip(TEXTS, cuts)]
    actual = client.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    model = compiled("tiny", torch.bfloat16)
    assert httpx.get(f"{server.url}/v1/fingerprint").json()["fingerprint"] == model.fingerprint
    tokenizer: Any = model.tokenizer
    firsts = [tokenizer(first.rstrip())["input_ids"] for first, _ in pairs]  # spaces there belong to what comes behind
    whole = [ids + tokenizer("".join(pair))["input_ids"][len(ids) :] for ids, pair in zip(firsts, pairs)]
    params = detcompile.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs = model.engine().generate(whole, params, progress=False)
    for start, ids, output, (total, greedy) in zip(map(len, firsts), whole, outputs, actual, strict=True):
        assert output.prompt_logprobs is not None
        entries = [entry for entry in output.prompt_logprobs[start:] if entry is not None]
        assert len(entries) == len(ids) - start > 0
        assert total == sum(entry.logprob for entry in entries)
        assert greedy == all(entry.logprob == max(entry.top.values()) for entry in entries)


def test_lm_eval_generates_same_text_as_engine(server: Server) -> None:
    how = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}
    client = harness(server, "completions", batch_size=4)
    texts = [text[:200] for text in TEXTS]
    actual = client.generate_until(instances("generate_until", [(text, how) for text in texts]), disable_tqdm=True)
    params = detcompile.SamplingParams(max_tokens=24, temperature=0, stop=["\n\n"])
    outputs = compiled("tiny", torch.bfloat16).engine().generate(texts, params, progress=False)
    assert actual == [output.outputs[0].text for output in outputs] and any(actual)


def test_lm_eval_chats(server: Server) -> None:
    client = harness(server, "chat/completions")
    from lm_eval.models.api_models import JsonChatStr

    history = [{"role": "user", "content": "Write a function."}]
    how = {"until": ["<user>"], "max_gen_toks": 16}
    given = [(JsonChatStr(json.dumps(history)), how)]
    [actual] = client.generate_until(instances("generate_until", given), disable_tqdm=True)
    requests = {"messages": history, "temperature": 0, "max_tokens": 16, "stop": ["<user>"]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=requests, timeout=60).json()
    assert actual == answer["choices"][0]["message"]["content"]


class Sum(pydantic.BaseModel):
    """Two numbers."""

    first: int
    second: int


def test_langchain_chat_stream_parse_and_tools(server: Server) -> None:
    openai = pytest.importorskip("langchain_openai", reason=MISSING)
    item = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny"}
    chat = openai.ChatOpenAI(**item, temperature=0.9, seed=4, max_tokens=60)
    answer = chat.invoke("Write a function.")
    requests = {"messages": [{"role": "user", "content": "Write a function."}], "temperature": 0.9, "seed": 4}
    plain = httpx.post(f"{server.url}/v1/chat/completions", json=requests | {"max_tokens": 60}, timeout=60).json()
    assert answer.content == plain["choices"][0]["message"]["content"]
    assert "".join(part.content for part in chat.stream("Write a function.")) == answer.content
    responses = openai.ChatOpenAI(**item, temperature=0.9, max_tokens=60, use_responses_api=True)
    calls = responses.invoke("Write a function.", extra_body={"seed": 4})
    assert calls.text == answer.content
    parts = list(responses.stream("Write a function.", extra_body={"seed": 4}))
    assert "".join(part.text for part in parts) == answer.content
    longer = openai.ChatOpenAI(**item, temperature=0.9, seed=4, max_tokens=300)
    parsed = longer.with_structured_output(Sum, method="json_schema").invoke("Two numbers.")
    assert isinstance(parsed, Sum)
    [call] = longer.bind_tools([TOOL], tool_choice="add").invoke("Add.").tool_calls
    check(pydantic_call(call))
    text = openai.OpenAI(**item, temperature=0.9, seed=4, max_tokens=20).invoke("def add(a, b):")
    given = {"prompt": "def add(a, b):", "temperature": 0.9, "seed": 4, "max_tokens": 20, "top_p": 1}  # its default
    assert text == httpx.post(f"{server.url}/v1/completions", json=given, timeout=60).json()["choices"][0]["text"]


def pydantic_call(call: dict[str, Any]) -> Any:
    """A call as ``check`` reads it."""
    function = type("Function", (), {"name": call["name"], "arguments": json.dumps(call["args"])})
    return type("Call", (), {"function": function})


@pytest.mark.skipif(importlib.util.find_spec("guidellm") is None, reason=MISSING)
@pytest.mark.parametrize("profile", ["kind=concurrent,streams=4", "kind=poisson,rate=4"])
def test_guidellm_runs_without_errors(profile: str, server: Server, tmp_path: Path) -> None:
    report, num_requests, num_tokens = tmp_path / "report.json", 24, 16
    given = {
        "backend": f"kind=openai_http,target={server.url},model=tiny",
        "profile": profile,
        "constraint": f"kind=max_requests,count={num_requests}",
        "tokenizer": f"kind=hf_auto,model={TINY_FOLDER}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={num_tokens}",
        "output": f"kind=json,path={report}",
    }
    options = [part for name in given for part in (f"--{name}", given[name])]
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    [actual] = json.loads(report.read_text())["benchmarks"]
    requests = actual["requests"]
    assert not requests["errored"] and len(requests["successful"]) == num_requests
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {num_tokens}


@pytest.fixture
def brief(folder: Path, tmp_path: Path) -> Iterator[Server]:
    """A server whose answers have eight tokens at most."""
    model = tmp_path / "model"
    shutil.copytree(model_of(folder), model)
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"max_new_tokens": 8}))
    actual = started(tmp_path, "--queue-timeout", "600", model=model)  # a machine that is slow is no fault
    yield actual
    assert actual.stop() == 0
    assert not any("Traceback" in line for line in actual.lines), "".join(actual.lines)


@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason=MISSING)
@pytest.mark.parametrize("count", [3, pytest.param(300, marks=EXHAUSTIVE)])
def test_schemathesis_finds_no_server_error(count: int, brief: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{brief.url}/openapi.json", "--seed"]
    command += [str(seed_of_run() % (1 << 31)), "--max-examples", str(count), "--checks", "not_a_server_error"]
    command += ["--continue-on-failure", "--no-shrink", "--request-timeout", "120", "--suppress-health-check", "all"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3000, cwd=tmp_path)
    failures = ran.stdout.partition("= FAILURES =")[2] or ran.stdout  # the first of them matters, not the summary
    assert ran.returncode == 0, failures[:6000] + ran.stderr[-2000:]
    assert "test cases:" in ran.stdout.lower() and httpx.get(f"{brief.url}/ready").status_code == 200
