"""A draft tree in one step: which tokens of which branch are computed, and where their keys and values go.

A branch of the tree is a sequence of its own, whose keys stand at their logical positions: the sequence's blocks before
the newest token's, then blocks of the branch. The first branch writes into the sequence's own blocks. So each node's
logits have the bits of plain decoding, whatever other nodes there are: nothing about attention changes. A node that
several branches pass through is computed in the first of them, and its key and value are written into the blocks of
each.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from detcompile.runtime.acceptance import Proposals
from detcompile.runtime.draft_tree import DraftTree, Path
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import SharedToken, StepEntry

__all__ = ["Branch", "Verification", "num_common"]


class Branch(NamedTuple):
    """One path from the newest token to a leaf."""

    leaf: Path
    stand_in: Sequence  # the sequence's tokens with the path behind them, in the branch's blocks
    first: int = 0  # depth of the first node that no branch before it computes; the root's is 0


class Verification(NamedTuple):
    """A sequence's tree in one step."""

    sequence: Sequence
    tree: DraftTree
    branches: tuple[Branch, ...]  # the first is in the sequence's own blocks
    start: int  # index of the newest token, the root
    copies: tuple[tuple[int, int], ...]  # (from, to) blocks: what stands before the root in its block
    rejects: bool = False  # by rejection sampling; otherwise a guess is right if it is what the target draws

    def entries(self) -> list[StepEntry]:
        """The step's part of each branch: the root and the nodes of its path that no branch before it has."""
        return [StepEntry(b.stand_in, self.start + b.first, 1 + len(b.leaf) - b.first) for b in self.branches]

    def shared(self, index: int) -> list[SharedToken]:
        """The nodes of each branch that one before it computes; the first branch is entry ``index`` of the step."""
        order = {branch.leaf: place for place, branch in enumerate(self.branches)}
        found = []
        for place, (leaf, _, first) in enumerate(self.branches):
            for depth in range(first):
                owner = self.through(leaf[:depth])
                entry, offset = index + order[owner.leaf], depth - owner.first
                found.append(SharedToken(entry, offset, index + place, self.start + depth))
        return found

    def rows(self) -> dict[Path, tuple[Sequence, int]]:
        """Where each node's logits are: the stand-in of the branch that computes it, and its offset in that entry."""
        return {
            leaf[:depth]: (stand_in, depth - first)
            for leaf, stand_in, first in self.branches
            for depth in range(first, len(leaf) + 1)
        }

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
        return next(branch for branch in self.branches if branch.leaf[: len(path)] == path)


def num_common(left: SequenceOf[int], right: SequenceOf[int]) -> int:
    """Indices that two paths begin with alike."""
    pairs = zip(left, right)
    return next((depth for depth, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
