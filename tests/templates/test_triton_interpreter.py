"""The Triton tests that need no GPU, in Triton's CPU interpreter: a process of its own, see triton_interpreter.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


FAMILIES = ["rows", "recurrences", "rope", "matmul", "experts", "dequant"]
FAMILIES += ["attention", "attention_scores", "attention_chunks", "attention_biases", "sampling", "collectives"]


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_in_the_interpreter(family: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "DETCOMPILE_CACHE": str(tmp_path)}
    test = HERE / f"test_triton_{family}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(test)]
    run = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
