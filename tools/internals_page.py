"""Make the site's page of private names of torch and transformers that the package uses, from the sources.

Sources are parsed, not imported. tools/site_links.py adds the page when the site is built.
"""

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

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
    """Return the entries of a module: its public functions and classes, and what it imports for others.

    Raises:
        ValueError: one of them does not say what it is for and what breaks without it.
    """
    tree = ast.parse(source)
    imports = (node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    texts = dict.fromkeys(imported - used, "") | _assigned(tree, "NAMES", {})
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            texts[node.name] = ast.get_docstring(node) or ""
    result = []
    for name in sorted(texts):
        purpose, separator, consequence = texts[name].partition(CONSEQUENCE)
        if not separator or not purpose.strip() or not consequence.strip():
            raise ValueError(f"{name}: say what it is for, and after '{CONSEQUENCE}' what breaks")
        result.append(Entry(name, _line(purpose.split("\n\n")[0]), _line(consequence.split("\n\n")[0])))
    return result


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
        read_in = _assigned(ast.parse((ROOT / "detcompile" / package / "__init__.py").read_text()), "READ_IN", "")
        for path in sorted((ROOT / "detcompile" / package).glob("*.py")):
            if path.name == "__init__.py":
                continue
            source = path.read_text(encoding="utf-8")
            summary = _line((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0])
            lines += ["", f"## {package}.{path.stem}", "", f"{summary} Read in {library} {read_in}.", ""]
            lines += ["| name | purpose | without it |", "|---|---|---|"]
            lines += [f"| `{name}` | {purpose} | {consequence} |" for name, purpose, consequence in entries(source)]
    return "\n".join([*lines, ""])


def _assigned(tree: ast.Module, name: str, default: Any) -> Any:
    """Return the literal that a module assigns to a name."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    return next((ast.literal_eval(node.value) for node in assigned), default)


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("``", "`").replace("|", "\\|")
