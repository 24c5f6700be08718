"""DraftTree: guesses for the next tokens, as a tree.

A node is named by its path: ``(0,)`` is the first guess for the next token, ``(1,)`` another one, ``(0, 2)`` the third
guess for the token after ``(0,)``. The root, the sequence's newest token, is ``()``. A list of paths is a shape.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.plain_values import whole_number

Path = tuple[int, ...]


class DraftTree:
    """Draft tokens by path, parents before children. Immutable, so that the engine verifies what was drafted.

    Args:
        tokens: token id of each node.
        distributions: probabilities [V] (float32, on the target's device) from which nodes were drawn at random, given
            their older siblings. Only ``acceptance="rejection"`` reads them. A node without one is treated as the only
            token that could have been proposed there, which is always correct but accepts fewer guesses.

    Raises:
        InvalidInput: a path or a token has the wrong type, a node has no parent, or two children of a node have the
            same token.
    """

    def __init__(self, tokens: Mapping[Path, int], distributions: Mapping[Path, Tensor] | None = None) -> None:
        self._shape = _shape(tuple(tokens))
        self.tokens = MappingProxyType(
            {path: whole_number(tokens[path], "a draft token") for path in self._shape.paths}
        )
        self.distributions = MappingProxyType(dict(distributions or {}))
        self._child: dict[tuple[Path, int], Path] = {}
        for (path, token), parent in zip(self.tokens.items(), self._shape.parents):
            if self._child.setdefault((parent, token), path) is not path:
                raise InvalidInput(f"draft nodes {self._child[parent, token]} and {path} hold one token: keep one")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "DraftTree":
        """Return a chain: each token is the only guess after the previous one."""
        return cls({(0,) * (depth + 1): token for depth, token in enumerate(tokens)})

    @classmethod
    def of(cls, shape: Sequence[Path], tokens: Sequence[int]) -> "DraftTree":
        """Return a tree of a shape such as ``[(0,), (0, 0), (0, 1), (1,)]``, with the token of each node."""
        return cls(dict(zip(require_shape(shape), tokens, strict=True)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return self._shape.depth

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the nodes, parents before children: trees with equal paths share a shape."""
        return self._shape.paths

    def child(self, path: Path, token: int) -> Path | None:
        """Return the node that guesses ``token`` after ``path``, or None."""
        return self._child.get((path, token))

    def children(self, path: Path) -> list[Path]:
        """Return the guesses for the token after ``path``, first guess first."""
        return list(self._shape.children.get(path, ()))

    def branches(self) -> list[Path]:
        """Return all leaves, the branch of first guesses first, so that most nodes lie on the first branches."""
        return sorted(path for path in self.tokens if path not in self._shape.children)

    def along(self, leaf: Path) -> list[int]:
        """Return the tokens from below the root to ``leaf``."""
        return [self.tokens[leaf[: depth + 1]] for depth in range(len(leaf))]

    def pruned(self, max_nodes: int, max_depth: int) -> "DraftTree":
        """Return the first ``max_nodes`` nodes, level by level, that are at most ``max_depth`` deep."""
        if len(self.tokens) <= max_nodes and self.depth <= max_depth:
            return self
        return self.only([path for path in self.tokens if len(path) <= max_depth][: max(0, max_nodes)])

    def only(self, paths: Iterable[Path]) -> "DraftTree":
        """Return the tree of only these nodes, which must include their parents."""
        return DraftTree({path: self.tokens[path] for path in paths}, self.distributions)


class _Shape(NamedTuple):
    """Data shared by trees with the same paths."""

    paths: tuple[Path, ...]  # level by level
    parents: tuple[Path, ...]  # of each path
    children: dict[Path, tuple[Path, ...]]
    depth: int


@functools.lru_cache(maxsize=256)
def _shape(paths: tuple[Path, ...]) -> _Shape:
    for path in paths:
        if not isinstance(path, tuple) or not all(isinstance(index, Integral) for index in path):
            raise InvalidInput(f"draft node {path!r} must be a tuple of integers")
    ordered = tuple(sorted(paths, key=lambda path: (len(path), path)))
    children: dict[Path, tuple[Path, ...]] = {}
    for path in ordered:
        if not path or (path[:-1] and path[:-1] not in paths):
            raise InvalidInput(f"draft node {path} has no parent in the tree: give {path[:-1]} too")
        children[path[:-1]] = (*children.get(path[:-1], ()), path)
    return _Shape(ordered, tuple(path[:-1] for path in ordered), children, len(ordered[-1]) if ordered else 0)


def require_shape(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the checked paths of a tree's nodes, in order.

    Raises:
        InvalidInput: there are no paths, one occurs twice or has a negative index, or a node has no parent.
    """
    shape = tuple(tuple(path) for path in paths)
    known = set(shape)
    if not shape or len(known) != len(shape):
        raise InvalidInput(f"a draft tree of {list(paths)}: give at least one path, and each once")
    for path in shape:
        if not path or min(path) < 0 or (path[:-1] and path[:-1] not in known):
            raise InvalidInput(f"draft node {path} of {list(paths)}: no parent there, or no place among its siblings")
    return shape
