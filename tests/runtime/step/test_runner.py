"""Padding a step to a layout changes no bit of its logits and no byte of the cache.

The forward here is a one-layer model whose attention reads StepInputs token by token, in float64 and in a loop: every
token's arithmetic is its own, so that only wrong metadata can change a bit. Graphs are test_runner_graphs.py's.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.kv_cache import KVCache, KVShape
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import NOT_PENDING, StepArrays, StepEntry, build_arrays, build_step
from detcompile.runtime.step.layout import StepBuffer, StepLayout, host_tensors
from detcompile.runtime.step.runner import Runner
from detcompile.step import PADDING_SLOT, KVGroup, kv_groups
from tests.bits import assert_bitwise_equal
from tests.runtime.step.runner_cases import BLOCK_SIZE, ONE_GROUP, VOCAB_SIZE, forward, make_blocks, make_cache


def run_in(layout, arrays, cache):
    """The forward of a step in a buffer of this layout."""
    runner = Runner(forward, cache, cuda_graphs=False)
    buffer = StepBuffer(layout, torch.device("cpu"))
    buffer.fill(arrays)
    return runner._forward(buffer.tensors())


@st.composite
def steps(draw):
    """A step of a few sequences, some of whose keys are in the cache already."""
    placement = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    cache, blocks = make_cache(), make_blocks(order=placement)
    runner, plan = Runner(forward, cache, cuda_graphs=False), []
    for _ in range(draw(st.integers(1, 4))):
        num_cached, n = draw(st.sampled_from([0, 1, 15, 16, 17, 30])), draw(st.sampled_from([1, 1, 1, 2, 5]))
        tokens = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(num_cached + n)]
        sequence = Sequence(tokens)
        if num_cached:
            runner.run(build_step([(sequence, num_cached)], blocks))
            sequence.num_computed = num_cached
        plan.append((sequence, n))
    return cache, build_step(plan, blocks, all_logits=draw(st.booleans()))


MORE = st.tuples(*[st.integers(0, 9)] * 3, st.integers(0, 5), st.integers(0, 2))


def padded_layout(arrays, more):
    exact = StepLayout.of(arrays)
    return StepLayout(*(size + extra for size, extra in zip(exact[:4], more)), exact.groups, exact.copies + more[4])


@given(case=steps(), more=MORE)
def test_padding_changes_no_bit(case, more):
    cache, arrays = case
    other = make_cache()
    for mine, theirs in zip(other.k_caches + other.v_caches, cache.k_caches + cache.v_caches):
        mine.copy_(theirs)
    expected = run_in(StepLayout.of(arrays), arrays, cache)
    logits = run_in(padded_layout(arrays, more), arrays, other)
    assert_bitwise_equal(logits[: len(expected)], expected)
    assert_bitwise_equal(other.k_caches[0], cache.k_caches[0])
    assert_bitwise_equal(other.v_caches[0], cache.v_caches[0])


@given(case=steps(), more=MORE)
def test_the_content_of_a_padded_step(case, more):
    _, arrays = case
    layout = padded_layout(arrays, more)
    buffer = StepBuffer(layout, torch.device("cpu"))
    buffer.bytes.fill_(0x5A)  # whatever stood there before
    buffer.fill(arrays)
    actual = buffer.tensors()
    num_tokens, num_sequences = len(arrays.input_ids), len(arrays.seq_lens)
    assert (actual["slot_mappings"][:, :, num_tokens:] == PADDING_SLOT).all()
    assert (actual["pending"][num_tokens:] == NOT_PENDING).all()
    assert (actual["cu_seqlens"][num_sequences:] == num_tokens).all()
    assert (actual["seq_lens"][num_sequences:] == 0).all()
    assert (actual["block_copies"][2] == 0).all(), "no tokens are copied"
    for (name, (dtype, shape)), given_array in zip(layout.fields().items(), arrays):
        tensor = actual[name]
        assert tensor.shape == shape and tensor.numpy().dtype == dtype
        assert (tensor.numpy()[tuple(slice(0, size) for size in given_array.shape)] == given_array).all()


@given(first=steps(), second=steps(), more=MORE, shared=st.booleans())
def test_refilled_buffer_holds_new_step(first, second, more, shared):
    """Also where its arrays are those of the step before: read-only ones stay, others may have changed in place."""
    before = first[1]
    arrays = before if shared else second[1]
    before.pending.setflags(write=False)
    layout = StepLayout(*map(max, padded_layout(before, more), padded_layout(arrays, more)))
    buffer, fresh = (StepBuffer(layout, torch.device("cpu")) for _ in range(2))
    buffer.fill(before)
    arrays.input_ids[...] += 1
    buffer.fill(arrays, before)
    fresh.fill(arrays)
    for name, tensor in buffer.tensors().items():
        assert_bitwise_equal(tensor, fresh.tensors()[name], name)


@pytest.mark.parametrize("wrong", ["slot", "cu_seqlens"])
def test_wrong_padding_is_seen(wrong):
    """The tests above would fail had the padding written to a slot, or had it lengthened the last sequence."""
    cache = make_cache(0.0)
    arrays = build_step([(Sequence([3, 4, 5]), 3)], make_blocks(), all_logits=True)
    expected = run_in(StepLayout.of(arrays), arrays, cache)
    runner = Runner(forward, cache, cuda_graphs=False)
    buffer = StepBuffer(StepLayout(4, 1, 3, 1, 1), torch.device("cpu"))
    buffer.fill(arrays)
    if wrong == "slot":
        buffer.tensors()["slot_mappings"][0, 0, 3] = arrays.slot_mappings[0, 0, 0]
    else:
        buffer.tensors()["cu_seqlens"][1:] = 4
    assert not torch.equal(runner._forward(buffer.tensors())[:3], expected)


@given(
    case=steps(), kinds=st.tuples(*[st.tuples(st.booleans(), st.booleans(), st.booleans())] * len(StepArrays._fields))
)
def test_a_step_on_the_host_needs_no_buffer(case, kinds):
    """Arrays of any integers, contiguous or not, to be written or not: the step is as in a buffer of its layout."""
    cache, arrays = case
    spread = []
    for array, (wide, apart, writeable) in zip(arrays, kinds):
        array = array.astype(np.int64) if wide else array.copy()
        spread.append(np.stack([array, array], axis=-1)[..., 0] if apart else array)
        spread[-1].setflags(write=writeable)
    buffer = StepBuffer(StepLayout.of(arrays), torch.device("cpu"))
    buffer.fill(arrays)
    actual, expected = host_tensors(StepArrays(*spread)), buffer.tensors()
    assert actual.keys() == expected.keys()
    for (name, tensor), array in zip(actual.items(), spread):
        assert tensor.is_contiguous()
        as_it_is = array.flags.c_contiguous and array.flags.writeable and array.dtype == tensor.numpy().dtype
        assert not array.size or np.shares_memory(tensor.numpy(), array) == as_it_is
        assert_bitwise_equal(tensor, expected[name], name)
    assert_bitwise_equal(
        Runner(forward, cache, cuda_graphs=False).run(StepArrays(*spread)), run_in(StepLayout.of(arrays), arrays, cache)
    )


def test_pending_token_is_read_from_last_step():
    caches, logits = [make_cache(), make_cache()], []
    for cache, tokens in zip(caches, ([5, 9], [5])):
        sequence, runner = Sequence(tokens), Runner(forward, cache, cuda_graphs=False)
        if len(tokens) == 1:
            sequence.num_pending = 1
            runner.sampled[3] = 9
        tables = np.array([[[2]]], np.int32)
        logits.append(runner.run(build_arrays([StepEntry(sequence, 0, 2)], tables, BLOCK_SIZE, {sequence: 3})))
    assert_bitwise_equal(logits[1], logits[0])
    assert_bitwise_equal(caches[1].k_caches[0][2], caches[0].k_caches[0][2])


def test_graphs_without_a_gpu_are_refused():
    with pytest.raises(InvalidInput, match="GPU"):
        Runner(forward, make_cache(), cuda_graphs=True)


def test_cache_shapes():
    shapes = [KVShape(2, 8, 4), KVShape(1, 6, 6)]
    cache = KVCache(shapes, [KVGroup((0, 1), 0)], dtype=torch.bfloat16, device="cpu", num_blocks=3, block_size=32)
    assert [tuple(t.shape) for t in cache.k_caches] == [(3, 32, 2, 8), (3, 32, 1, 6)]
    assert [tuple(t.shape) for t in cache.v_caches] == [(3, 32, 2, 4), (3, 32, 1, 6)]
    assert {t.dtype for t in cache.k_caches + cache.v_caches} == {torch.bfloat16}
    assert KVCache.bytes_per_block(shapes, [KVGroup((0, 1), 0)], torch.bfloat16, 32) == 2 * 32 * (24 + 12)
    for num_blocks, block_size, words in [(0, 16, "num_blocks"), (1, 8, "multiple of 16")]:
        with pytest.raises(InvalidInput, match=words):
            KVCache([], ONE_GROUP, dtype=torch.float32, device="cpu", num_blocks=num_blocks, block_size=block_size)


def test_groups_share_their_tensors_layer_by_layer():
    windows = [70, 70, 0, 70, 70, 70, 0]
    groups = kv_groups(windows, [(1, 2, 2)] * 7)
    assert groups == (KVGroup((0, 1), 70), KVGroup((3, 4), 70), KVGroup((5,), 70), KVGroup((2, 6), 0))
    cache = KVCache([KVShape(1, 2, 2)] * 7, groups, dtype=torch.float32, device="cpu", num_blocks=4, block_size=16)
    places = [tensor.data_ptr() for tensor in cache.k_caches]
    assert len(set(places)) == 2
    for group in groups:
        assert len({places[layer] for layer in group.layers}) == len(group.layers), "two layers of a group share keys"
    assert KVCache.bytes_per_block([KVShape(1, 2, 2)] * 7, groups, torch.float32, 16) == 2 * 16 * 4 * 4


def test_layers_that_cannot_share_form_one_group_without_a_window():
    assert kv_groups([70, 0], [(1, 2, 2), (1, 4, 4)]) == (KVGroup((0, 1), 0),)
    assert kv_groups([70, 70], [(1, 2, 2), (1, 4, 4)]) == (KVGroup((0, 1), 70),)
