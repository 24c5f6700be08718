"""DraftTree: tokens that may come next, as a tree of guesses.

A node is named by its path: ``(0,)`` is the first guess for the next token, ``(1,)`` another one, ``(0, 2)`` the third
guess for what follows ``(0,)``. The root, the sequence's newest token, is ``()``.
"""

from collections.abc import Mapping, Sequence

from detcompile.errors import InvalidInput

__all__ = ["DraftTree", "Path"]

Path = tuple[int, ...]


class DraftTree:
    """Draft tokens by path, parents before children.

    Args:
        tokens: token id of each node.

    Raises:
        InvalidInput: a node without its parent, or two children of one node with the same token.
    """

    def __init__(self, tokens: Mapping[Path, int]) -> None:
        self.tokens = dict(sorted(tokens.items(), key=lambda item: (len(item[0]), item[0])))
        self._child: dict[tuple[Path, int], Path] = {}
        for path, token in self.tokens.items():
            if not path or (path[:-1] and path[:-1] not in self.tokens):
                raise InvalidInput(f"draft node {path} has no parent in the tree: give {path[:-1]} too")
            if self._child.setdefault((path[:-1], token), path) != path:
                raise InvalidInput(f"draft nodes {self._child[path[:-1], token]} and {path} hold one token: keep one")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "DraftTree":
        """Each token the only guess after the one before."""
        return cls({(0,) * (depth + 1): token for depth, token in enumerate(tokens)})

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max((len(path) for path in self.tokens), default=0)

    def child(self, path: Path, token: int) -> Path | None:
        """The node that guesses ``token`` after ``path``."""
        return self._child.get((path, token))

    def branches(self) -> list[Path]:
        """Every leaf, that of the first guesses first, so that most nodes are on the first branches."""
        parents = {path[:-1] for path in self.tokens}
        return sorted(path for path in self.tokens if path not in parents)

    def along(self, leaf: Path) -> list[int]:
        """Tokens from below the root to ``leaf``."""
        return [self.tokens[leaf[: depth + 1]] for depth in range(len(leaf))]

    def pruned(self, max_nodes: int, max_depth: int) -> "DraftTree":
        """The first ``max_nodes`` nodes, level by level, that lie no deeper than ``max_depth``."""
        kept = [(path, token) for path, token in self.tokens.items() if len(path) <= max_depth]
        return DraftTree(dict(kept[: max(0, max_nodes)]))
