"""Make the site's page of private names of torch and transformers that the package uses, from the sources.

Sources are parsed, not imported. tools/site_links.py adds the page when the site is built.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Entry", "entries", "page"]

ROOT = Path(__file__).parents[1]
PACKAGES = {"torch": "torch_internals", "transformers": "transformers_internals"}
CONSEQUENCE = "Without it:"


class Entry(NamedTuple):
    """One public name of a module."""

    name: str
    purpose: str
    consequence: str


def entries(source: str) -> list[Entry]:
    """Return the entries of a module.

    Raises:
        ValueError: a name of ``__all__`` does not say what it is for and what breaks without it.
    """
    tree = ast.parse(source)
    values = {name: ast.literal_eval(value) for name, value in _assigned(tree) if name in ("NAMES", "__all__")}
    texts: dict[str, str] = dict(values.get("NAMES", {}))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            texts[node.name] = ast.get_docstring(node) or ""
    result = []
    for name in values["__all__"]:
        purpose, separator, consequence = texts.get(name, "").partition(CONSEQUENCE)
        if not separator or not purpose.strip() or not consequence.strip():
            raise ValueError(f"{name}: say what it is for, and after '{CONSEQUENCE}' what breaks")
        result.append(Entry(name, _line(purpose.split("\n\n")[0]), _line(consequence.split("\n\n")[0])))
    return result


def read_in(source: str) -> str:
    """Return the releases that a module was read in."""
    return next(ast.literal_eval(value) for name, value in _assigned(ast.parse(source)) if name == "READ_IN")


def page() -> str:
    """Return the page."""
    lines = [
        "# Internals of torch and transformers",
        "",
        "The undocumented names that this package uses. Only `detcompile/torch_internals/` and",
        "`detcompile/transformers_internals/` may name them; a test rejects private names elsewhere. The last column",
        "says what breaks if a release changes a name.",
    ]
    for library, package in PACKAGES.items():
        for path in sorted((ROOT / "detcompile" / package).glob("*.py")):
            if path.name == "__init__.py":
                continue
            source = path.read_text(encoding="utf-8")
            summary = _line((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0])
            lines += ["", f"## {package}.{path.stem}", "", f"{summary} Read in {library} {read_in(source)}.", ""]
            lines += ["| name | purpose | without it |", "|---|---|---|"]
            lines += [f"| `{name}` | {purpose} | {consequence} |" for name, purpose, consequence in entries(source)]
    return "\n".join([*lines, ""])


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a module assigns, each with its value."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), node.value


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("``", "`").replace("|", "\\|")
