"""build_step puts every token where a slow construction puts it; unpad and repad are inverse to padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.block_pool import BlockPool
from detcompile.runtime.runner import KVCache, KVShape
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import build_step, keep_columns, repad, unpad
from tests.bits import assert_bitwise_equal


def make_cache(num_blocks=24, block_size=16):
    return KVCache(
        [KVShape(1, 2, 3)] * 2, dtype=torch.float32, device="cpu", num_blocks=num_blocks, block_size=block_size
    )


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


@given(plan=plans(), block_size=st.sampled_from([16, 32]), order=st.randoms(), all_logits=st.booleans())
def test_every_token_is_where_the_slow_construction_puts_it(plan, block_size, order, all_logits):
    lengths, rounds = plan
    placement = list(range(24))
    order.shuffle(placement)
    pool, cache = BlockPool(24, block_size, placement), make_cache(24, block_size)
    sequences = [Sequence([1000 * i + t for t in range(n)]) for i, n in enumerate(lengths)]
    sequences[0].position_ids = [7 * t for t in range(lengths[0])]
    content = {}  # slot -> the token whose key stands there
    for this_round in rounds:
        packed = build_step([(sequences[i], n) for i, n in this_round], pool, cache, "cpu", all_logits)
        step, row = packed.step, 0
        assert step.k_caches is cache.k_caches and step.v_caches is cache.v_caches
        last_rows = []
        for place, (i, n) in enumerate(this_round):
            assert step.cu_seqlens[place].item() == row
            for t in range(sequences[i].num_computed, sequences[i].num_computed + n):
                assert packed.input_ids[0, row].item() == 1000 * i + t
                assert packed.position_ids[0, row].item() == (7 * t if i == 0 else t)
                slot = step.slot_mapping[row].item()
                assert slot not in content, "a slot with a live key is written again"
                content[slot] = 1000 * i + t
                row += 1
            last_rows.append(row - 1)
            sequences[i].num_computed += n
            assert step.seq_lens[place].item() == sequences[i].num_computed
            for p in range(sequences[i].num_computed):
                block = step.block_table[place, p // block_size].item()
                assert content[block * block_size + p % block_size] == 1000 * i + p
        assert step.cu_seqlens.tolist()[-1] == row == packed.input_ids.shape[1] == len(step.slot_mapping)
        assert packed.logits_to_keep.tolist() == (list(range(row)) if all_logits else last_rows)
    for sequence, length in zip(sequences, lengths):
        assert len(sequence.block_table) == pool.blocks_for(length)
        pool.free(sequence.block_table)
    pool.check()
    assert pool.num_free == 24


def test_dtypes_and_shapes_are_those_of_step_inputs():
    sequences = [(Sequence([1] * 20), 20), (Sequence([2]), 1)]
    input_ids, position_ids, step, logits_to_keep = build_step(sequences, BlockPool(24, 16), make_cache(), "cpu")
    for tensor, dtype, shape in [
        (input_ids, torch.int64, (1, 21)),
        (position_ids, torch.int64, (1, 21)),
        (logits_to_keep, torch.int64, (2,)),
        (step.slot_mapping, torch.int64, (21,)),
        (step.cu_seqlens, torch.int32, (3,)),
        (step.seq_lens, torch.int32, (2,)),
        (step.block_table, torch.int32, (2, 2)),
    ]:
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)


def test_a_full_cache_changes_no_sequence():
    pool = BlockPool(2, 16)
    sequences = [Sequence([1] * 16), Sequence([2] * 17)]
    with pytest.raises(InvalidInput, match=r"3 blocks .* 2 of 2 free"):
        build_step([(s, len(s.token_ids)) for s in sequences], pool, make_cache(2), "cpu")
    assert all(s.block_table == [] for s in sequences)
    assert pool.num_free == 2


def test_plans_that_cannot_be_are_refused():
    pool, cache, sequence = BlockPool(24, 16), make_cache(), Sequence([1, 2])
    for plan, words in [
        ([], "at least one"),
        ([(sequence, 0)], "step of 0"),
        ([(sequence, 3)], "2 tokens left"),
        ([(sequence, 1), (sequence, 1)], "twice"),
    ]:
        with pytest.raises(InvalidInput, match=words):
            build_step(plan, pool, cache, "cpu")
    with pytest.raises(InvalidInput, match="make them alike"):
        build_step([(sequence, 1)], BlockPool(24, 32), cache, "cpu")


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
    assert unpadded.token_ids == rows
    assert unpadded.position_ids == [list(range(len(row))) for row in rows]
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
    assert unpadded.token_ids == [[1, 2], [3, 4]]
    assert unpadded.position_ids == [[0, 1], [0, 1]]


@pytest.mark.parametrize("positions", [[[9, 5, 7], [0, 2, 4]], [[9, 5, 7]]])
def test_explicit_positions_win(positions):
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    unpadded = unpad(torch.zeros(2, 3, dtype=torch.long), mask, torch.tensor(positions))
    assert unpadded.position_ids == [positions[0][1:], positions[-1][:2]]


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
    ],
)
def test_masks_and_positions_that_mean_nothing_are_refused(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        unpad(torch.tensor([[1, 2, 3]]), **{name: torch.tensor(value) for name, value in arguments.items()})


@pytest.mark.parametrize("input_ids", [torch.zeros(3).long(), torch.zeros(1, 3), torch.zeros(1, 0).long()])
def test_inputs_that_are_no_batch_are_refused(input_ids):
    with pytest.raises(InvalidInput, match="input_ids"):
        unpad(input_ids)


def test_repad_counts_its_rows():
    with pytest.raises(InvalidInput, match="2 rows of logits for 3 tokens"):
        repad(torch.zeros(2, 5), torch.ones(1, 3, dtype=torch.bool))
