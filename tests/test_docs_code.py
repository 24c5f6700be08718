"""The Python of the pages runs: all blocks of a page in one namespace, in their order, as a reader would type them.

What is out of a test's reach, or takes long, is replaced: an id of the Hub is the embedded model in a cache of the
Hub's form, a GPU is the CPU, several ranks are one. A model is compiled once, without Inductor, whatever options a page
gives; the options are read, and so is the checkpoint. An archive is the model that was exported
(tests/models/test_export.py writes real ones). Comments of a page, which its readers do not see, say the rest; each
stands right before its block:

    <!-- test: first           runs the lines that follow, up to the end of the comment, before the block
    <!-- test: needs NAME -->  leaves the block out where the package is not installed
    <!-- test: not run, WHY -->
"""

import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import detcompile
from detcompile import api, exporting
from detcompile.models.hub import TINY_FOLDER
from detcompile.models.loading import LoadOptions
from detcompile.offline import llm
from detcompile.weights import named_weights, weight_digests
from tests.model_cases import without_inductor
from tests.models.hub_cases import COMMIT, put_snapshot, with_cache

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/migration.md", "docs/faq.md", "docs/hugging_face.md",
         "docs/engine.md", "docs/speculation.md", "docs/export.md", "docs/backend.md")  # fmt: skip
GUIDES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "guides").glob("*.md"))
HUB_IDS = ("Qwen/Qwen3-0.6B",)

BLOCK = re.compile(r"(?:^<!-- test: (?P<mark>(?:(?!-->).)*?)\s*-->\n+)?^```python\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A block of Python of a page."""

    line: int  # of its first line of code, from 1
    code: str
    mark: str  # what its comment says; "" without one

    @property
    def first(self) -> str:
        """Lines that run before it."""
        return textwrap.dedent(self.mark.removeprefix("first")) if self.mark.startswith("first") else ""

    @property
    def left_out(self) -> str | None:
        """Why it does not run."""
        if self.mark.startswith("not run"):
            return self.mark.removeprefix("not run").strip(", ")
        package = self.mark.removeprefix("needs ") if self.mark.startswith("needs ") else None
        if package is not None and importlib.util.find_spec(package) is None:
            return f"needs {package}"
        return None


def blocks(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, actual.start("code")) + 1, actual["code"], actual["mark"] or "")
        for actual in BLOCK.finditer(text)
    ]


def run(page: str, text: str, namespace: dict[str, Any]) -> int:
    """Run the blocks of a page; the number of those that ran."""
    count = 0
    for block in blocks(text):
        if block.left_out is None:
            exec(compile(block.first, f"{page}, before line {block.line}", "exec"), namespace)
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
            count += 1
    return count


class Machine:
    """What pages ask for, on this machine. A model is compiled once, by the digest of its weights."""

    def __init__(self) -> None:
        self._compiled: dict[str, Any] = {}
        self._exported: dict[Path, Any] = {}

    def compile(self, model: Any, **options: Any) -> Any:
        inspect.signature(api.compile).bind(model, **options)
        if isinstance(model, str):
            how = {name: value for name, value in options.items() if name in LoadOptions.__annotations__}
            model = api.load_model(model, **(how | {"device": "cpu"}))
        key = str(weight_digests(named_weights(model)))
        if key not in self._compiled:
            with without_inductor():
                self._compiled[key] = api.compile(model)
        return self._compiled[key]

    def export(self, model: Any, path: str, **options: Any) -> Path:
        inspect.signature(exporting.export).bind(model, path, **options)
        exporting.require_target(Path(path))
        self._exported[Path(path)] = model
        return Path(path)

    def load(self, path: str) -> Any:
        return self._exported[Path(path)]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Iterator[None]:
    """A folder to write into, models that are there, and no network."""
    monkeypatch.chdir(tmp_path)
    for name in ("compile", "export", "load"):
        monkeypatch.setattr(detcompile, name, getattr(machine, name))
    monkeypatch.setattr(llm, "compile", machine.compile)
    files = {path.name: path.read_bytes() for path in TINY_FOLDER.iterdir() if path.is_file()}
    with with_cache(tmp_path / "hub", offline=True) as cache:
        for name in HUB_IDS:
            put_snapshot(cache, name, files)
            (cache / f"models--{name.replace('/', '--')}" / "refs" / "v1").write_text(COMMIT)
        yield


@pytest.mark.parametrize("page", [*PAGES, *GUIDES])
def test_the_python_of_a_page_runs(page: str, reader: None) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    ran = run(page, text, {"__name__": "__main__"})
    assert ran or not blocks(text)


@pytest.mark.parametrize("page", [*PAGES, *GUIDES])
def test_skip_marks_are_known_and_give_a_reason(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    actual = blocks(text)
    assert text.count("```python") == len(actual)
    assert text.count("<!-- test:") == sum(bool(block.mark) for block in actual)
    for block in actual:
        assert re.match(r"first\n|needs \w+$|not run, \w|$", block.mark), f"{page}:{block.line}: {block.mark}"


PAGE = """
<!-- test: first
a = 1
-->
```python
b = a + 1
```

```python
assert b == 3
```

<!-- test: not run, it would fail -->
```python
raise SystemExit
```
"""


def test_wrong_page_fails_at_its_line() -> None:
    with pytest.raises(AssertionError) as failed:
        run("page.md", PAGE, {})
    assert failed.traceback[-1].lineno == 9  # from 0
    assert run("page.md", PAGE.replace("3", "2"), {}) == 2
