"""Every plain Triton kernel is compiled for NVIDIA GPUs that this machine does not have, and fits into their memory.

The slow part is a process that compiles for six GPUs: about 220 CPU seconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detcompile.commands.inspection.findings import COMPILED_FOR
from tests.exhaustive import EXHAUSTIVE
from tests.templates.triton_interpreter import INTERPRETED

pytestmark = [EXHAUSTIVE, pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")]

ROOT = Path(__file__).parents[2]
CARDS = ("80", "86", "89", "90", "100", "120")
HOPPER_ONLY = {  # the last merges what hopper_decode_kernel marks
    "attention.hopper.hopper_attention_kernel",
    "attention.hopper_decode.hopper_decode_kernel",
    "attention.merge.marked_merge_kernel",
    "exact.attention_hopper.hopper_exact_attention_kernel",
    "exact.attention_hopper.hopper_exact_decode_kernel",
    "exact.hopper._add_kernel",
    "exact.hopper.hopper_exact_kernel",
    "matmul.hopper.hopper_matmul_kernel",
    "matmul.ring.ring_matmul_kernel",
    "training.attention_hopper.hopper_dkdv_kernel",
    "training.attention_hopper.hopper_dq_kernel",
    "training.token_hopper.hopper_token_matmul_kernel",
}
AFTER_HOPPER = {  # sm_90 takes Hopper's first
    "attention.merge.merge_kernel",
    "exact.attention_gpu._attention_kernel",
    "exact.gpu._linear_kernel",
    "matmul.kernels.tma_kernel",
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cards")
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "DETCOMPILE_CACHE": str(folder),
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-m", "tests.templates.launches_by_card", *CARDS]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])  # after ptxas's complaints


def test_every_reference_compiles_and_fits(launches: dict[str, Any]) -> None:
    assert not launches["failures"], "\n".join(launches["failures"])
    assert set(launches["cards"]) == set(CARDS)


def test_every_plain_kernel_is_compiled(launches: dict[str, Any]) -> None:
    for card, result in launches["cards"].items():
        missing = set(launches["kernels"]) - set(result["kernels"])
        allowed = missing <= HOPPER_ONLY | AFTER_HOPPER if card == "90" else missing == HOPPER_ONLY
        assert allowed, f"sm_{card}: {missing}"


def test_some_candidate_fits_every_card(launches: dict[str, Any]) -> None:
    for card, result in launches["cards"].items():
        assert len(result["first"]) >= 10
        slow = tuple(f"{family}:" for family in launches["slow"])
        unfit = [name for name, first in result["first"].items() if first is None and not name.startswith(slow)]
        assert not unfit, f"sm_{card}: only the reference runs {unfit}"


def test_only_hopper_is_offered_hopper_schedules(launches: dict[str, Any]) -> None:
    for card, result in launches["cards"].items():
        offered = {name for names in result["candidates"].values() for name in names if name.startswith("hopper")}
        assert bool(offered) == (card == "90"), f"sm_{card}: {offered}"


def test_doctor_names_the_compiled_cards() -> None:
    assert {f"{major}{minor}" for major, minor in COMPILED_FOR} | {"90"} == set(CARDS)
