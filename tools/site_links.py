"""Add to the site the files that its pages link to, and pages that are generated when it is built.

mkdocs runs this as a hook (mkdocs.yml). Pages link to files of the repository by relative paths, which also work in a
checkout. On the site a link to ``../benchmarks/results/x.json`` leads to ``repository/benchmarks/results/x.json``, and
a Markdown file becomes a page. Folders are not copied: their links become plain text.
"""

import posixpath
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tools import internals_page, modules_page

DOCS, COPIES = "docs/", "repository/"
GENERATED = {"modules.md": modules_page.page, "torch_internals.md": internals_page.page}
LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def in_repository(uri: str) -> str:
    """Return the path in the repository of a file of the site."""
    return uri.removeprefix(COPIES) if uri.startswith(COPIES) else DOCS + uri


def in_site(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else COPIES + path


def target(link: re.Match[str], uri: str) -> str:
    """Return the path in the repository that a link of the page ``uri`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(uri)), link["path"]))


def copies(pages: dict[str, str], root: Path) -> Iterator[str]:
    """Yield the files of the repository at ``root`` that the site needs copies of.

    Args:
        pages: text of each page by its path in the site.
    """
    copied: set[str] = set()
    waiting = list(pages.items())
    while waiting:
        uri, text = waiting.pop()
        for path in sorted({target(link, uri) for link in LINK.finditer(text)}):
            if path.startswith((DOCS, "..")) or path in copied or not (root / path).is_file():
                continue
            copied.add(path)
            yield path
            if path.endswith(".md"):
                waiting.append((in_site(path), (root / path).read_text(encoding="utf-8")))


def relinked(text: str, uri: str, known: Collection[str], root: Path) -> str:
    """Return the text of the page ``uri`` with links that lead to files of the site.

    Args:
        known: paths of all files of the site.
    """

    def replaced(link: re.Match[str]) -> str:
        path = target(link, uri)
        if path.startswith(DOCS) and not uri.startswith(COPIES):
            return link[0]
        if in_site(path) in known:
            there = posixpath.relpath(in_site(path), posixpath.dirname(uri) or ".")
            return f"[{link['text']}]({there}{link['anchor'] or ''})"
        return link["text"] if (root / path).is_dir() else link[0]

    return LINK.sub(replaced, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and the copies to the files of the site."""
    from mkdocs.structure.files import File, InclusionLevel

    root = Path(config.config_file_path).parent
    for uri, page in GENERATED.items():
        files.append(File.generated(config, uri, content=page()))
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for path in copies(pages, root):
        where = str(root / path)
        files.append(File.generated(config, in_site(path), abs_src_path=where, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page before mkdocs renders it."""
    root = Path(config.config_file_path).parent
    return relinked(markdown, page.file.src_uri, files.src_uris, root)
