"""Links from the site's pages to files of the repository that are no pages: the site gets copies of these files.

mkdocs runs this as a hook (mkdocs.yml). Pages stay as they are, with links that also work where they lie: a link to
``../benchmarks/results/x.json`` leads to ``repository/benchmarks/results/x.json`` of the site, and a Markdown file
becomes a page there. A folder has no copy, so that only the text of its link stays.
"""

import posixpath
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

DOCS, COPIES = "docs/", "repository/"
LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def in_repository(uri: str) -> str:
    """Path in the repository of a file of the site."""
    return uri.removeprefix(COPIES) if uri.startswith(COPIES) else DOCS + uri


def in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else COPIES + path


def target(link: re.Match[str], uri: str) -> str:
    """Path in the repository that a link of the page ``uri`` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(uri)), link["path"]))


def copies(pages: dict[str, str], root: Path) -> Iterator[str]:
    """Files of the repository at ``root`` that the site needs copies of.

    Args:
        pages: text of each page by its place in the site.
    """
    found: set[str] = set()
    waiting = list(pages.items())
    while waiting:
        uri, text = waiting.pop()
        for path in sorted({target(link, uri) for link in LINK.finditer(text)}):
            if path.startswith((DOCS, "..")) or path in found or not (root / path).is_file():
                continue
            found.add(path)
            yield path
            if path.endswith(".md"):
                waiting.append((in_site(path), (root / path).read_text(encoding="utf-8")))


def relinked(text: str, uri: str, known: Collection[str], root: Path) -> str:
    """The text of the page ``uri`` with links that lead to files of the site.

    Args:
        known: places of all files of the site.
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
    """mkdocs asks for the files of the site."""
    from mkdocs.structure.files import File, InclusionLevel

    root = Path(config.config_file_path).parent
    pages = {page.src_uri: page.content_string for page in files.documentation_pages()}
    for path in copies(pages, root):
        where = str(root / path)
        files.append(File.generated(config, in_site(path), abs_src_path=where, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs is about to make HTML of a page."""
    root = Path(config.config_file_path).parent
    return relinked(markdown, page.file.src_uri, files.src_uris, root)
