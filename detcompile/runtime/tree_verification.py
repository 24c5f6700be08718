"""A draft tree in one step: which tokens of which branch are computed, and where their keys and values go.

A branch of the tree is a sequence of its own, whose keys stand at their logical positions: the sequence's blocks before
the newest token's, then blocks of the branch. The first branch writes into the sequence's own blocks. So each node's
logits have the bits of plain decoding, whatever other nodes there are: nothing about attention changes. A node that
several branches pass through is computed in the first of them, and its key and value are written into the blocks of
each.

Legend: G KV groups, S branches, T nodes, the root among them, C branches that a node may be part of, W width of the
block tables.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detcompile.runtime.acceptance import Proposals
from detcompile.runtime.draft_tree import DraftTree, Path
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import NO_COPIES, NOT_PENDING, StepArrays
from detcompile.step import NO_SLOT, PADDING_SLOT

__all__ = ["TreeLayout", "Verification", "tree_layout"]


class TreeLayout(NamedTuple):
    """What a step computes of a tree of this shape, whatever its tokens and its sequence are."""

    leaves: tuple[Path, ...]  # one a branch, that of the first guesses first
    rows: dict[Path, int]  # of each node among those computed, branch by branch; the root's is 0
    firsts: dict[Path, int]  # the first branch through each node, which computes it
    ends: tuple[int, ...]  # nodes computed once each branch is
    order: NDArray[np.int64]  # [T]: of each row, the node's index in (root, *paths)
    depths: NDArray[np.int64]  # [T]
    lengths: NDArray[np.int32]  # [S] nodes of each branch, the root's among them
    writes: NDArray[np.int64]  # [C, T]: branches into whose blocks each node is written
    idle: NDArray[np.bool_]  # [C, T]: no further one
    fixed: dict[str, NDArray[Any]]  # arrays of the step that neither tokens nor place change; never written to


class Verification(NamedTuple):
    """A sequence's tree in one step."""

    sequence: Sequence
    tree: DraftTree
    layout: TreeLayout
    start: int  # index of the newest token, the root
    forked: NDArray[np.int32]  # [G, S - 1, n]: blocks of each branch but the first, from that of the root on
    rejects: bool = False  # by rejection sampling; otherwise a guess is right if it is what the target draws

    def proposals(self, path: Path) -> Proposals | None:
        """The guesses for what follows a node, if they are to be accepted or rejected there."""
        children = self.tree.children(path)
        if not self.rejects or not children:
            return None
        tokens = tuple(self.tree.tokens[child] for child in children)
        return Proposals(tokens, tuple(self.tree.distributions.get(child) for child in children))

    def arrays(self, tables: NDArray[np.int32], block_size: int) -> StepArrays:
        """The step of this tree alone; logits of every node.

        What stands before the root in its block is copied from there into each fork: a fork is a block that was free,
        and so no other copy's source.

        Args:
            tables: [G, 1, W], the sequence's own, of at least ``width`` blocks.
        """
        sequence, layout, start = self.sequence, self.layout, self.start
        num_branches, first = len(layout.leaves), start // block_size
        tables = tables.repeat(num_branches, axis=1)
        tables[:, 1:, first : first + self.forked.shape[2]] = self.forked
        places = layout.depths + start
        blocks, offsets = np.divmod(places, block_size)
        slots = tables[:, layout.writes, blocks].astype(np.int64) * block_size + offsets
        np.copyto(slots, PADDING_SLOT, where=layout.idle)
        copies, num_before = NO_COPIES, start % block_size
        if num_before:
            copies = np.empty((3, *self.forked.shape[:2]), np.int64)
            copies[0], copies[1], copies[2] = tables[:, :1, first], self.forked[:, :, 0], num_before
            copies = copies.reshape(3, -1)
        known = sequence.position_ids
        return StepArrays(
            input_ids=np.array([sequence.token_ids[start], *self.tree.tokens.values()], np.int64)[layout.order],
            position_ids=places if known is None else layout.depths + known[start],
            slot_mappings=slots,
            seq_lens=layout.lengths + np.int32(start),
            block_tables=tables,
            block_copies=copies,
            **layout.fixed,
        )

    def width(self, block_size: int) -> int:
        """Blocks of the longest branch."""
        own = max(len(table) for table in self.sequence.block_tables)
        return max(own, self.start // block_size + self.forked.shape[2])


@functools.lru_cache(maxsize=256)
def tree_layout(paths: tuple[Path, ...]) -> TreeLayout:
    """The layout of a tree of these nodes, each behind its parent."""
    parents = {path[:-1] for path in paths}
    leaves = tuple(sorted(path for path in paths if path not in parents))
    writes: dict[Path, list[int]] = {}
    ends = []
    for branch, leaf in enumerate(leaves):
        for depth in range(len(leaf) + 1):
            writes.setdefault(leaf[:depth], []).append(branch)
        ends.append(len(writes))
    index = {path: i for i, path in enumerate(((), *paths))}
    padded = np.zeros((max(map(len, writes.values())), len(writes)), np.int64)
    idle = np.ones(padded.shape, np.bool_)
    for row, branches in enumerate(writes.values()):
        padded[: len(branches), row] = branches
        idle[: len(branches), row] = False
    fixed = {
        "pending": np.full(len(writes), NOT_PENDING),
        "logits_to_keep": np.arange(len(writes)),
        "cu_seqlens": np.array((0, *ends), np.int32),
        "state_slots": np.full(len(leaves), NO_SLOT, np.int32),  # who drafts carries no state
    }
    for array in fixed.values():
        array.setflags(write=False)
    return TreeLayout(
        leaves,
        {path: row for row, path in enumerate(writes)},
        {path: branches[0] for path, branches in writes.items()},
        tuple(ends),
        np.array([index[path] for path in writes]),
        np.array([len(path) for path in writes]),
        np.array([1 + len(leaf) for leaf in leaves], np.int32),
        padded,
        idle,
        fixed,
    )
