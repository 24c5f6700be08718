"""build_step agrees with a slow construction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.block_pool import BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.block_tables import BlockTables
from detcompile.runtime.step.builder import (
    NOT_PENDING,
    StepEntry,
    block_tables,
    build_arrays,
    build_step,
    joined,
    pending_arrays,
)
from detcompile.step import KVGroup


def make_blocks(num_usable=24, block_size=16, order=None, num_groups=1):
    groups = [KVGroup((layer,), 0) for layer in range(num_groups)]
    return KVBlocks(BlockPool(num_usable + 1, block_size, order), groups, prefix_caching=False)


@st.composite
def plans(draw):
    """Rounds of (sequence index, n) until every sequence is computed, and the prompts."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 40]), min_size=1, max_size=5))
    left, rounds = dict(enumerate(lengths)), []
    while left:
        chosen = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        rounds.append([(index, draw(st.integers(1, left[index]))) for index in chosen])
        for index, n in rounds[-1]:
            left[index] -= n
            if left[index] == 0:
                del left[index]
    return lengths, rounds


@given(
    plan=plans(),
    block_size=st.sampled_from([16, 32]),
    order=st.randoms(),
    all_logits=st.booleans(),
    num_groups=st.integers(1, 2),
)
def test_arrays_equal_slow_construction(plan, block_size, order, all_logits, num_groups):
    lengths, rounds = plan
    placement = list(range(1, 49))
    order.shuffle(placement)
    blocks = make_blocks(48, block_size, placement, num_groups)
    sequences = [Sequence([1000 * i + t for t in range(n)]) for i, n in enumerate(lengths)]
    content = {}  # slot -> the group and the token whose key stands there
    for this_round in rounds:
        step = build_step([(sequences[i], n) for i, n in this_round], blocks, all_logits)
        row, last_rows = 0, []
        for place, (i, n) in enumerate(this_round):
            assert step.cu_seqlens[place] == row
            for t in range(sequences[i].num_computed, sequences[i].num_computed + n):
                assert step.input_ids[row] == 1000 * i + t
                assert step.position_ids[row] == t
                for group in range(num_groups):
                    slot = step.slot_mappings[group, 0, row]
                    assert slot not in content, "a slot with a live key is written again"
                    content[slot] = (group, 1000 * i + t)
                row += 1
            last_rows.append(row - 1)
            sequences[i].num_computed += n
            assert step.seq_lens[place] == sequences[i].num_computed
            for p in range(sequences[i].num_computed):
                for group in range(num_groups):
                    block = step.block_tables[group, place, p // block_size]
                    assert content[block * block_size + p % block_size] == (group, 1000 * i + p)
        assert step.cu_seqlens[-1] == row == len(step.input_ids) == step.slot_mappings.shape[2]
        assert step.logits_to_keep.tolist() == (list(range(row)) if all_logits else last_rows)
        assert (step.pending == NOT_PENDING).all()
    blocks.check(s for s in sequences if s.block_tables)
    for sequence, length in zip(sequences, lengths):
        assert [len(table) for table in sequence.block_tables] == [blocks.pool.blocks_for(length)] * num_groups
        blocks.release(sequence)
    assert blocks.pool.num_free == 48


def test_dtypes_and_shapes_are_those_of_step_arrays():
    step = build_step([(Sequence([1] * 20), 20), (Sequence([2]), 1)], make_blocks())
    for array, dtype, shape in [
        (step.input_ids, np.int64, (21,)),
        (step.position_ids, np.int64, (21,)),
        (step.pending, np.int64, (21,)),
        (step.logits_to_keep, np.int64, (2,)),
        (step.slot_mappings, np.int64, (1, 1, 21)),
        (step.cu_seqlens, np.int32, (3,)),
        (step.seq_lens, np.int32, (2,)),
        (step.block_tables, np.int32, (1, 2, 2)),
    ]:
        assert (array.dtype, array.shape) == (dtype, shape)


def test_a_full_cache_changes_no_sequence():
    blocks = make_blocks(2)
    sequences = [Sequence([1] * 16), Sequence([2] * 17)]
    with pytest.raises(InvalidInput, match=r"3 blocks .* 2 of 2 free"):
        build_step([(s, len(s.token_ids)) for s in sequences], blocks)
    assert all(s.block_tables == [] for s in sequences)
    assert blocks.pool.num_free == 2


def test_plans_that_cannot_be_are_refused():
    blocks, sequence = make_blocks(), Sequence([1, 2])
    for plan, words in [
        ([], "at least one"),
        ([(sequence, 0)], "step of 0"),
        ([(sequence, 3)], "2 tokens left"),
        ([(sequence, 1), (sequence, 1)], "twice"),
    ]:
        with pytest.raises(InvalidInput, match=words):
            build_step(plan, blocks)


def test_a_pending_token_points_at_the_row_that_drew_it():
    known, waiting = Sequence([1, 2, 3]), Sequence([4, 5])
    waiting.num_pending = 1
    entries = [StepEntry(known, 1, 2), StepEntry(waiting, 2, 1)]
    step = build_arrays(entries, np.array([[[1], [2]]], np.int32), 16, {waiting: 7})
    assert step.input_ids[:2].tolist() == [2, 3]
    assert step.pending.tolist() == [NOT_PENDING, NOT_PENDING, 7]
    assert step.position_ids.tolist() == [1, 2, 2]
    assert step.slot_mappings.tolist() == [[[17, 18, 34]]]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), num_parts=st.integers(1, 3))
