"""The pages hold together: links lead somewhere, files that pages name are there, results that are kept are quoted."""

import ast
import re
from pathlib import Path

import pytest

import detcompile
from detcompile.commands.axes import AXES
from tools import flow_drawing
from tools.site_links import GENERATED, copies, in_site, relinked

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
    """Return the relative links of a page in ``folder`` without a file, or without a heading in it."""

    def leads(link: str) -> bool:
        path, _, anchor = link.partition("#")
        if not (folder / path).exists():
            return False
        return not anchor or anchor in anchors((folder / path).read_text(encoding="utf-8") if path else text)

    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    return [link for link in links if not leads(link)]


@pytest.mark.parametrize("page", names(PAGES))
def test_links_have_targets(page: str) -> None:
    path = ROOT / page
    assert broken_links(path.read_text(encoding="utf-8"), path.parent) == []


def test_broken_link_is_detected() -> None:
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
    modules = {path.name for path in (ROOT / "detcompile").rglob("*.py")}
    beside = re.findall(r"`(\w+\.py)`", text.split("\n## Recipes")[1])
    assert len(beside) > 1 and set(beside) <= modules


def test_performance_page_stays_short() -> None:
    assert len((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()) <= MANUAL_LINES


def test_every_result_file_is_quoted() -> None:
    quoting = [*PAGES, *(ROOT / "benchmarks").glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in quoting)
    assert [path.name for path in sorted((ROOT / "benchmarks" / "results").iterdir()) if path.name not in text] == []


def variables_of(source: str) -> set[str]:
    """Return the environment variables that a module reads or sets if unset: strings in capitals, except in what it
    passes to other processes (``os.environ | {...}``)."""
    tree = ast.parse(source)
    given = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
    others = {id(inner) for node in given for inner in ast.walk(node)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in others)
    return {text for text in (str(node.value) for node in strings) if re.fullmatch("[A-Z][A-Z0-9_]+", text)}


def test_environment_page_names_every_variable() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    read = variables_of((ROOT / "detcompile" / "config.py").read_text(encoding="utf-8"))
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.M)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(read)
    assert {"DETCOMPILE_CACHE", "CXX", "NCCL_NVLS_ENABLE"} < read  # asked for, asked for with a default, set


def test_drawing_matches_its_source_and_the_code() -> None:
    source = flow_drawing.SOURCE.read_text(encoding="utf-8")
    drawn = flow_drawing.draw(source)
    assert flow_drawing.SVG.read_text(encoding="utf-8") == drawn, "run `python -m tools.flow_drawing`"
    assert [name for name in flow_drawing.files(source) if not (ROOT / "detcompile" / name).is_file()] == []
    assert drawn.count("<rect") == 1 + len(flow_drawing.files(source))


def test_variables_are_found() -> None:
    source = """
'''Reads A_B.'''
here = os.environ.get("AB"), os.environ.setdefault("CD", "1"), {"E_1": "x"}
there = os.environ | {"TMPDIR": folder}
"""
    assert variables_of(source) == {"AB", "CD", "E_1"}


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    named = set(re.findall(r"^::: ([\w.]+)$", "\n".join(path.read_text(encoding="utf-8") for path in pages), re.M))
    assert {f"detcompile.{name}" for name in detcompile.__all__} - named == set()


def test_home_page_has_readme_costs() -> None:
    tables = [
        [
            line
            for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
            if re.search(r"^\|.*tp_sizes=|†.*\|$", line)
        ]
        for page in ("README.md", "docs/index.md")
    ]
    assert len(tables[0]) == 4 and tables[0] == tables[1]


def test_readme_has_the_speeds_of_the_real_model() -> None:
    page = (ROOT / "docs" / "real_model.md").read_text(encoding="utf-8").split("\n## Speed\n")[1]

    def speeds(name: str) -> str:
        one, many = re.findall(rf"^\| {name}\b.*\| \**([\d.]+)\** \| \**([\d.]+)\** \|$", page, re.M)[0]
        return f"{round(float(one))} %s and {round(float(many))}"

    ours = speeds("detcompile") % "tokens per second for one request" + " for 16"
    others = ", ".join(f"{name} {speeds(name)}".replace(" %s", "") for name in ("llama.cpp", "transformers"))
    assert f"gives {ours} ({others};" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_site_has_every_page() -> None:
    """But the pages of the log, which its own page lists."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"([\w/]+\.md)$", navigation, re.M)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")] + list(GENERATED)
    expected = sorted(page for page in pages if not page.startswith("log/") or page == "log/README.md")
    assert sorted(name for name in listed if not name.startswith("repository/")) == expected
    log = (ROOT / "docs" / "log" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "docs" / "log").glob("*.md") if path.name not in log] == ["README.md"]


def test_files_that_pages_link_to_are_copied_to_the_site(tmp_path: Path) -> None:
    page = "[b](../b.md#c) [data](../../data/x.json) [how](../../HOW.md#first) [all](../../data) [z](../../z.md)"
    for name, text in {
        "docs/guides/a.md": page,
        "docs/b.md": "# C",
        "data/x.json": "{}",
        "HOW.md": "[b](docs/b.md) [code](src/a.py) [web](https://example.org)",
        "src/a.py": "",
        "src/unlinked.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    actual = sorted(copies({"guides/a.md": page}, tmp_path))
    assert actual == ["HOW.md", "data/x.json", "src/a.py"]
    known = {"guides/a.md", "b.md", *map(in_site, actual)}
    assert relinked(page, "guides/a.md", known, tmp_path) == (
        "[b](../b.md#c) [data](../repository/data/x.json) [how](../repository/HOW.md#first) all [z](../../z.md)"
    )  # a folder's text alone; what is nowhere stays, and mkdocs refuses it
    assert relinked((tmp_path / "HOW.md").read_text(), "repository/HOW.md", known, tmp_path) == (
        "[b](../b.md) [code](src/a.py) [web](https://example.org)"
    )
