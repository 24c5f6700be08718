"""The forks of `make gpu-test` run each test once, report its result, and continue when a process dies."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")

@pytest.mark.parametrize("n", range(6))
def test_number(n, made, record_property):
    with open(f"{os.environ['RAN']}/{n}", "x"):
        print("printed by", n)
    assert made.exists() and n != 3

def test_ends_its_process():
    os._exit(7)

def test_skipped():
    pytest.skip("a test that skips")
"""


def run(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    ran = tmp_path / "ran"
    ran.mkdir()
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_other(tmp_path):\n    assert tmp_path.exists()\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "tests.forks", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"RAN": str(ran)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_test_runs_once_in_some_process(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--forks", "3")
    assert status == 1 and re.search(r"2 failed, 6 passed, 1 skipped", output), output
    assert sorted(path.name for path in (tmp_path / "ran").iterdir()) == list("012345")
    assert "printed by 3" in output and "printed by 2" not in output
    assert "test_ends_its_process - its process ended with status 7" in output


def test_run_stops_after_maxfail_failures(tmp_path: Path) -> None:
    status, output = run(tmp_path, "--forks", "1", "--maxfail", "1")
    assert status != 0 and "test_number[3]" in output and not (tmp_path / "ran" / "5").exists(), output
