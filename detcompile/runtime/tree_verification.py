"""A draft tree in one step: which tokens of which branch are computed, and where their keys and values go.

A branch of the tree is a sequence of its own, whose keys stand at their logical positions: the sequence's blocks before
the newest token's, then blocks of the branch. The first branch writes into the sequence's own blocks. So each node's
logits have the bits of plain decoding, whatever other nodes there are: nothing about attention changes. A node that
several branches pass through is computed in the first of them, and its key and value are written into the blocks of
each.
"""

import functools
from typing import NamedTuple

from detcompile.runtime.acceptance import Proposals
from detcompile.runtime.draft_tree import DraftTree, Path
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import SharedToken, StepEntry

__all__ = ["Branch", "TreeLayout", "Verification", "tree_layout"]


class TreeLayout(NamedTuple):
    """What a step computes of a tree of this shape, whatever its tokens and its sequence are."""

    leaves: tuple[Path, ...]  # one a branch, that of the first guesses first
    firsts: tuple[int, ...]  # depth of the first node of each branch that no branch before it computes; the root's is 0
    places: dict[Path, tuple[int, int]]  # branch that computes a node, and which of its nodes it is
    shared: tuple[tuple[int, int, int, int], ...]  # place of a node, a later branch through it, and the node's depth


class Branch(NamedTuple):
    """One path from the newest token to a leaf."""

    leaf: Path
    entry: StepEntry  # the nodes that no branch before it computes

    @property
    def stand_in(self) -> Sequence:
        """In whose blocks the path is."""
        return self.entry.sequence


class Verification(NamedTuple):
    """A sequence's tree in one step."""

    sequence: Sequence
    tree: DraftTree
    layout: TreeLayout
    branches: tuple[Branch, ...]  # the first is in the sequence's own blocks
    start: int  # index of the newest token, the root
    copies: tuple[tuple[int, int], ...]  # (from, to) blocks: what stands before the root in its block
    rejects: bool = False  # by rejection sampling; otherwise a guess is right if it is what the target draws

    def shared(self, index: int) -> list[SharedToken]:
        """The nodes of each branch that one before it computes; the first branch is entry ``index`` of the step."""
        return [
            SharedToken(index + branch, offset, index + other, self.start + depth)
            for branch, offset, other, depth in self.layout.shared
        ]

    def rows(self) -> list[tuple[Path, Sequence, int]]:
        """Where each node's logits are: the stand-in of the branch that computes it, and its offset in that entry."""
        places = self.layout.places.items()
        return [(path, self.branches[branch].stand_in, offset) for path, (branch, offset) in places]

    def proposals(self, path: Path) -> Proposals | None:
        """The guesses for what follows a node, if they are to be accepted or rejected there."""
        children = self.tree.children(path)
        if not self.rejects or not children:
            return None
        tokens = tuple(self.tree.tokens[child] for child in children)
        return Proposals(tokens, tuple(self.tree.distributions.get(child) for child in children))

    def slots(self, path: Path, block_size: int) -> list[list[int]]:
        """Where the KV cache holds the root and the nodes down to ``path``: slots of each group."""
        tables = self.through(path).stand_in.block_tables
        places = range(self.start, self.start + 1 + len(path))
        return [[table[p // block_size] * block_size + p % block_size for p in places] for table in tables]

    def through(self, path: Path) -> Branch:
        """The first branch through a node."""
        return self.branches[self.layout.places[path][0]]


@functools.lru_cache(maxsize=256)
def tree_layout(paths: tuple[Path, ...]) -> TreeLayout:
    """The layout of a tree of these nodes, each behind its parent."""
    parents = {path[:-1] for path in paths}
    leaves = tuple(sorted(path for path in paths if path not in parents))
    places: dict[Path, tuple[int, int]] = {}
    firsts: list[int] = []
    shared: list[tuple[int, int, int, int]] = []
    for branch, leaf in enumerate(leaves):
        first = next(depth for depth in range(len(leaf) + 1) if leaf[:depth] not in places)
        shared += [(*places[leaf[:depth]], branch, depth) for depth in range(first)]
        places |= {leaf[:depth]: (branch, depth - first) for depth in range(first, len(leaf) + 1)}
        firsts.append(first)
    return TreeLayout(leaves, tuple(firsts), places, tuple(shared))
