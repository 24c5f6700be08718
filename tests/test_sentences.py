"""Docstrings and `Args:` entries are sentences that stand alone: they read without the name that they belong to.

A reader meets them in a tooltip or a table, far from the name. So none begins as the rest of a sentence that the name
began: `num_tokens: of a draft.` says nothing, `num_tokens: tokens per draft.` does.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "detcompile"
# What these refer to is the name, or nothing.
PREPOSITIONS = {
    "about", "above", "after", "against", "along", "among", "as", "at", "before", "behind", "below", "beside",
    "between", "beyond", "by", "during", "for", "in", "inside", "into", "of", "on", "onto", "over", "since",
    "than", "through", "to", "toward", "towards", "under", "until", "up", "upon", "with", "within", "without",
}  # fmt: skip
PRONOUNS = {
    "it", "its", "that", "their", "them", "these", "they", "this", "those", "which", "who", "whom", "whose",
}  # fmt: skip
SECTIONS = ("Args:", "Attributes:")
ENTRY = re.compile(r"^(\**\w+(?:, \**\w+)*): +(\S+)")
INNER_ENTRY = re.compile(r"[.;] (\w+(?:, \w+)*): (\S+)")

# Violations in a file that are not rewritten yet: a number may only fall.
ALLOWED: dict[str, int] = {
    "passes/capture.py": 1,
}


class Fragment(NamedTuple):
    """A docstring or an entry of one that begins as the rest of a sentence."""

    name: str
    begins: str


def fragments(source: str) -> Iterator[Fragment]:
    """Public docstrings, and entries of any, that do not stand alone."""
    tree = ast.parse(source)
    for name, node, public in documented(tree):
        text = ast.get_docstring(node)
        if text is None:
            continue
        if public and is_fragment(text.split()[0]):
            yield Fragment(name, " ".join(text.split()[:4]))
        for entry, word in entries(text):
            if is_fragment(word):
                yield Fragment(f"{name}({entry})", word)


def documented(tree: ast.Module) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef, bool]]:
    """(dotted name, node, whether it and all that it stands in are public) of what may have a docstring."""

    def below(parent: ast.AST, prefix: str, public: bool) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef, bool]]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                own, seen = f"{prefix}{node.name}", public and not node.name.startswith("_")
                yield own, node, seen
                yield from below(node, own + ".", seen and isinstance(node, ast.ClassDef))
            else:
                yield from below(node, prefix, public)

    yield "", tree, True
    yield from below(tree, "", True)


def entries(docstring: str) -> Iterator[tuple[str, str]]:
    """(names, first word) of each entry of the sections that have entries; one line may hold several."""
    inside = False
    for line in docstring.splitlines():
        if line in SECTIONS:
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside:
            first = ENTRY.match(line.strip()) if re.match(r" {4}\S", line) else None
            yield from (match.groups() for match in (first, *INNER_ENTRY.finditer(line)) if match)


def is_fragment(word: str) -> bool:
    return word.strip(".,;:").lower() in PREPOSITIONS | PRONOUNS


def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("name", sources())
def test_docstrings_and_entries_stand_alone(name: str) -> None:
    found = list(fragments(sources()[name]))
    assert len(found) == ALLOWED.get(name, 0), found


PLANTED = '''
"""Of a module."""

class Public:
    """As another.

    Args:
        shape: of the thing. size: that it has
            where it is long; width: for a row.
        *rest, last: with more.

    Attributes:
        steps: by rank.
    """

    def method(self):
        """That which is."""
        def inner():
            """Of no one's business."""

class _Private:
    """Of nobody's concern.

    Args:
        size: in bytes.
    """
'''
SOUND = '''
"""What stands alone.

Args: are named in the text, as here: of no concern.
"""

def of(shape):
    """A thing of this shape.

    Args:
        shape: [M, N] of the thing.
        given, known: parts of it; None makes them.

    Returns:
        As long as it is.
    """
'''


def test_planted_fragments_are_seen() -> None:
    assert [fragment.name for fragment in fragments(PLANTED)] == [
        "",
        "Public",
        "Public(shape)",
        "Public(size)",
        "Public(width)",
        "Public(*rest, last)",
        "Public(steps)",
        "Public.method",
        "_Private(size)",
    ]


def test_sentences_are_left_alone() -> None:
    assert not list(fragments(SOUND))
