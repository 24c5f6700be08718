"""Trees in the making: GrowingTree keeps the nodes whose paths are likeliest under the draft, FixedTree fills a shape.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", EMNLP 2024: the likeliest
nodes of a level are expanded; in the end the likeliest of all stay. A path is never likelier than its parent, so these
are a tree.
"""

import heapq
from collections.abc import Sequence

from detcompile.errors import InvalidInput
from detcompile.runtime.speculation.draft_tree import DraftTree, Path, require_shape

__all__ = ["FixedTree", "GrowingTree"]


class FixedTree:
    """A tree of a given shape, filled level by level; path (0, 2) is the third candidate for what follows (0,).

    Raises:
        InvalidInput: no shape.
    """

    def __init__(self, shape: Sequence[Path]) -> None:
        self._shape = set(require_shape(shape))
        self._parents = sorted({path[:-1] for path in self._shape})
        self._tokens: dict[Path, int] = {}
        self._level = 0

    def frontier(self) -> list[Path]:
        """Nodes of the newest level that have children in the shape and were given a token."""
        return [path for path in self._parents if len(path) == self._level and (not path or path in self._tokens)]

    def along(self, path: Path) -> list[int]:
        """Tokens from below the root to a node."""
        return [self._tokens[path[: depth + 1]] for depth in range(len(path))]

    def expand(self, level: Sequence[tuple[Path, Sequence[tuple[int, float]]]]) -> None:
        """Add a level, as ``GrowingTree.expand``; candidates that the shape has no node for are dropped."""
        for parent, candidates in level:
            for index, (token, _) in enumerate(candidates):
                if (*parent, index) in self._shape:
                    self._tokens[*parent, index] = token
        self._level += 1

    def tree(self) -> DraftTree:
        """The nodes that were given a token."""
        return DraftTree(self._tokens)


class GrowingTree:
    """Nodes and the probabilities of their paths.

    Args:
        max_nodes: nodes that the tree has in the end.
        width: nodes of a level that are expanded.

    Raises:
        InvalidInput: less than one of either.
    """

    def __init__(self, max_nodes: int, width: int) -> None:
        if max_nodes < 1 or width < 1:
            raise InvalidInput(f"GrowingTree: max_nodes={max_nodes} and width={width} must be at least 1")
        self.max_nodes = max_nodes
        self.width = width
        self._tokens: dict[Path, int] = {}
        self._probability: dict[Path, float] = {(): 1.0}
        self._newest: list[Path] = [()]

    def frontier(self) -> list[Path]:
        """Nodes to expand next, at first the root: the likeliest of the newest level among those that would stay."""
        staying = set(self._likeliest()) | {()}
        found = [path for path in self._newest if path in staying]
        return heapq.nsmallest(self.width, found, key=self._rank)

    def along(self, path: Path) -> list[int]:
        """Tokens from below the root to a node."""
        return [self._tokens[path[: depth + 1]] for depth in range(len(path))]

    def expand(self, level: Sequence[tuple[Path, Sequence[tuple[int, float]]]]) -> None:
        """Add a level.

        Args:
            level: (node, its candidates) of each node of ``frontier``; a candidate is (token, probability given the
                node), no token twice.

        Raises:
            InvalidInput: a probability outside [0, 1].
        """
        self._newest = []
        for parent, candidates in level:
            for index, (token, probability) in enumerate(candidates):
                if not 0.0 <= probability <= 1.0:
                    raise InvalidInput(f"a draft's probability is {probability} at {parent}: it must be within 0 and 1")
                path = (*parent, index)
                self._tokens[path] = token
                self._probability[path] = self._probability[parent] * probability
                self._newest.append(path)

    def tree(self) -> DraftTree:
        """The likeliest nodes of all."""
        return DraftTree({path: self._tokens[path] for path in self._likeliest()})

    def _likeliest(self) -> list[Path]:
        return heapq.nsmallest(self.max_nodes, self._tokens, key=self._rank)

    def _rank(self, path: Path) -> tuple[float, int, Path]:
        """Likelier first; among equals parents, and then first guesses."""
        return -self._probability[path], len(path), path
