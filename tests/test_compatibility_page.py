"""docs/compatibility.md says what docs/compatibility.json holds, and the short set names tests that exist."""

import json
from pathlib import Path

import pytest

from tools import canary
from tools.canary import AREAS, PAGE, RESULTS, failures, page

ROOT = Path(__file__).parents[1]


def test_compatibility_page_is_up_to_date() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(rows), "run `python -m tools.canary --page`"


def test_canary_runs_tests_that_exist() -> None:
    for path in (path for paths in AREAS.values() for path in paths):
        file, _, name = path.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), path


@pytest.mark.exhaustive  # 6 CPU seconds
def test_canary_names_errors_and_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "ROOT", tmp_path)
    door = tmp_path / "detcompile/torch_internals/dynamo.py"
    door.parent.mkdir(parents=True)
    door.write_text("from types import gone\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_door.py").write_text(f"import runpy\nrunpy.run_path({str(door)!r})\n")
    (tmp_path / "tests/test_bits.py").write_text(
        "import pytest\ndef test_good(): pass\n"
        "@pytest.mark.parametrize('n', range(7))\ndef test_bad(n): assert n == 9\n"
    )
    (line,) = failures(canary.tests(["tests/test_door.py"], tmp_path / "door.xml"))
    assert "ImportError: cannot import name 'gone' from 'types'" in line, line
    assert line.endswith(" [detcompile/torch_internals/dynamo.py:1]"), line
    outcomes = canary.tests(["tests/test_bits.py"], tmp_path / "bits.xml")
    assert failures(outcomes)[0] == "  test_bad[0]: assert 0 == 9" and failures(outcomes)[-1] == "  and 2 more"
    assert len(outcomes) == 8 and outcomes["test_good"] == ""
    (tmp_path / "tests/test_crash.py").write_text("import os\ndef test_crash(): os.kill(os.getpid(), 11)\n")
    (line,) = failures(canary.tests(["tests/test_crash.py"], tmp_path / "crash.xml"))
    assert line.startswith("  pytest: ended with -11: "), line
