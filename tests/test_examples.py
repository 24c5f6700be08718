"""The examples run as a reader would run them, with the draft model in the place of the embedded one, for time."""

import ast
import copy
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import detcompile
from tests.exhaustive import EXHAUSTIVE

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, folder: Path) -> str:
    """What an example prints."""
    environment = os.environ | {"DETCOMPILE_KEEP_PROGRAMS": "1"}
    command = [sys.executable, str(EXAMPLES / name), "tiny-draft"]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@EXHAUSTIVE
def test_offline_answers_are_equal_together_and_alone(tmp_path: Path) -> None:
    printed = run("offline.py", tmp_path)
    for seed in range(4):
        assert f"--- seed {seed}, " in printed
    assert "--- equal, together and alone; fingerprint " in printed


@EXHAUSTIVE
def test_judge_scores_and_verdicts_repeat(tmp_path: Path) -> None:
    printed = run("judge.py", tmp_path)
    actual = re.findall(r"^--- (.*): (\d+) of 64 scores and (\d+) of 480 verdicts move", printed, re.M)
    assert [name for name, _, _ in actual] == ["plain transformers", "detcompile"]
    assert actual[1][1:] == ("0", "0") and "--- equal in every batch; fingerprint " in printed


def test_an_agent_is_replayed_to_the_byte(tmp_path: Path) -> None:
    printed = run("replay_agent.py", tmp_path)
    assert printed.count("--- seed ") == 4 and "--- 4 turns replayed, equal to the byte; fingerprint " in printed


@EXHAUSTIVE
def test_fine_tuning_is_equal_for_any_micro_batches(tmp_path: Path) -> None:
    printed = run("sft.py", tmp_path)
    actual = re.findall(r"^(\d) micro-batches, step (\d): loss ([\d.]+)  weights (\w+)$", printed, re.M)
    whole, parts = ([row[1:] for row in actual if row[0] == number] for number in ("1", "3"))
    assert len({digest for _, _, digest in whole}) == 6 and [row[2] for row in whole] == [row[2] for row in parts]
    assert float(whole[-1][1]) < float(whole[1][1])
    assert "--- equal weights after each of 6 steps, whole and in 3 micro-batches; last " in printed


@EXHAUSTIVE
def test_reinforcement_learning_is_on_policy_to_the_bit(tmp_path: Path) -> None:
    requests = ["--model", "tiny-draft", "--seeds", "1", "--steps", "3", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "examples.rl", *requests]
    done = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr
    for ranks in (1, 2):
        message = f"detcompile's trainer, 1 and 3 micro-batches, 1 and {ranks} ranks: equal weights after 3 of 3 steps"
        assert message in done.stdout
    runs = json.loads((tmp_path / "rl.json").read_text())["runs"]
    kls = {name: [one["kl"] for one in runs if one["trainer"] == name] for name in ("plain", "detcompile")}
    assert kls["detcompile"] == [[0.0] * 3] * 3 and min(min(row) for row in kls["plain"]) > 0
    assert (tmp_path / "rl.svg").read_text().startswith("<svg ")


def test_example_fails_if_off_policy_or_split_dependent() -> None:
    main = importlib.import_module("examples.rl.__main__")
    good = {"arm": "a", "trainer": "detcompile", "seed": 0, "kl": [0.0], "largest": [0.0], "equal": [True]}
    runs = [{**good, "weights": ["x"]}, {**good, "weights": ["x"]}, {**good, "trainer": "plain", "equal": [False]}]
    assert main.failures([{"weights": ["y"], **run} for run in runs]) == []
    assert main.failures([runs[0], {**runs[1], "weights": ["y"]}]) == [
        "micro-batches or ranks moved the weights of detcompile's trainer"
    ]
    assert "seed 0, step 0" in main.failures([{**runs[0], "equal": [False]}])[0]
    assert main.failures([{**runs[0], "kl": [1e-9]}])


def absent_names(source: str) -> list[str]:
    """Return the names of the package that a script uses and the package lacks: ``detcompile.module.name``."""
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "detcompile"
        for alias in node.names
    }
    names |= {
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"detcompile(\.\w+)+", ast.unparse(node))
    }
    return sorted(name for name in names if not is_there(name))


def is_there(name: str) -> bool:
    """Return whether the package has a name. Attributes of values other than modules and classes are not checked."""
    value: Any = detcompile
    for part in name.split(".")[1:]:
        if not isinstance(value, types.ModuleType | type):
            return True
        if not hasattr(value, part):
            try:
                importlib.import_module(f"{value.__name__}.{part}")
            except ImportError:
                return False
        value = getattr(value, part)
    return True


SCRIPTS = [path for folder in ("examples", "benchmarks", "tools") for path in EXAMPLES.with_name(folder).rglob("*.py")]


def test_scripts_name_what_the_package_has() -> None:
    assert {path.name: names for path in SCRIPTS if (names := absent_names(path.read_text(encoding="utf-8")))} == {}


def test_absent_names_are_found() -> None:
    source = """
from detcompile import EngineConfig, Nothing
from detcompile.models.hub import TINY_FOLDER
detcompile.api.load_model("tiny").config
detcompile.api.TINY_FOLDER / "prompts.txt"
detcompile.Grammar.regexp("a")
"""
    assert absent_names(source) == ["detcompile.Grammar.regexp", "detcompile.Nothing", "detcompile.api.TINY_FOLDER"]


NEAR = [5, math.nextafter(-0.25, 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda turns: turns[2]["token_ids"].append(1), "turn 3 differs in token_ids"),
        (lambda turns: turns[1].update(logprobs=[NEAR]), "turn 2 differs in logprobs"),
        (lambda turns: turns[0].update(seed=8, tool="# parses"), "turn 1 differs in seed, tool"),
        (None, "recorded with another torch: the bits are not promised"),
    ],
)
def test_differing_replay_exits_with_an_error(change, message, tmp_path: Path, monkeypatch) -> None:
    """Tests the comparison only: recorded turns replace the loop."""
    spec = importlib.util.spec_from_file_location("replay_agent", EXAMPLES / "replay_agent.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    turn = {"prompt": "p", "seed": 7, "token_ids": [5], "text": "t", "logprobs": [[5, -0.25]], "tool": ""}
    turns = [copy.deepcopy(turn) for _ in range(3)]
    again, parts = copy.deepcopy(turns), {"torch": "2.13"}
    model = mock.Mock(fingerprint_parts=parts if change else {"torch": "2.14"}, fingerprint="f")
    monkeypatch.setattr(detcompile, "compile", lambda name: model)
    monkeypatch.setattr(example, "run_agent", lambda engine, seeds, neighbors: again)
    if change is not None:
        change(again)
    file = tmp_path / "transcript.json"
    file.write_text(json.dumps({"model": "tiny", "fingerprint_parts": parts, "turns": turns}))
    with pytest.raises(SystemExit) as ended:
        example.replay(file)
    assert message in str(ended.value.code)


@EXHAUSTIVE
def test_exported_model_equals_compiled_one(tmp_path: Path) -> None:
    printed = run("export.py", tmp_path)
    assert "MiB, weights inside" in printed and "by another process" in printed
    assert "--- equal, compiled and loaded; fingerprint " in printed
