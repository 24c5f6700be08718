"""The pages hold together: links lead somewhere, files that pages name are there, results that are kept are quoted."""

import re
from pathlib import Path

import pytest

from detcompile.commands.axes import AXES

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
    if not path.is_symlink()
)
MANUAL_LINES = 150  # of performance.md: what is more is a log


def names(pages: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in pages]


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = [re.sub(r"[`*]", "", heading).strip().lower() for heading in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """The relative links of a page in ``folder`` that lead to no file, or to no heading of it."""

    def leads(link: str) -> bool:
        path, _, anchor = link.partition("#")
        if not (folder / path).exists():
            return False
        return not anchor or anchor in anchors((folder / path).read_text(encoding="utf-8") if path else text)

    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    return [link for link in links if not leads(link)]


@pytest.mark.parametrize("page", names(PAGES))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    assert broken_links(path.read_text(encoding="utf-8"), path.parent) == []


def test_a_broken_link_is_seen() -> None:
    text = "# One\n[a](README.md) [b](#one) [c](gone.md) [d](README.md#gone) [e](#two)"
    assert broken_links(text, ROOT) == ["gone.md", "README.md#gone", "#two"]


def test_the_contract_names_every_axis_and_tests_that_exist() -> None:
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*)$", text, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 17))
    assert [axis for axis in AXES if not any(f"| `{axis}` |" in row for _, row in rows)] == []
    for _, row in rows:
        folder = ROOT
        for name in re.findall(r"(?:tests/)?[\w/]*(?:test_\w+\.py|parallel/|sampling/)", row):
            folder = (ROOT / name).parent if name.startswith("tests/") else folder
            assert (folder / Path(name).name).exists(), name


def test_recipes_name_files_and_tests_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert text.count("\nFails until done: ") == text.count("\n### ") == 4
    named = re.findall(r"`((?:detcompile|tests|docs)/[^`*\s]*)`", text)
    for path, _, test in (name.partition("::") for name in named):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"


def test_the_manual_of_speeds_stays_a_manual() -> None:
    assert len((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()) <= MANUAL_LINES


def test_every_result_that_is_kept_is_quoted() -> None:
    quoting = [*PAGES, *(ROOT / "benchmarks").glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in quoting)
    assert [path.name for path in sorted((ROOT / "benchmarks" / "results").iterdir()) if path.name not in text] == []
