"""Verify a draft tree in one step: which tokens of which branch are computed, and where keys and values are written.

A branch of the tree is a sequence whose keys are at their logical positions: the sequence's blocks before the newest
token's block, then blocks of the branch. The first branch writes into the sequence's blocks. So attention does not
change, and each node's logits have the bits of plain decoding, whatever the other nodes are. A node shared by several
branches is computed in the first of them, and its key and value are written into the blocks of each.

Legend: G KV groups, N trees, S branches, T nodes including the root, C branches that a node may be part of, W width of
the block tables.
"""

import functools
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.rejection import Proposals
from detcompile.runtime.speculation.draft_tree import DraftTree, Path
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays, read_only
from detcompile.step import NO_SLOT, PADDING_SLOT


class TreeLayout(NamedTuple):
    """Layout of a step for trees of one shape, independent of tokens and sequence."""

    paths: tuple[Path, ...]
    leaves: tuple[Path, ...]  # one per branch; the branch of first guesses comes first
    rows: dict[Path, int]  # each node's row, branch by branch; the root's is 0
    firsts: dict[Path, int]  # the first branch through each node, which computes it
    ends: tuple[int, ...]  # number of nodes computed up to the end of each branch
    order: NDArray[np.int64]  # [T]: each row's index in (root, *paths)
    depths: NDArray[np.int64]  # [T]
    lengths: NDArray[np.int32]  # [S] nodes of each branch, including the root
    writes: NDArray[np.int64]  # [C, 1, T]: branches into whose blocks each node is written
    idle: NDArray[np.bool_]  # [C, 1, T]: padding of ``writes``


