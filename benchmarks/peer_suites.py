"""Run other projects' checks against `detcompile serve`, and count how many pass.

    git clone https://github.com/ggml-org/llama.cpp; git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    pip download --no-deps sglang; unzip sglang-*.whl -d sglang; git clone https://github.com/vllm-project/vllm
    detcompile serve FOLDER --name tiny --port 8123 --chat-template template.jinja
    python -m benchmarks.peer_suites --url http://127.0.0.1:8123 --commit $(git rev-parse --short HEAD) \
        --llama-cpp llama.cpp --json-schema JSON-Schema-Test-Suite --sglang sglang --vllm vllm
    git clone https://github.com/openresponses/openresponses; (cd openresponses; npm install zod@3 tsx)
    python -m benchmarks.peer_suites --url http://127.0.0.1:8124 --commit ... --open-responses openresponses

FOLDER is a copy of the embedded model (detcompile/tiny) whose generation_config.json has "max_new_tokens": 64, as
llama.cpp's tests set it for their server. Open Responses needs answers that end: the server at 8124 serves a copy whose
"eos_token_id" lists all tokens with a line end, and whose template shows tools beside `<tool_call>`. The suites' code
stays in these folders; our glue sets the URL and the model's name, and maps SGLang's /generate to /v1/completions.
Only the given suites run. A failing check of llama.cpp is counted under the first of REASONS that its message matches.

- llama.cpp: tools/server/tests/unit, files for routes that both servers have and that need no other model.
- SGLang: sglang/test/test_deterministic.py, modes single, prefix and radix_cache, greedy and drawn.
- vLLM: tests/v1/determinism/test_online_batch_invariance.py.
- JSON Schema: every instance of tests/draft2020-12 under the masks of its schema, in the server's grammar compiler.
- Open Responses: bin/compliance-test.ts, by node (20 or newer) with tsx in the place of bun.

Writes benchmarks/results/peer-suites-<commit>.json.
"""

import argparse
import collections
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx

from benchmarks.kill_drill import RESULTS
from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.grammar import Grammar
from tests.runtime.test_json_schemas import started, takes

__all__ = ["json_schema", "llama_cpp", "open_responses", "sglang", "vllm"]

FILES = ("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "security", "stream",
         "tokenize")  # fmt: skip
FILE_SECONDS = 900  # for the tests of one file
REASONS = {  # why a check of llama.cpp fails, by a pattern of its message
    "its own route": r"404|: Not Found",
    "a field that the docs refuse by name, or its own form of one": r"400 == (200|500)|\(400,",
    "its own fields of an answer, or its own error types": r"KeyError|is not None|is None|== 501",
    "text of its own model": r"match_regex|Unexpected output|assert (?:False|[0-9]+ == |')",
    "its files, which are fetched": r"ConnectionError|FileNotFound|No such file",
}


def llama_cpp(folder: Path, url: str) -> dict[str, Any]:
    """Run the tests of llama.cpp's server against ours."""
    environment = {"DEBUG_EXTERNAL": "1", "PORT": url.rpartition(":")[2]}
    with tempfile.TemporaryDirectory() as name:
        tests = Path(name, "tests")
        shutil.copytree(folder / "tools" / "server" / "tests", tests)
        for file in (tests / "unit").glob("test_*.py"):  # it takes any name of a model, and routes without /v1
            text = re.sub(r'("model": *|model=)"[^"]*"', r'\1"tiny"', file.read_text())
            file.write_text(re.sub(r'"/(chat/completions|responses|embeddings|models)"', r'"/v1/\1"', text))
        files = [name for name in FILES if (tests / f"unit/test_{name}.py").exists()]
        return {name: _pytest(tests, f"unit/test_{name}.py", environment) for name in files}


def vllm(folder: Path, url: str) -> dict[str, Any]:
    """Run vLLM's determinism test over HTTP: 32 prompts alone and together, tokens and log-probabilities."""
    tests = folder / "tests" / "v1" / "determinism"
    source = (tests / "utils.py").read_text()
    prompts = re.search(r"^def _random_prompt.*?(?=^def |\Z)", source, re.M | re.S)
    assert prompts is not None
    glue = (
        "import contextlib, random, openai, pytest\n"
        "BACKENDS, TEST_MODEL, skip_if_not_cuda_alike = ['any'], 'tiny', pytest.mark.filterwarnings('default')\n"
        f"class RemoteOpenAIServer(contextlib.nullcontext):\n    def __init__(self, *_): super().__init__(self)\n"
        f"    def get_client(self): return openai.OpenAI(base_url={url + '/v1'!r}, api_key='none')\n"
    )
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "tests").mkdir()
        (place / "utils.py").write_text(glue + prompts[0])
        (place / "tests" / "utils.py").write_text("from utils import *\n")
        (place / "test_online.py").write_text((tests / "test_online_batch_invariance.py").read_text())
        return _pytest(place, "test_online.py", {})


def sglang(folder: Path, url: str) -> dict[str, Any]:
    """Run SGLang's deterministic script: each mode must give one text for one prompt."""
    sys.modules["sglang.profiler"] = types.ModuleType("sglang.profiler")
    sys.modules["sglang.profiler"].run_profile = None  # type: ignore[attr-defined]
    sys.modules["sglang"] = types.ModuleType("sglang")
    sys.path.insert(0, str(folder / "sglang" / "test"))
    suite = importlib.import_module("test_deterministic")
    suite.requests = types.SimpleNamespace(post=lambda to, json=None, stream=False: _generated(url, to, json))  # type: ignore[attr-defined]
    host, port = url.removeprefix("http://").split(":")
    answers: dict[str, Any] = {}
    for mode, temperature in [(mode, heat) for mode in ("single", "prefix", "radix_cache") for heat in (0.0, 0.8)]:
        arguments = suite.BenchArgs(host=host, port=int(port), test_mode=mode, temperature=temperature, n_trials=6)
        arguments.max_new_tokens = 24
        random.seed(1)
        distinct = suite.test_deterministic(arguments)
        answers[f"{mode}, temperature {temperature}"] = distinct
    held = sum(all(number == 1 for number in distinct) for distinct in answers.values())
    return {"passed": held, "failed": len(answers) - held, "texts of one prompt": answers}


