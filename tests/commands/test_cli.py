"""The command line as a user runs it: results, logs and exit codes."""

import contextlib
import importlib
import inspect
import io
import json
import math
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import detcompile
from detcompile import CompiledModel
from detcompile.commands import cli, export
from detcompile.commands.axes import AXES
from detcompile.commands.generate import read_prompts, with_successive_seeds
from detcompile.errors import InvalidInput
from detcompile.models.hub import TINY_FOLDER
from detcompile.models.spec import ModelSpec
from detcompile.runtime.requests.sampling_params import SamplingParams
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import compiled, without_inductor
from tests.models.hub_cases import COMMIT, put_snapshot, with_cache
from tests.serving.reasoning_cases import with_think_tokens

FULL_AXES = {*AXES, "restart"} - {"cuda_graphs"}
MODEL = "tiny-draft"  # as "tiny", and sooner compiled


PROMPTS = ["def mean(values):", "import json", "class Point:"]
KEEPING = os.environ | {"DETCOMPILE_KEEP_PROGRAMS": "1"}  # of processes that share a program
SAMPLED = ("--device", "cpu", "--max-tokens", "24", "--temperature", "0.9", "--top-p", "0.95")


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "detcompile.commands.cli", *arguments],
        env=KEEPING,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As ``run``, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["detcompile", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_help_and_version_import_no_torch():
    code = "import sys; from detcompile.commands import cli; cli.main()"
    for option, shown in (("--help", "tune-speculation"), ("--version", detcompile.__version__)):
        checked = f"import atexit; atexit.register(lambda: print('torch' in sys.modules)); sys.argv[1:] = ['{option}']"
        command = [sys.executable, "-c", f"import sys; {checked}; {code}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert shown in done.stdout and done.stdout.splitlines()[-1] == "False"


def test_command_list_shows_first_help_lines():
    for name, line in cli.COMMANDS.items():
        command = importlib.import_module(cli.module_of(name)).command
        assert inspect.getdoc(command).splitlines()[0] == line


def test_help_has_a_short_option():
    for command in ((), ("diff",)):
        shown = [run_here(*command, option) for option in ("--help", "-h")]
        assert shown[0].returncode == shown[1].returncode == 0 and shown[0].stdout == shown[1].stdout != ""


def test_unknown_command_is_named():
    done = run_here("serve-me")
    assert done.returncode == 2 and "serve-me" in done.stderr


def compiled_here(*_: object) -> CompiledModel:
    return compiled(MODEL, torch.bfloat16)


@pytest.fixture(scope="module")
def answered() -> subprocess.CompletedProcess[str]:
    """Run generate on three prompts and one that is too long, one per line of standard input."""
    lines = [PROMPTS[0], "", "x = 1 + " * 1000, *PROMPTS[1:], ""]
    with mock.patch.object(ModelSpec, "compile", compiled_here):
        return run_here("generate", MODEL, *SAMPLED, "--seed", "7", "--logprobs", "2", "--json", stdin="\n".join(lines))


QUICK_AXES = ("padding", "decode")  # tests/invariance measures the others


@pytest.mark.parametrize("axes", [QUICK_AXES, pytest.param((), id="all", marks=EXHAUSTIVE)])
def test_verify_prints_json_and_axes_hold(axes: tuple[str, ...]) -> None:
    chosen = ("--axes", ",".join(axes)) if axes else ()
    with mock.patch.object(ModelSpec, "compile", compiled_here):
        done = run_here("verify", MODEL, "--json", "--configurations", "3", "--device", "cpu", *chosen)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout)
    assert len(actual["fingerprint"]) == 64
    assert set(actual["axes"]) == set(axes or FULL_AXES)
    for axis, measured in actual["axes"].items():
        assert measured["configurations"] >= 4, axis
        assert measured["unique_logits"] == measured["unique_outputs"] == 1, axis
        assert measured["max_probability_divergence"] == 0.0, axis


def test_check_prints_the_certificate_of_random_weights(tmp_path) -> None:
    page = tmp_path / "report.html"
    options = ("--random", "--dtype", "float32", "--tp-sizes", "1,2", "--json", "--device", "cpu", "--html", str(page))
    config = (TINY_FOLDER / "draft" / "config.json").read_bytes()
    with without_inductor(), with_cache(tmp_path, offline=True) as cache:
        put_snapshot(cache, "org/name", {"config.json": config}, ref="v2")
        done = run_here("check", "org/name", "--revision", "v2", *options)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout)
    assert actual["fingerprint"] in page.read_text() and all(order in page.read_text() for order in actual["orders"])
    assert actual["counts"]["attention"] == 2
    assert "Tree(384, 2, Blocked(192, block=128))" in actual["orders"]


