"""A dense call's step is the one that ``build_arrays`` packs, with no slot used twice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.dense.padded_batch import check_batch, dense_step, keep_columns, unpad
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import StepArrays, StepEntry, build_arrays

LENGTHS = st.lists(st.sampled_from([1, 2, 5, 63, 64, 65, 128, 130]), min_size=1, max_size=6)


def padded(lengths, own_positions):
    """Rows of these lengths, padded on the left."""
    width = max(lengths)
    input_ids = torch.randint(0, 100, (len(lengths), width))
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    positions = torch.randint(0, 500, (len(lengths), 1)) + torch.arange(width) if own_positions else None
    return input_ids, unpad(input_ids, mask, positions), positions


@given(lengths=LENGTHS, num_groups=st.integers(1, 3), own_positions=st.booleans())
def test_dense_step_equals_build_arrays(lengths, num_groups, own_positions):
    input_ids, batch, positions = padded(lengths, own_positions)
    rows, _ = keep_columns(batch.mask, 0)
    arrays, num_blocks = dense_step(batch, num_groups, rows)
    sequences = [Sequence(input_ids[row, -n:].tolist(), state_slot=row) for row, n in enumerate(lengths)]
    entries = [StepEntry(sequence, 0, len(sequence.token_ids)) for sequence in sequences]
    expected = build_arrays(entries, arrays.block_tables, BLOCK_SIZE, {})._replace(logits_to_keep=rows)
    if positions is not None:
        item = [positions[row, -n:].numpy() for row, n in enumerate(lengths)]
        expected = expected._replace(position_ids=np.concatenate(item))
    for name, mine, theirs in zip(StepArrays._fields, arrays, expected):
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), name
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    taken = [table[row, :count] for table in arrays.block_tables for row, count in enumerate(counts)]
    blocks = np.concatenate(taken)
    assert sorted(blocks) == list(range(1, num_blocks)), "each block once, and none that is not there"
    rest = [table[row, count:] for table in arrays.block_tables for row, count in enumerate(counts)]
    assert not np.concatenate(rest).any(), "behind a sequence's blocks stands none"
    assert len(np.unique(arrays.slot_mappings)) == num_groups * sum(lengths)


@pytest.mark.parametrize(
    ("row", "column", "token", "words"),
    [(0, 2, 100, "row 0 holds token 100"), (1, 1, -1, "row 1 holds token -1"), (1, 0, 100, None), (2, 0, 100, "row 2")],
)
def test_the_row_of_a_wrong_token_is_named(row, column, token, words):
    """And what stands at padding does not matter."""
    input_ids = torch.zeros(3, 3, dtype=torch.int64)
    input_ids[row, column] = token
    batch = unpad(input_ids, torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0]]))
    if words is None:
        check_batch(batch, vocab_size=100, max_context=3)
        return
    with pytest.raises(InvalidInput, match=words):
        check_batch(batch, vocab_size=100, max_context=3)


def test_rows_and_positions_beyond_the_context_are_refused():
    batch = unpad(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 0, 0], [1, 1, 1]]))
    check_batch(batch, vocab_size=1, max_context=4, max_new_tokens=1)
    with pytest.raises(InvalidInput, match="row 1 needs 5 tokens"):
        check_batch(batch, vocab_size=1, max_context=4, max_new_tokens=2)
    far = unpad(torch.zeros(1, 2, dtype=torch.int64), position_ids=torch.tensor([[3, 4]]))
    with pytest.raises(InvalidInput, match="position 4"):
        check_batch(far, vocab_size=1, max_context=4)
