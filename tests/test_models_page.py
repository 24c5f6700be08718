"""docs/models.md says what docs/models.json holds, and rows of it are measured again, others at every commit."""

import json
import random
from importlib.metadata import version

import pytest
import torch

from tests.draws import seed_of_run
from tools.generate_models import GPU_RESULTS, PAGE, RESULTS, versions
from tools.half_checks import examine_half
from tools.model_checks import AXES_MEASURED, EXACT_LIMIT, GPU_AXES, MEANING_LIMIT, examine, examine_exactly
from tools.model_configs import ARCHITECTURES
from tools.models_page import counts, page

CONTENT = json.loads(RESULTS.read_text(encoding="utf-8"))
ROWS = CONTENT["rows"]
QUICK_SECONDS = 45  # that a row took when all of it was measured, its axes too, which are left out here
QUICK = sorted(name for name, row in ROWS.items() if row["verdict"] != "outside" and row["seconds"] < QUICK_SECONDS)
SAMPLE = random.Random(seed_of_run()).sample(QUICK, 3)
GPU = json.loads(GPU_RESULTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def same_versions() -> None:
    if versions() != CONTENT["versions"]:
        pytest.skip(f"docs/models.json was made with {CONTENT['versions']}, here is torch {version('torch')}")


def test_every_architecture_has_a_row() -> None:
    assert set(ROWS) == set(ARCHITECTURES)
    assert sum(counts(ROWS)[verdict] for verdict in ("certified", "refused", "wrong", "outside")) == len(ROWS)


def test_the_page_is_up_to_date() -> None:
    expected = page(ROWS, CONTENT["versions"], GPU)
    assert PAGE.read_text(encoding="utf-8") == expected, "run `make models MODELS_ARGS=--page`"


def test_no_model_is_silently_wrong() -> None:
    """A refusal has its reason; what is certified has eager's meaning, and every axis that was measured holds."""
    for name, row in ROWS.items():
        assert row["verdict"] in ("certified", "refused", "outside"), f"{name}: {row['reason']}"
        if row["verdict"] == "certified":
            assert row["meaning"] < MEANING_LIMIT and all(row["axes"].values()), name
            assert set(row["axes"]) in (set(), set(AXES_MEASURED)), name
        else:
            assert row["reason"], name


def test_no_model_is_silently_wrong_on_a_gpu() -> None:
    certified = {name: row for name, row in GPU["rows"].items() if row["verdict"] == "certified"}
    assert len(certified) >= 30
    for name, row in certified.items():
        assert row["meaning"] < MEANING_LIMIT and all(row["axes"].values()), name
        assert set(row["axes"]) == set(GPU_AXES), name


def test_exact_arithmetic_accepts_most_models_and_none_is_silently_wrong() -> None:
    results = {name: row["exact"] for name, row in ROWS.items() if row["verdict"] == "certified"}
    assert sum("meaning" in result for result in results.values()) >= 130
    for name, result in results.items():
        assert result["meaning"] < EXACT_LIMIT if "meaning" in result else result["reason"], name


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_measured_again_is_the_same(name: str) -> None:
    """Runs certified graphs without Inductor: other tests cover the axes of compiled models."""
    threads = torch.get_num_threads()
    try:
        again = examine(name, codegen=False)
    finally:
        torch.set_num_threads(threads)
    assert again["verdict"] == ROWS[name]["verdict"] and again["reason"] == ROWS[name]["reason"]
    if again["verdict"] == "certified":
        exact = examine_exactly(name)
        assert exact.keys() == ROWS[name]["exact"].keys() and exact.get("reason") == ROWS[name]["exact"].get("reason")
        assert exact.get("meaning", 0) < EXACT_LIMIT
        assert again["meaning"] < MEANING_LIMIT and again["tp2"] == ROWS[name]["tp2"]


@pytest.mark.parametrize("name", ["codegen", "mixtral"])
def test_models_with_float32_constants_compile_in_bfloat16(name: str) -> None:
    """codegen's table of angles and mixtral's weights of experts are float32 beside weights of any dtype."""
    row = examine_half(name, torch.bfloat16)
    assert row["verdict"] == "certified", row["reason"]
