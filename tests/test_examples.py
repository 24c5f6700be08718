"""The examples run as a reader would run them."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_offline_answers_are_equal_together_and_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline.py")], capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stderr
    for seed in range(4):
        assert f"--- seed {seed}, " in done.stdout
    assert "--- equal, together and alone; fingerprint " in done.stdout


def test_an_exported_model_answers_as_the_compiled_one() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "export.py")], capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stderr
    assert "MiB, weights inside" in done.stdout and "by another process" in done.stdout
    assert "--- equal, compiled and loaded; fingerprint " in done.stdout
