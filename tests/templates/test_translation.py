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


DTYPES = exhaustive_unless("bfloat16".__eq__, ("bfloat16", "float16", "float32"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_is_translated(dtype: str, tmp_path: Path) -> None:
    folders = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "DETCOMPILE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "tests.templates.launches_by_card", "translate", dtype]
    environment = os.environ | folders | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout)
    assert not result["failures"], "\n".join(result["failures"])
    if dtype != "float32":  # some kernels take 16-bit operands only
        assert result["translated"] == result["kernels"]
