"""The Triton tests that need no GPU, in Triton's CPU interpreter: processes of their own, see triton_interpreter.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

FAMILIES = {
    "rows": ["rows", "recurrences", "rope", "sampling", "next_tokens", "collectives", "block_copies"],
    "products": ["matmul", "experts", "dequant"],
    "attention": ["attention", "attention_scores", "attention_chunks", "attention_biases"],
}


def test_no_file_is_left_out() -> None:
    files = {path.stem.removeprefix("test_triton_") for path in HERE.glob("test_triton_*.py")}
    assert files - {"interpreter"} == {file for family in FAMILIES.values() for file in family}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_in_the_interpreter(family: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "DETCOMPILE_CACHE": str(tmp_path)}
    tests = [str(HERE / f"test_triton_{file}.py") for file in FAMILIES[family]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    run = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