def test_check_writes_the_page_of_an_exact_model(tmp_path) -> None:
    """Its fingerprint has no part for the device."""
    page = tmp_path / "report.html"
    options = ("--device", "cpu", "--json", "--html", str(page))
    with without_inductor():
        done = run_here("check", str(TINY_FOLDER / "draft"), "--numerics", "exact8", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fingerprint"] in page.read_text()


def test_other_processes_load_the_compiled_commit() -> None:
    """Even if the branch has moved since. A printed spec contains no token."""
    model = SimpleNamespace(config=SimpleNamespace(_commit_hash=COMMIT))
    spec = ModelSpec("org/name", revision="main", token="hf_secret")
    assert spec.pinned(model) == replace(spec, revision=COMMIT)  # type: ignore[arg-type]
    assert ModelSpec("tiny").pinned(model) == ModelSpec("tiny")  # type: ignore[arg-type]
    assert "hf_secret" not in repr(spec)


@EXHAUSTIVE
def test_archive_is_accepted_as_model(tmp_path: Path) -> None:
    archive = tmp_path / "model.pt2"
    with mock.patch.object(ModelSpec, "compile", compiled_here):
        done = run_here("export", MODEL, str(archive), "--beside")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").exists()
    measured = run("verify", str(archive), "--axes", "decode,restart", "--configurations", "2", "--json")
    assert measured.returncode == 0, measured.stderr
    actual = json.loads(measured.stdout)
    assert done.stdout.endswith(f"fingerprint {actual['fingerprint']}\n")
    assert {axis: result["unique_logits"] for axis, result in actual["axes"].items()} == {"decode": 1, "restart": 1}
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    for refused, name in (
        (run_here("check", str(archive)), "ArchiveError"),
        (run("export", "tiny", str(tmp_path / "tiny.zip")), "InvalidInput"),
    ):
        assert refused.returncode == 2 and refused.stderr.strip().startswith(name), refused.stderr


def test_export_accepts_number_of_ranks(tmp_path: Path) -> None:
    requested = []
    with (
        mock.patch.object(ModelSpec, "compile", lambda spec, tp: requested.append(tp) or compiled_here()),
        mock.patch.object(export, "export", lambda model, path, weights: path.write_bytes(b"")),
    ):
        done = run_here("export", MODEL, str(tmp_path / "m.pt2"), "--tp", "2")
    assert done.returncode == 0 and requested == [2], done.stderr


def test_demo_compares_with_torch() -> None:
    done = run("demo", "tiny", "--device", "cpu", "--configurations", "2")
    assert done.returncode == 0, done.stderr
    for axis in FULL_AXES - {"restart"}:
        assert axis in done.stdout
    assert "def count_words" in done.stdout and "detcompile 1" in " ".join(done.stdout.split())


def test_generate_prints_one_json_object_per_prompt(answered: subprocess.CompletedProcess[str]) -> None:
    actual = [json.loads(line) for line in answered.stdout.splitlines()]
    assert [entry["prompt"] for entry in actual if entry["error"] is None] == PROMPTS
    assert [entry["seed"] for entry in actual] == [7, 8, 9, 10]
    for entry in actual:
        assert len(entry["fingerprint"]) == 64
        for part in entry["outputs"]:
            assert part["finish_reason"] in ("length", "stop")
            assert part["text"]
            assert 1 <= len(part["token_ids"]) <= 24
            assert [step["token_id"] for step in part["logprobs"]] == part["token_ids"]
            assert all(len(step["top"]) == 2 and step["logprob"] <= 0 for step in part["logprobs"])


def test_rejected_prompt_leaves_others_answered(answered: subprocess.CompletedProcess[str]) -> None:
    assert answered.returncode == 2
    refused = [entry for entry in map(json.loads, answered.stdout.splitlines()) if entry["error"] is not None]
    assert len(refused) == 1 and refused[0]["outputs"] == [] and "compiled for 2048" in refused[0]["error"]
    assert "prompt 2: InvalidInput" in answered.stderr and "Traceback" not in answered.stderr
    assert "prompt 1: 24 tokens (length); seed 7" in answered.stderr


def test_seed_repeats_answer_in_another_process(answered: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    before = json.loads(answered.stdout.splitlines()[3])
    file = tmp_path / "prompts"
    file.write_text(before["prompt"])
    other = ("--scheduler", "simple_chunking", "--max-num-batched-tokens", "2", "--block-size", "16")
    done = run(
        "generate", MODEL, "--file", str(file), *SAMPLED, "--seed", str(before["seed"]), "--logprobs", "2", "--json",
        *other, "--num-blocks", "20", "--allocation", "reserve", "--max-num-seqs", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == before


def test_diff_finds_equal_answers_across_runs(answered: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    """Answers are matched by request in any order. A changed bit is found and reported as unexplained."""
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text(answered.stdout)
    other.write_text("\n".join(reversed(answered.stdout.splitlines())))
    done = run_here("diff", str(one), str(other))
    assert done.returncode == 0 and done.stdout.endswith("Equal in every bit.\n"), done.stdout + done.stderr
    lines = [json.loads(line) for line in answered.stdout.splitlines()]
    step = lines[2]["outputs"][0]["logprobs"][5]
    step["logprob"] = math.nextafter(step["logprob"], 0)
    other.write_text("\n".join(map(json.dumps, lines)))
    done = run_here("diff", str(one), str(other))
    assert done.returncode == 1 and "request 3 of A, 3 of B, sample 0, token 5 (from 0): logprobs" in done.stdout
    assert "Nothing explains this" in done.stdout


def test_generate_separates_reasoning_of_chats() -> None:
    model = compiled_here()
    backend = Tokenizer.from_str(with_think_tokens(model.tokenizer.backend_tokenizer.to_str()))
    template = "{{ messages[0].content }}{{ style }}<think>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=template)
    options = [*SAMPLED, "--seed", "7", "--chat", "--thinking-token-budget", "3"]
    options += ["--chat-template-kwargs", '{"style": "!"}']
    with mock.patch.object(ModelSpec, "compile", compiled_here), mock.patch.object(model, "tokenizer", tokenizer):
        line = json.loads(run_here("generate", MODEL, "a", *options, "--json").stdout)
        shown = run_here("generate", MODEL, "a", *options)
    part = line["outputs"][0]
    assert line["prompt"] == "a!<think>" and part["token_ids"][3] == backend.token_to_id("</think>")
    assert part["text"] == f"{part['reasoning']}</think>{part['content']}" and part["reasoning"]
    assert shown.stdout == part["content"] + "\n" and part["reasoning"].strip() in shown.stderr


def test_generate_streams_to_a_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "detcompile.commands.cli", "generate", MODEL, PROMPTS[0], *SAMPLED, "--ignore-eos"]
    child = subprocess.Popen(
        command, env=KEEPING, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the terminal was closed
            break
        if not piece:
            break
        pieces.append(piece)
    assert child.stderr is not None
    message = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 0, message
    os.close(ours)
    assert "def mean(values):" in b"".join(pieces).decode()
    assert len(pieces) >= 3, "the text came at once"
    assert "24 tokens (length); seed" in message


def test_texts_of_several_answers_have_headings() -> None:
    options = (*SAMPLED, "--n", "2", "--seed", "1", "--stop", "\n\n")
    with mock.patch.object(ModelSpec, "compile", compiled_here):
        done = run_here("generate", MODEL, PROMPTS[1], *options)
    assert done.returncode == 0, done.stderr
    assert "== 1, sample 0: 'import json'" in done.stdout and "== 1, sample 1: 'import json'" in done.stdout
    assert "seed 1" in done.stderr


def test_prompts_come_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\n  \n two \n")
    assert read_prompts([], file) == ["one", " two "]
    assert read_prompts(["a", "b"], None) == ["a", "b"]
    with pytest.raises(InvalidInput, match="one or the other"):
        read_prompts(["a"], file)
    file.write_bytes(b"\xfe\x00")
    with pytest.raises(InvalidInput, match="UTF-8"):
        read_prompts([], file)


def test_no_two_prompts_share_a_seed() -> None:
    given = with_successive_seeds(SamplingParams(seed=2**64 - 1), 3)
    assert [params.seed for params in given] == [2**64 - 1, 0, 1]
    assert [params.seed for params in with_successive_seeds(SamplingParams(), 2)] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "no/such/model"), "no such folder"),
        (("verify", "tiny", "--axes", "nonsense"), "no axis 'nonsense'"),
        (("check", "tiny", "--tp-sizes", "1,5"), "does not split into 5 equal leaves"),
        (("check", "tiny", "--dtype", "int7"), "dtype int7 is not supported"),
        (("check", "tiny", "--html", "no/such/folder.html"), "a file in a folder that exists"),
        (("generate", "no/such/model", "x"), "no such folder"),
        (("check", "org/name", "--revision", "v2"), "Run `hf download org/name --revision v2`"),
        (("export", "tiny", "m.pt2", "--revision", "v2"), "needs a model of the Hub, but tiny is a local folder"),
        (("check", "m.pt2", "--trust-remote-code"), "is a compiled archive"),
        (("generate", "tiny"), "no prompt in the arguments or on standard input"),
        (("generate", "tiny", "x", "--temperature", "-1"), "temperature -1.0 must be 0"),
        (("generate", "tiny", "x", "--block-size", "7"), "block_size"),
        (("generate", "tiny", "x", "--file", "y"), "give one or the other"),
        (("generate", "tiny", "--file", "no/such/file"), "no/such/file cannot be read"),
        (("generate", "tiny", "x", "--logprobs", "1"), "add --json"),
        (("generate", "tiny", "x", "--thinking-token-budget", "1"), "--thinking-token-budget needs --chat"),
        (("generate", "tiny", "x", "--chat", "--chat-template-kwargs", "[]"), "give a JSON object"),
    ],
)
def test_bad_input_exits_with_message_and_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with with_cache(tmp_path, offline=True):
        done = run_here(*arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not done.stdout.strip()


def test_export_checks_output_folder_first(tmp_path: Path) -> None:
    with mock.patch.object(cli, "_loaded", side_effect=AssertionError("imported the command")):
        refused = run_here("export", "tiny", str(tmp_path / "gone" / "m.pt2"))
    assert refused.returncode == 2 and "a file in a folder that exists" in " ".join(refused.stderr.split())
