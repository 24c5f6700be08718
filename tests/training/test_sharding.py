"""Gradients, their norm and the weights after steps are one value, however ranks share a trainer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import EXHAUSTIVE_BY_CASE
from tests.training.worlds import MUTANTS

pytestmark = EXHAUSTIVE_BY_CASE  # 36 CPU seconds a case: processes that share a trainer
CASES = ["qwen3", "gemma2", "gpt2", "qwen3 self_attn", "qwen3 lora"]


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Return every rank's final values for every split, by world. Each rank is a process."""
    file = tmp_path_factory.mktemp("worlds") / "found.json"
    with Path(file.with_suffix(".log")).open("w+") as log:
        program = [sys.executable, "-m", "tests.training.worlds", str(file), *request.param.split()]
        ended = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=600, check=False)
        assert not ended.returncode, (log.seek(0), log.read())[1][-4000:]
    return {(tuple(mesh), mutant, others): ended for (mesh, mutant, others), ended in json.loads(file.read_text())}


def distinct(runs: list[Any], key: str) -> set[str]:
    return {json.dumps(given[key]) for given in runs if key in given}


@pytest.mark.parametrize("key", ["gradients", "norms", "weights", "served"])
def test_gradients_and_weights_are_equal_for_any_sharding(runs: dict[Any, list[Any]], key: str):
    whole = distinct(runs[(), "", 0], key)
    assert len(whole) == 1
    for mesh, others in (((1,), 0), ((2,), 0), ((3,), 0), ((2, 1), 0), ((2, 2), 0), ((2,), 1)):
        assert len(runs[mesh, "", others]) >= 4
        assert distinct(runs[mesh, "", others], key) == whole, mesh


def test_first_rank_of_mesh_writes_checkpoint(runs: dict[Any, list[Any]]):
    assert sorted(ended["writes"] for ended in runs[(2,), "", 1] if "writes" in ended) == [False, True]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_removed_safeguards_change_sharded_gradients(runs: dict[Any, list[Any]], mutant: str):
    """Mutants: no float64 in the collective, no hook that adds micro-batches, sums divided by the number of ranks."""
    assert not distinct(runs[(3,), mutant, 0], "gradients") <= distinct(runs[(), "", 0], "gradients")