class Verification(NamedTuple):
    """A sequence's tree in one step."""

    sequence: Sequence
    tree: DraftTree
    layout: TreeLayout
    start: int  # index of the newest token, the root
    forked: NDArray[np.int32]  # [G, S - 1, n]: blocks of each branch except the first, from the root's block on
    rejects: bool = False  # use rejection sampling; otherwise a guess is right if the target draws it

    def proposals(self, path: Path) -> Proposals | None:
        """Return the guesses for the token after a node, if rejection sampling decides there."""
        children = self.tree.children(path)
        if not self.rejects or not children:
            return None
        tokens = tuple(self.tree.tokens[child] for child in children)
        return Proposals(tokens, tuple(self.tree.distributions.get(child) for child in children))

    def width(self, block_size: int) -> int:
        """Return the number of blocks of the longest branch."""
        return max(len(self.sequence.block_tables[0]), self.start // block_size + self.forked.shape[2])


def tree_arrays(trees: SequenceOf[Verification], tables: SequenceOf[NDArray[np.int32]], block_size: int) -> StepArrays:
    """Build the step of trees of one layout; keep logits of every node.

    Tokens before a root in its block are copied from there into each fork. A fork is a newly allocated block, so no
    other copy reads it.

    Args:
        tables: [G, 1, W], each sequence's block table, at least ``width`` blocks wide.
    """
    return _one_tree(trees[0], tables[0], block_size) if len(trees) == 1 else _trees(trees, tables, block_size)


def _one_tree(tree: Verification, table: NDArray[np.int32], block_size: int) -> StepArrays:
    """Build the step of one tree with half the operations of ``_trees``, because the device waits for it."""
    layout, start, forked = tree.layout, tree.start, tree.forked
    num_groups, num_branches, num_blocks = len(table), len(layout.leaves), forked.shape[2]
    first, offset = divmod(start, block_size)
    branches = np.concatenate((table[:, :, first : first + num_blocks], forked), axis=1)
    tables = table.repeat(num_branches, axis=1)
    tables[:, :, first : first + num_blocks] = branches
    terms = _slot_terms(layout.paths, offset, num_blocks, block_size)
    blocks = branches.reshape(num_groups, -1).take(terms.blocks, axis=1)
    copies = np.empty((3, num_groups, num_branches - 1), np.int64)
    if num_branches > 1:
        copies[0], copies[1], copies[2] = branches[:, :1, 0], branches[:, 1:, 0], offset
    tokens = [tree.sequence.token_ids[start], *tree.tree.tokens.values()]
    return StepArrays(
        input_ids=np.array(tokens, np.int64).take(layout.order),
        position_ids=layout.depths + start,
        slot_mappings=blocks * terms.scales + terms.offsets,
        seq_lens=layout.lengths + np.int32(start),
        block_tables=tables,
        block_copies=copies.reshape(3, -1),
        **_fixed(layout.ends, 1),
    )


def _trees(
    trees: SequenceOf[Verification], sequence_tables: SequenceOf[NDArray[np.int32]], block_size: int
) -> StepArrays:
    layout = trees[0].layout
    num_groups, _, width = sequence_tables[0].shape
    starts = np.array([[tree.start] for tree in trees])
    places = layout.depths + starts
    tables = np.empty((num_groups, len(trees), len(layout.leaves), width), np.int32)
    for index, (tree, table) in enumerate(zip(trees, sequence_tables, strict=True)):
        first = tree.start // block_size
        tables[:, index] = table
        tables[:, index, 1:, first : first + tree.forked.shape[2]] = tree.forked
    blocks, offsets = np.divmod(places, block_size)
    blocks = tables[:, np.arange(len(trees))[:, None], layout.writes, blocks]  # [G, C, N, T]
    slots = np.multiply(blocks, block_size, dtype=np.int64) + offsets
    np.copyto(slots, PADDING_SLOT, where=layout.idle)
    copies = np.empty((3, num_groups, len(layout.leaves) - 1, len(trees)), np.int64)
    roots = blocks[..., 0]  # the root's block in every branch; the root is part of all
    copies[0], copies[1], copies[2] = roots[:, :1], roots[:, 1:], offsets[:, 0]
    tokens = [[tree.sequence.token_ids[tree.start], *tree.tree.tokens.values()] for tree in trees]
    return StepArrays(
        input_ids=np.array(tokens, np.int64).take(layout.order, axis=1).reshape(-1),
        position_ids=places.reshape(-1),
        slot_mappings=slots.reshape(num_groups, len(layout.writes), -1),
        seq_lens=(layout.lengths + starts).astype(np.int32).reshape(-1),
        block_tables=tables.reshape(num_groups, -1, width),
        block_copies=copies.reshape(3, -1),
        **_fixed(layout.ends, len(trees)),
    )


class _SlotTerms(NamedTuple):
    """A tree's slots are blocks * scales + offsets, [C, T] each; ``blocks`` are indices into [S, n]."""

    blocks: NDArray[np.int64]
    scales: NDArray[np.int64]
    offsets: NDArray[np.int64]


@functools.lru_cache(maxsize=1024)
def _slot_terms(paths: tuple[Path, ...], offset: int, num_blocks: int, block_size: int) -> _SlotTerms:
    """Return the terms for a tree whose root is at ``offset`` in its block, the first of ``num_blocks``."""
    layout = tree_layout(paths)
    blocks, offsets = np.divmod(layout.depths + offset, block_size)
    idle = layout.idle[:, 0]
    return _SlotTerms(
        layout.writes[:, 0] * num_blocks + blocks,
        np.where(idle, 0, block_size),
        np.where(idle, PADDING_SLOT, offsets),
    )


@functools.lru_cache(maxsize=256)
def tree_layout(paths: tuple[Path, ...]) -> TreeLayout:
    """Return the layout of a tree of these nodes, parents before children."""
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
    return TreeLayout(
        paths,
        leaves,
        {path: row for row, path in enumerate(writes)},
        {path: branches[0] for path, branches in writes.items()},
        tuple(ends),
        np.array([index[path] for path in writes]),
        np.array([len(path) for path in writes]),
        np.array([1 + len(leaf) for leaf in leaves], np.int32),
        padded[:, None],
        idle[:, None],
    )


@functools.lru_cache(maxsize=256)
def _fixed(ends: tuple[int, ...], num_trees: int) -> dict[str, NDArray[Any]]:
    """Return the read-only arrays of a step that do not depend on tokens or positions."""
    num_nodes = ends[-1]
    fixed = {
        "pending": np.full(num_trees * num_nodes, NOT_PENDING),
        "logits_to_keep": np.arange(num_trees * num_nodes),
        "cu_seqlens": np.array([0, *(num_nodes * tree + end for tree in range(num_trees) for end in ends)], np.int32),
        "state_slots": np.full(num_trees * len(ends), NO_SLOT, np.int32),  # drafting models have no recurrent state
    }
    return read_only(fixed)
