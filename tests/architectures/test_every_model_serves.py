"""Every architecture that docs/models.md calls certified compiles as users compile it, and serves."""

import json

import pytest

import detcompile
from tests.exhaustive import EXHAUSTIVE_BY_CASE
from tools.generate_models import RESULTS
from tools.model_checks import SERVED, require_served
from tools.model_configs import MAX_CONTEXT, tiny_model

ROWS = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
CERTIFIED = sorted(name for name, row in ROWS.items() if row["verdict"] == "certified")
QUICK = ("glm", "bfloat16")  # rotary pairs that are interleaved, which regions of layers once could not take
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) == QUICK else EXHAUSTIVE_BY_CASE)
    for name in CERTIFIED
    for dtype in SERVED
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_certified_architecture_compiles_and_serves(name: str, dtype: str) -> None:
    """About 6 CPU seconds a case."""
    require_served(detcompile.compile(tiny_model(name).to(SERVED[dtype]), max_context=MAX_CONTEXT))


def test_every_certified_row_says_that_it_serves() -> None:
    served = {name: ROWS[name].get("served") for name in CERTIFIED}
    assert {name: result for name, result in served.items() if result != dict.fromkeys(SERVED, "yes")} == {}