def test_joined_parts_equal_one_step(lengths, num_parts):
    sequences = [Sequence(list(range(length))) for length in lengths]
    blocks = make_blocks()
    whole = build_step([(sequence, len(sequence.token_ids)) for sequence in sequences], blocks)
    size = -(-len(sequences) // num_parts)
    parts = [
        build_arrays(
            [StepEntry(sequence, 0, len(sequence.token_ids)) for sequence in some], block_tables(some, 1), 16, {}
        )
        for some in (sequences[start : start + size] for start in range(0, len(sequences), size))
    ]
    for name, one, other in zip(whole._fields, whole, joined(parts)):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all(), name


def test_parts_whose_tokens_have_fewer_copies_write_them_nowhere_else():
    chain = build_step([(Sequence([1, 2]), 2)], make_blocks())
    slots = np.array([[[5, 6], [7, -1]]])
    tree = chain._replace(slot_mappings=slots, block_copies=np.array([[3], [4], [5]]))
    actual = joined([chain, tree])
    assert actual.slot_mappings.tolist() == [[[16, 17, 5, 6], [-1, -1, 7, -1]]]
    assert actual.block_copies.tolist() == [[3], [4], [5]] and actual.logits_to_keep.tolist() == [1, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=30))
def test_block_tables_follow_their_sequences(events):
    """Sequences that come, grow, change their last blocks and go keep their own rows."""
    tables, sequences, fresh = BlockTables(2, 4, 100), {}, iter(range(1, 10_000))
    for name, growth, changes, leaves in events:
        sequence = sequences.setdefault(name, Sequence([1]))
        sequence.block_tables = sequence.block_tables or [[], []]
        kept = max(0, len(sequence.block_tables[0]) - changes)
        tables.changed(sequence, kept)
        for table in sequence.block_tables:
            table[kept:] = [next(fresh) for _ in range(len(table) - kept + growth)]
        if leaves:
            tables.remove(sequences.pop(name))
            continue
        rows = tables.rows(list(sequences.values()), 100)
        for row, other in enumerate(sequences.values()):
            for group, table in enumerate(other.block_tables):
                assert rows[group, row, : len(table)].tolist() == table
                assert tables.row(other, 100)[group, 0, : len(table)].tolist() == table


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), num_steps=st.integers(1, 4))
def test_pending_steps_equal_build_arrays(lengths, num_steps):
    tables = np.arange(2 * len(lengths) * 5, dtype=np.int32).reshape(2, len(lengths), 5)
    pending = [7 + row for row in range(len(lengths))]
    steps = pending_arrays(lengths + np.arange(num_steps)[:, None], pending, tables, 16)
    assert len(steps) == num_steps
    for step, actual in enumerate(steps):
        sequences = [Sequence([1] * (n + step), num_computed=n + step, num_pending=1) for n in lengths]
        entries = [StepEntry(sequence, sequence.num_computed, 1) for sequence in sequences]
        expected = build_arrays(entries, tables, 16, dict(zip(sequences, pending)))
        for name, one, other in zip(expected._fields, expected, actual):
            assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all(), name
