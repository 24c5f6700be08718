"""Lengths that may only shrink: of files, functions, kernels, parameter lists and folders; and structure.md's list.

An exception names what is longer, how long it may be, and why. It has to go as soon as it is not needed, and its number
follows when the code gets shorter.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "detcompile"

MAX_FILE = 300
MAX_FUNCTION = 40  # lines of the code: a docstring may say as much as it needs
MAX_KERNEL = 90
MAX_FOLDER = 15

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
LONG_KERNELS: dict[str, int] = {}


class Function(NamedTuple):
    """A function of a module: its lines without its docstring, and whether a GPU runs it."""

    name: str
    lines: int
    kernel: bool


def functions(name: str, source: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
        kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        yield Function(f"{name}:{node.name}", lines, kernel)


def sources() -> dict[str, str]:
    """Text of every file of code by its path in the package."""
    files = (path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".cpp", ".h"})
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(files)}


def all_functions() -> list[Function]:
    return [function for name, text in sources().items() if name.endswith(".py") for function in functions(name, text)]


def beyond(found: dict[str, int], most: int, exceptions: dict[str, int]) -> list[str]:
    """What is longer than it may be, and exceptions that are larger than what they except."""
    long = [f"{name} has {lines} lines" for name, lines in found.items() if lines > exceptions.get(name, most)]
    idle = [
        f"{name}: the exception of {lines} lines should be {now if now > most else 'gone'}"
        for name, lines in exceptions.items()
        if (now := found.get(name, 0)) < lines or lines <= most
    ]
    return long + idle


def longest(kernels: bool) -> dict[str, int]:
    found: dict[str, int] = {}
    for function in all_functions():
        if function.kernel == kernels:
            found[function.name] = max(function.lines, found.get(function.name, 0))
    return found


def test_files_are_short():
    lengths = {name: len(text.splitlines()) for name, text in sources().items()}
    assert not beyond(lengths, MAX_FILE, LONG_FILES)


def test_functions_are_short():
    assert not beyond(longest(kernels=False), MAX_FUNCTION, LONG_FUNCTIONS)


def test_kernels_are_short():
    assert not beyond(longest(kernels=True), MAX_KERNEL, LONG_KERNELS)


def test_no_folder_is_full():
    modules = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert not {str(folder): number for folder, number in modules.items() if number > MAX_FOLDER}


def test_no_memory_of_a_template_follows_the_default_dtype():
    """A kernel that writes float32 into what torch.set_default_dtype made smaller writes beyond its end."""
    floating = {"torch." + name for name in ["empty", "full", "linspace", "ones", "tensor", "zeros"]}
    found = [
        f"{name}:{node.lineno}"
        for name, source in sources().items()
        if name.startswith(("templates/", "training/", "trl/")) and name.endswith(".py")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in floating
        if not {"dtype", None} & {keyword.arg for keyword in node.keywords}  # None: **keywords
    ]
    assert not found, f"pass dtype to torch's constructors in {found}"


def test_structure_names_every_module_and_no_other():
    page = (ROOT / "docs" / "structure.md").read_text()
    table = page[page.index("## Modules") :]
    named = Counter(re.findall(r"^\| `([a-z_0-9./]+)`", table, flags=re.MULTILINE))
    there = {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.stem != "__init__"
    }
    assert named.keys() == there
    assert set(named.values()) == {1}


@pytest.mark.parametrize(
    ("found", "exceptions", "said"),
    [
        ({"a": 301}, {}, ["a has 301 lines"]),
        ({"a": 300}, {}, []),
        ({"a": 320}, {"a": 320}, []),
        ({"a": 321}, {"a": 320}, ["a has 321 lines"]),
        ({"a": 310}, {"a": 320}, ["a: the exception of 320 lines should be 310"]),
        ({"a": 290}, {"a": 320}, ["a: the exception of 320 lines should be gone"]),
        ({}, {"a": 320}, ["a: the exception of 320 lines should be gone"]),
    ],
)
def test_an_exception_only_shrinks(found: dict[str, int], exceptions: dict[str, int], said: list[str]) -> None:
    assert beyond(found, MAX_FILE, exceptions) == said


def test_a_function_is_measured_without_its_docstring():
    source = 'def f():\n    """One\n    two."""\n    return 1\n\n@triton.jit\ndef k(): ...\n'
    assert list(functions("m", source)) == [Function("m:f", 2, False), Function("m:k", 1, True)]
