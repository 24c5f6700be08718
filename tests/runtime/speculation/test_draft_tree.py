"""Trees of drafts: shapes, relatives, and growth by probability."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.block_pool import BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree, require_shape
from detcompile.runtime.speculation.growing_tree import GrowingTree
from detcompile.runtime.speculation.speculator import SpeculationConfig, Speculator
from detcompile.runtime.speculation.statistics import DraftStatistics, expected_tokens
from detcompile.runtime.speculation.tree_verification import tree_arrays
from detcompile.runtime.step.block_tables import BlockTables
from detcompile.runtime.step.builder import StepEntry, joined
from detcompile.step import KVGroup

SHAPE = [(0,), (0, 0), (0, 1), (1,), (0, 0, 0)]


def test_a_tree_cannot_be_written_after_it_is_made():
    given = {(0,): 5}
    tree = DraftTree(given)
    given[1,] = 6
    for tokens in (tree.tokens, tree.distributions):
        with pytest.raises(TypeError, match="does not support item assignment"):
            tokens[0,] = 7
    assert tree.tokens == {(0,): 5}


def test_a_tree_of_a_shape_knows_its_relatives():
    tree = DraftTree.of(SHAPE, [5, 6, 7, 8, 9])
    assert tree.along((0, 0, 0)) == [5, 6, 9]
    assert tree.children(()) == [(0,), (1,)] and tree.children((0,)) == [(0, 0), (0, 1)] and tree.children((1,)) == []
    assert tree.branches() == [(0, 0, 0), (0, 1), (1,)]
    assert tree.only([(0,), (0, 1)]).tokens == {(0,): 5, (0, 1): 7}


@pytest.mark.parametrize("shape", [[], [(0, 0)], [()], [(0,), (0,)], [(-1,)], [(0,), (1, 0)]])
def test_invalid_tree_shape_is_rejected(shape):
    with pytest.raises(InvalidInput, match="draft"):
        require_shape(shape)


chances = st.lists(st.floats(0.0, 1.0, width=16), min_size=1, max_size=3)


@given(table=st.lists(chances, min_size=1, max_size=30), max_nodes=st.integers(1, 9), depth=st.integers(1, 4))
def test_a_grown_tree_holds_the_likeliest_paths(table, max_nodes, depth):
    """Beside all paths of a small tree, weighed and sorted; the width is not what limits it."""

    def candidates(path):
        return [(index, p) for index, p in enumerate(sorted(table[hash(path) % len(table)], reverse=True))]

    growing, whole = GrowingTree(max_nodes, width=100), {(): 1.0}
    for level in range(depth):
        growing.expand([(path, candidates(path)) for path in growing.frontier()])
        for path in [path for path in whole if len(path) == level]:
            whole |= {(*path, token): whole[path] * p for token, p in candidates(path)}
    del whole[()]
    best = sorted(whole, key=lambda path: (-whole[path], len(path), path))[:max_nodes]
    tree = growing.tree()
    assert set(tree.tokens) == set(best)
    assert all(tree.along(path) == list(path) for path in tree.tokens)


def test_a_grown_tree_expands_no_more_than_its_width():
    growing = GrowingTree(10, width=2)
    assert growing.frontier() == [()]
    growing.expand([((), [(7, 0.5), (8, 0.3), (9, 0.2)])])
    assert growing.frontier() == [(0,), (1,)] and growing.along((1,)) == [8]
    with pytest.raises(InvalidInput, match="within 0 and 1"):
        growing.expand([((0,), [(1, float("nan"))])])
    with pytest.raises(InvalidInput, match="at least 1"):
        GrowingTree(0, 1)


class Fixed:
    """Proposes one tree."""

    def __init__(self, tree):
        self.tree = tree

    def propose(self, sequences, max_depth):
        return [self.tree for _ in sequences]

    def forget(self, sequence):
        pass


def test_each_node_stands_at_its_logical_position_in_the_blocks_of_each_branch():
    blocks = KVBlocks(BlockPool(20, 16), [KVGroup((0,), 0)], prefix_caching=False)
    sequence = Sequence(list(range(18)), max_length=100)
    assert blocks.admit(sequence, 18) == 0
    sequence.num_computed = 18
    speculator = Speculator(SpeculationConfig(drafter=Fixed(DraftTree.of(SHAPE, [5, 6, 7, 8, 9]))), blocks, 100)
    verification = speculator.draft([StepEntry(sequence, 17, 1)], 100)[sequence]
    head, item = sequence.block_tables[0]
    (second,), (third,) = verification.forked[0].tolist()
    assert len({head, item, second, third}) == 4, "each branch has a block of its own"
    arrays = tree_arrays([verification], [np.array([[[head, item, 7]]], np.int32)], 16)
    assert list(verification.layout.rows) == [(), (0,), (0, 0), (0, 0, 0), (0, 1), (1,)], "each node once"
    assert arrays.input_ids.tolist() == [17, 5, 6, 9, 7, 8]
    assert arrays.position_ids.tolist() == [17, 18, 19, 20, 19, 18]
    assert arrays.logits_to_keep.tolist() == list(range(6))
    assert arrays.cu_seqlens.tolist() == [0, 4, 5, 6] and arrays.seq_lens.tolist() == [21, 20, 19]
    assert arrays.block_tables[0, :, :2].tolist() == [[head, item], [head, second], [head, third]]
    place = [item * 16 + 1, item * 16 + 2, item * 16 + 3, item * 16 + 4, second * 16 + 3, third * 16 + 2]
    assert arrays.slot_mappings[0].tolist() == [
        place,
        [second * 16 + 1, second * 16 + 2, -1, -1, -1, -1],
        [third * 16 + 1, -1, -1, -1, -1, -1],
    ]
    assert arrays.block_copies.tolist() == [[item, item], [second, third], [1, 1]], "token 16 is before the root"
    speculator.commit(verification, (0, 1), cut=False)
    assert sequence.block_tables[0] == [head, second], "the winner's block is taken over"
    blocks.release(sequence)
    assert blocks.pool.num_free == blocks.pool.num_usable


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    shape=st.sampled_from([SHAPE, [(0,), (0, 0)], [(0,), (1,), (2,)]]),
)
def test_batched_trees_equal_single_trees(lengths, shape):
    groups = [KVGroup((0,), 0), KVGroup((1,), 20)]
    blocks = KVBlocks(BlockPool(200, 16, torch.Generator().manual_seed(0)), groups, prefix_caching=False)
    sequences = [Sequence(list(range(length)), max_length=100) for length in lengths]
    for sequence in sequences:
        assert blocks.admit(sequence, sequence.num_tokens) == 0
        sequence.num_computed = sequence.num_tokens
    speculator = Speculator(
        SpeculationConfig(drafter=Fixed(DraftTree.of(shape, range(30, 30 + len(shape))))), blocks, 100
    )
    entries = [StepEntry(sequence, sequence.num_tokens - 1, 1) for sequence in sequences]
    trees = list(speculator.draft(entries, 100).values())
    assert len(trees) == len(sequences)
    tables = BlockTables(len(groups), len(sequences), 7)
    together = tree_arrays(trees, [tables.row(sequence, 7) for sequence in sequences], 16)._asdict()
    alone = joined([tree_arrays([tree], [tables.row(tree.sequence, 7)], 16) for tree in trees])._asdict()
    positions = [tree.start + depth for tree in trees for depth in tree.layout.depths]
    assert together["position_ids"].tolist() == positions
    copies = [sorted(zip(*arrays.pop("block_copies").tolist())) for arrays in (together, alone)]
    assert copies[0] == copies[1], "in another order"
    assert not {target for _, target, _ in copies[0]} & {source for source, _, _ in copies[0]}
    for name, one in together.items():
        assert one.dtype == alone[name].dtype and one.shape == alone[name].shape, name
        assert (one == alone[name]).all(), name


@given(rate=st.floats(0.0, 1.0), depth=st.integers(0, 8))
def test_expected_tokens_sum_acceptance_chances(rate, depth):
    assert expected_tokens(rate, depth) == pytest.approx(sum(rate**n for n in range(depth + 1)))


def test_statistics_of_drafts():
    statistics = DraftStatistics()
    assert (statistics.acceptance_rate, statistics.tokens_per_step, statistics.expected_tokens_per_step) == (0, 1, 1)
    for accepted, rejected in ((5, False), (2, True), (0, True), (3, False)):  # the last was cut by a stop
        statistics.add(5, 5, accepted, rejected=rejected)
    assert statistics.acceptance_rate == 10 / 12
    assert statistics.tokens_per_step == 3.5
    assert statistics.expected_tokens_per_step == pytest.approx(expected_tokens(10 / 12, 5))
