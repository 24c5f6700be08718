"""Habits of the source that a parser can check."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "detcompile"


def sources() -> dict[str, str]:
    """Return the text of every Python file by its path in the package."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_memory_of_a_template_follows_the_default_dtype():
    """A kernel that writes float32 into what torch.set_default_dtype made smaller writes beyond its end."""
    floating = {"torch." + name for name in ["empty", "full", "linspace", "ones", "tensor", "zeros"]}
    found = [
        f"{name}:{node.lineno}"
        for name, source in sources().items()
        if name.startswith(("templates/", "training/", "trl/"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in floating
        if not {"dtype", None} & {keyword.arg for keyword in node.keywords}  # None: **keywords
    ]
    assert not found, f"pass dtype to torch's constructors in {found}"


def test_no_cancellation_of_a_request_is_lost():
    """asyncio.wait_for of Python 3.11 may return in place of raising CancelledError; asyncio.timeout does not."""
    found = [
        f"{name}:{node.lineno}"
        for name, source in sources().items()
        if name.startswith("serving/")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "wait_for"
    ]
    assert not found, f"use asyncio.timeout in {found}"
