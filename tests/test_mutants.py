"""Each mutant of tests/mutants.toml fits the sources, and the runner names the test that kills it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.exhaustive import EXHAUSTIVE
from tools.mutants import ROOT, read_mutants

TESTS = """
import pytest
from numbers_of_tests import double

def test_double():
    assert double(3) == 6

@pytest.mark.exhaustive
def test_double_of_more():
    assert double(4) == 8
"""

RUNS = """
import json, sys
from pathlib import Path
from tools.mutants import Mutant, try_mutant

test = "tests/test_double.py"
mutant = Mutant("thrice", "numbers_of_tests.py", "twice is twice", "x + x", "x + x + x", [test])
runs = [
    mutant,
    mutant._replace(tests=[f"{test}::test_gone"]),
    mutant._replace(tests=[f"{test}::test_double[gone]"]),
    mutant._replace(tests=[f"{test}::test_double_of_more"]),
    mutant._replace(new="2 * x"),
    mutant._replace(old="y"),
]
for planted in runs:
    print(json.dumps(try_mutant(Path(sys.argv[1]), planted)), flush=True)
"""


def test_each_mutant_can_be_planted() -> None:
    """A change of the source that moves the text of a mutant has to change the mutant, too."""
    mutants = read_mutants()
    counts = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in mutants}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert [mutant.name for mutant in mutants if mutant.old == mutant.new] == []


def test_tests_of_a_mutant_are_there() -> None:
    named = {test.partition("::")[0] for mutant in read_mutants() for test in mutant.tests}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@EXHAUSTIVE  # it starts pytest five times
def test_runner_reports_killed_and_surviving_mutants(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers =\n  exhaustive: more cases\n")
    (tmp_path / "numbers_of_tests.py").write_text("def double(x):\n    return x + x\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_double.py").write_text(TESTS)
    *killed, exhaustive, survives, absent = (
        json.loads(line)
        for line in subprocess.check_output([sys.executable, "-c", RUNS, tmp_path], cwd=ROOT).split(b"\n")[:6]
    )
    assert [(run["outcome"], run["test"]) for run in killed] == [("killed", "tests/test_double.py::test_double")] * 3
    assert exhaustive["outcome"] == "no tests"
    assert (survives["outcome"], survives["test"]) == ("survived", "")
    assert absent["outcome"] == "not planted"
    assert (tmp_path / "numbers_of_tests.py").read_text() == "def double(x):\n    return x + x\n"
