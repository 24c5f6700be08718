"""The CPU templates under each instruction set that models do not use here, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from detcompile.templates.cpu import library
from tests.exhaustive import EXHAUSTIVE_BY_CASE

HERE = Path(__file__).parent
OTHERS = [isa for isa in library.supported_isas() if isa not in (library.isa(), "portable")]  # see ISAS in cases.py


@EXHAUSTIVE_BY_CASE
@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets_agree_with_portable_code(isa: str) -> None:
    tests = [str(path) for path in sorted(HERE.glob("*/test_*.py")) if "ISAS" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = os.environ | {"DETCOMPILE_TEST_ISA": isa}
    run = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