def open_responses(folder: Path, url: str) -> dict[str, Any]:
    """Run Open Responses' compliance tests; return what is wrong with each answer that fails."""
    command = ["npx", "tsx", "bin/compliance-test.ts", "--base-url", f"{url}/v1", "--api-key", "none"]
    command += ["--model", "tiny", "--json"]
    environment = os.environ | {"NODE_OPTIONS": "--experimental-websocket"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=FILE_SECONDS)
    report = json.loads(ran.stdout)
    failed = [result for result in report["results"] if result["status"] == "failed"]
    not_held = {result["id"]: [*result["errors"], _message(result.get("response"))] for result in failed}
    return {name: report["summary"][name] for name in ("passed", "failed", "skipped")} | {"not held": not_held}


def _message(response: Any) -> str | None:
    """Return the message of an error answer."""
    error = response.get("error") if isinstance(response, dict) else None
    return None if error is None else error["message"]


def json_schema(folder: Path) -> dict[str, Any]:
    """Check the suite's instances against the masks of their schemas; no invalid one may be accepted."""
    counts: collections.Counter[str] = collections.Counter()
    taken: list[str] = []
    for file in sorted((folder / "tests" / "draft2020-12").glob("*.json")):
        for case in json.loads(file.read_text()):
            try:
                start = started(Grammar.json_schema(case["schema"]))
            except InvalidInput:
                counts["schemas refused by name"] += 1
                continue
            counts["schemas taken"] += 1
            for test in case["tests"]:
                try:
                    took = takes(start, json.dumps(test["data"], ensure_ascii=False))
                except KeyError:  # a byte that the tokenizer of bytes has no name for
                    continue
                counts[f"{'right' if test['valid'] else 'wrong'} instances {'taken' if took else 'refused'}"] += 1
                if took and not test["valid"]:
                    taken.append(f"{file.stem}: {case['description']}: {test['description']}")
    return {**counts, "passed": counts["wrong instances refused"], "failed": len(taken), "wrong instances": taken[:20]}


def _generated(url: str, to: str, request: dict[str, Any] | None) -> Any:
    """Return what SGLang's route /generate would answer."""
    answer = types.SimpleNamespace(status_code=200, json=dict)
    if not to.endswith("/generate"):  # /flush_cache
        return answer
    assert request is not None
    given = request["sampling_params"]
    ids = request.get("input_ids")
    prompt = request.get("text") if ids is None else [3 + token % 4000 for token in ids]
    body = {"prompt": prompt, "seed": given["sampling_seed"], "max_tokens": given["max_new_tokens"], "logprobs": 0}
    body |= {name: given[name] for name in ("temperature", "frequency_penalty", "presence_penalty")}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=600).json()
    outputs = [
        {
            "text": choice["text"],
            "output_ids": choice["token_ids"],
            "meta_info": {
                "output_token_logprobs": list(zip(choice["logprobs"]["token_logprobs"], choice["token_ids"]))
            },
        }
        for choice in answer["choices"]
    ]
    answer.json = lambda: outputs if len(outputs) > 1 or isinstance(request.get("text"), list) else outputs[0]
    return answer


def _pytest(folder: Path, file: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run another project's tests in place. Return counts, and reasons of failures."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
        command += ["--junitxml", str(report), "-o", "junit_family=xunit1", file]
        Path(name, "wget.py").touch()  # llama.cpp's tests import it for files that an external server has
        path = os.pathsep.join([str(folder), name])
        inherited = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            subprocess.run(
                command, cwd=folder, env=inherited | environment, stdout=subprocess.DEVNULL, timeout=FILE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"not finished": FILE_SECONDS}
        cases = list(ElementTree.parse(report).iter("testcase"))
    counts, reasons, others = collections.Counter[str](), collections.Counter[str](), []
    for case in cases:
        bad = [part for part in case if part.tag in ("failure", "error")]
        skipped = any(part.tag == "skipped" for part in case)
        counts["failed" if bad else "skipped" if skipped else "passed"] += 1
        if bad:
            message = str(bad[0].get("message"))
            reason = next((name for name, pattern in REASONS.items() if re.search(pattern, message)), "other")
            reasons[reason] += 1
            others.append(f"{reason}: {case.get('classname')}::{case.get('name')}: {message[:300]}")
    return {**counts, "reasons": dict(reasons), "not held": sorted(others)}


def main() -> int:
    """Run the given suites. Return 1 if bits differed or an answer violated its schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    for name in ("llama-cpp", "sglang", "vllm", "open-responses", "json-schema"):
        parser.add_argument(f"--{name}", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"commit": arguments.commit}
    for run in (llama_cpp, sglang, vllm, open_responses):
        folder = getattr(arguments, run.__name__)
        if folder is not None:
            result[run.__name__] = run(folder.resolve(), arguments.url)
    if arguments.json_schema is not None:
        result["json_schema"] = json_schema(arguments.json_schema)
    (RESULTS / f"peer-suites-{arguments.commit}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(any(result.get(name, {}).get("failed") for name in ("sglang", "vllm", "json_schema")))


if __name__ == "__main__":
    sys.exit(main())
