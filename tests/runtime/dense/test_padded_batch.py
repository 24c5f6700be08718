"""unpad and repad are inverse to padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.dense.padded_batch import keep_columns, repad, unpad
from tests.bits import assert_bitwise_equal


@st.composite
def padded_batches(draw):
    """Rows of tokens, and the same rows padded on both sides."""
    length = draw(st.integers(1, 12))
    rows, starts = [], []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, length - 1))
        rows.append(draw(st.lists(st.integers(0, 99), min_size=1, max_size=length - start)))
        starts.append(start)
    input_ids = torch.full((len(rows), length), draw(st.integers(0, 99)))
    mask = torch.zeros(len(rows), length, dtype=draw(st.sampled_from([torch.int64, torch.bool, torch.float32])))
    for row, (start, tokens) in enumerate(zip(starts, rows)):
        input_ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        mask[row, start : start + len(tokens)] = 1
    return rows, starts, input_ids, mask


@given(padded_batches())
def test_unpad_finds_the_rows_and_repad_puts_them_back(batch):
    rows, starts, input_ids, mask = batch
    unpadded = unpad(input_ids, mask)
    assert unpadded.rows() == rows
    assert unpadded.position_ids.tolist() == [position for row in rows for position in range(len(row))]
    logits = torch.randn(sum(map(len, rows)), 3)
    padded, packed_row = repad(logits, unpadded.mask), 0
    for row, start in enumerate(starts):
        for column in range(input_ids.shape[1]):
            inside = start <= column < start + len(rows[row])
            expected = logits[packed_row] if inside else torch.zeros(3)
            assert_bitwise_equal(padded[row, column], expected)
            packed_row += inside


@given(padded_batches(), st.integers(0, 12))
def test_keep_columns_is_a_slice_of_everything(batch, num_last):
    rows, _, input_ids, mask = batch
    unpadded = unpad(input_ids, mask)
    logits = torch.randn(sum(map(len, rows)), 2)
    index, kept = keep_columns(unpadded.mask, num_last)
    assert_bitwise_equal(repad(logits[index], kept), repad(logits, unpadded.mask)[:, -num_last:])
    columns = torch.tensor([0, input_ids.shape[1] - 1])
    index, kept = keep_columns(unpadded.mask, columns)
    assert_bitwise_equal(repad(logits[index], kept), repad(logits, unpadded.mask)[:, columns])


def test_no_mask_means_no_padding():
    unpadded = unpad(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    assert unpadded.rows() == [[1, 2], [3, 4]]
    assert unpadded.position_ids.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("positions", [[[9, 5, 6], [3, 4, 4]], [[7, 8, 9]]])
def test_explicit_positions_win(positions):
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    unpadded = unpad(torch.zeros(2, 3, dtype=torch.long), mask, torch.tensor(positions))
    assert unpadded.position_ids.tolist() == [*positions[0][1:], *positions[-1][:2]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_mask": [[1, 0, 1]]}, "row 0 .* between two tokens"),
        ({"attention_mask": [[0, 0, 0]]}, "row 0 .* all padding"),
        ({"attention_mask": [[0, 2, 1]]}, "zeros .* and ones"),
        ({"attention_mask": [[0.0, float("nan"), 1.0]]}, "zeros .* and ones"),
        ({"attention_mask": [[1, 1]]}, "shape of input_ids"),
        ({"position_ids": [[0, 1]]}, "position_ids must be integers"),
        ({"position_ids": [[0.0, 1.0, 2.0]]}, "position_ids must be integers"),
        ({"position_ids": [[-1, 0, 1]]}, "negative"),
        ({"position_ids": [[0, 1, 0]]}, "row 0 go from 1 to 0 at column 2"),  # packed texts
        ({"position_ids": [[0, 0, 1]]}, "from 0 to 0 at column 1"),
        ({"position_ids": [[5, 4, 3]]}, "from 5 to 4 at column 1"),
        ({"position_ids": [[0, 1, 7]]}, "from 1 to 7 at column 2"),
        ({"position_ids": [[0, 1, 0]], "attention_mask": [[1, 1, 1]]}, "several packed texts"),
    ],
)
def test_masks_and_positions_that_mean_nothing_are_refused(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        unpad(torch.tensor([[1, 2, 3]]), **{name: torch.tensor(value) for name, value in arguments.items()})


@given(padded_batches(), st.data())
def test_texts_packed_into_one_row_are_refused(batch, data):
    """Wherever the second text begins, at whatever position, with a mask and beside other rows."""
    rows, starts, input_ids, mask = batch
    positions = mask.long().cumsum(1) - 1 + data.draw(st.integers(0, 9))
    positions[mask == 0] = data.draw(st.integers(-1, 9))  # what stands at padding does not matter
    unpad(input_ids, mask, positions)
    row = data.draw(st.integers(0, len(rows) - 1))
    if len(rows[row]) > 1:
        cut = starts[row] + data.draw(st.integers(1, len(rows[row]) - 1))
        shift = data.draw(st.integers(-int(positions[row, cut]), 9).filter(bool))
        positions[row, cut : starts[row] + len(rows[row])] += shift
        with pytest.raises(InvalidInput, match=rf"row {row} go from \d+ to \d+ at column {cut}"):
            unpad(input_ids, mask, positions)


@pytest.mark.parametrize("input_ids", [torch.zeros(3).long(), torch.zeros(1, 3), torch.zeros(1, 0).long()])
def test_inputs_that_are_no_batch_are_refused(input_ids):
    with pytest.raises(InvalidInput, match="input_ids"):
        unpad(input_ids)


def test_repad_counts_its_rows():
    with pytest.raises(InvalidInput, match="2 rows of logits for 3 tokens"):
        repad(torch.zeros(2, 5), np.ones((1, 3), np.bool_))
