"""docs/compatibility.md says what docs/compatibility.json holds, and the short set names tests that exist."""

import json
from pathlib import Path

from tools.canary import AREAS, PAGE, RESULTS, page

ROOT = Path(__file__).parents[1]


def test_compatibility_page_is_up_to_date() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(rows), "run `python -m tools.canary --page`"


def test_canary_runs_tests_that_exist() -> None:
    for path in (path for paths in AREAS.values() for path in paths):
        file, _, name = path.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), path
