"""Draft trees under construction: GrowingTree keeps the most likely paths, FixedTree fills a given shape.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", EMNLP 2024: the most likely
nodes of a level are expanded; in the end the most likely nodes overall are kept. A path is never more likely than its
parent, so these form a tree.
"""

import heapq
from collections.abc import Sequence

from detcompile.errors import InvalidInput
from detcompile.runtime.speculation.draft_tree import DraftTree, Path, require_shape


class FixedTree:
    """A tree of a given shape, filled level by level; path (0, 2) is the third candidate after (0,).

    Raises:
        InvalidInput: the shape is invalid.
    """

    def __init__(self, shape: Sequence[Path]) -> None:
        self._shape = set(require_shape(shape))
        self._parents = sorted({path[:-1] for path in self._shape})
        self._tokens: dict[Path, int] = {}
        self._level = 0

    def frontier(self) -> list[Path]:
        """Return the nodes of the newest level that have a token and children in the shape."""
        return [path for path in self._parents if len(path) == self._level and (not path or path in self._tokens)]

    def along(self, path: Path) -> list[int]:
        """Return the tokens from below the root to a node."""
        return [self._tokens[path[: depth + 1]] for depth in range(len(path))]

    def expand(self, level: Sequence[tuple[Path, Sequence[tuple[int, float]]]]) -> None:
        """Add a level, like ``GrowingTree.expand``; candidates without a node in the shape are dropped."""
        for parent, candidates in level:
            for index, (token, _) in enumerate(candidates):
                if (*parent, index) in self._shape:
                    self._tokens[*parent, index] = token
        self._level += 1

    def tree(self) -> DraftTree:
        """Return the nodes that have a token."""
        return DraftTree(self._tokens)


class GrowingTree:
    """Nodes and the probabilities of their paths.

    Args:
        max_nodes: nodes of the final tree.
        width: nodes to expand per level.

    Raises:
        InvalidInput: either is less than 1.
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
        """Return the nodes to expand next (first the root): the most likely ones of the newest level that are kept."""
        kept = set(self._likeliest()) | {()}
        nodes = [path for path in self._newest if path in kept]
        return heapq.nsmallest(self.width, nodes, key=self._rank)

    def along(self, path: Path) -> list[int]:
        """Return the tokens from below the root to a node."""
        return [self._tokens[path[: depth + 1]] for depth in range(len(path))]

    def expand(self, level: Sequence[tuple[Path, Sequence[tuple[int, float]]]]) -> None:
        """Add a level.

        Args:
            level: (node, its candidates) for each node of ``frontier``; a candidate is (token, probability given the
                node), with distinct tokens.

        Raises:
            InvalidInput: a probability is outside [0, 1].
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
        """Return the most likely nodes overall."""
        return DraftTree({path: self._tokens[path] for path in self._likeliest()})

    def _likeliest(self) -> list[Path]:
        return heapq.nsmallest(self.max_nodes, self._tokens, key=self._rank)

    def _rank(self, path: Path) -> tuple[float, int, Path]:
        """Sort key: more likely first; among equals, parents first, then first guesses."""
        return -self._probability[path], len(path), path
