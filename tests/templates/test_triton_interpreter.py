"""The Triton tests that need no GPU, in Triton's CPU interpreter: processes of their own, see triton_interpreter.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from detcompile.config import cache_directory
from tests.exhaustive import EXHAUSTIVE_BY_CASE

HERE = Path(__file__).parent

FAMILIES = {
    "rows": ["rows", "recurrences", "tokens", "collectives"],
    "products": ["matmul", "experts", "quantized", "exact"],
    "attention": ["attention"],
    "training": ["training"],
}


def test_no_file_is_left_out() -> None:
    folders = {path.parent.name for path in HERE.glob("*/test_*gpu.py")}
    assert folders == {folder for family in FAMILIES.values() for folder in family}


def run_interpreted(family: str, chosen: str, tmp_path: Path) -> None:
    """Run the tests of a family that the mark expression ``chosen`` selects, in a process of their own."""
    if (known := cache_directory() / "cpu").exists():  # else the CPU's kernels are compiled once more
        shutil.copytree(known, tmp_path / "cpu")
    environment = os.environ | {"TRITON_INTERPRET": "1", "DETCOMPILE_CACHE": str(tmp_path)}
    tests = [str(path) for folder in FAMILIES[family] for path in sorted((HERE / folder).glob("test_*gpu.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-m", chosen, "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    run = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_in_the_interpreter(family: str, tmp_path: Path) -> None:
    run_interpreted(family, "not exhaustive", tmp_path)


@EXHAUSTIVE_BY_CASE
@pytest.mark.parametrize("family", FAMILIES)
def test_slow_kernels_in_the_interpreter(family: str, tmp_path: Path) -> None:
    run_interpreted(family, "exhaustive", tmp_path)
