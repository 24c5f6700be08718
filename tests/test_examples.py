"""The examples run as a reader would run them, with the draft model in the place of the embedded one, for time."""

import os
import subprocess
import sys
from pathlib import Path

from tests.exhaustive import EXHAUSTIVE

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, folder: Path) -> str:
    """What an example prints."""
    source = (EXAMPLES / name).read_text()
    assert source.count('compile("tiny")') == 1
    example = folder / name
    example.write_text(source.replace('compile("tiny")', 'compile("tiny-draft")'))
    environment = os.environ | {"DETCOMPILE_KEEP_PROGRAMS": "1"}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_answers_are_equal_together_and_alone(tmp_path: Path) -> None:
    printed = run("offline.py", tmp_path)
    for seed in range(4):
        assert f"--- seed {seed}, " in printed
    assert "--- equal, together and alone; fingerprint " in printed


@EXHAUSTIVE
def test_an_exported_model_answers_as_the_compiled_one(tmp_path: Path) -> None:
    printed = run("export.py", tmp_path)
    assert "MiB, weights inside" in printed and "by another process" in printed
    assert "--- equal, compiled and loaded; fingerprint " in printed
