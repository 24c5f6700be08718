"""Triton translates every kernel to its intermediate representation, with each option and without optional operands.

The interpreter runs kernels as Python, so it accepts a variable that changes its type in a loop. Triton does not.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive_unless
from tests.templates.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter translates nothing")


@pytest.mark.parametrize(
    ("dtype", "count"), exhaustive_unless(("bfloat16", 70).__eq__, [("bfloat16", 70), ("float16", 70), ("float32", 60)])
)
def test_every_kernel_is_translated(dtype: str, count: int, tmp_path: Path) -> None:
    folders = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "DETCOMPILE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "tests.templates.launches_by_card", "parse", dtype]
    environment = os.environ | folders | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout)
    assert not result["failures"], "\n".join(result["failures"])
    assert len(result["kernels"]) >= count
