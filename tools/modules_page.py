"""Make the site's table of modules: the first line of each docstring, by folder.

Sources are parsed, not imported. tools/site_links.py adds the page when the site is built.
"""

import ast
from pathlib import Path

__all__ = ["page"]

PACKAGE = Path(__file__).parents[1] / "detcompile"


def page() -> str:
    """Return the page."""
    lines = ["# Modules", "", "Every module of the package, with the first line of its docstring."]
    folder = None
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.parent != folder:
            folder = path.parent
            name = folder.relative_to(PACKAGE.parent).as_posix()
            lines += ["", f"## {name}", "", "| module | subject |", "|---|---|"]
        subject = docstring.partition("\n")[0].replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{path.stem}` | {subject} |")
    return "\n".join([*lines, ""])
