"""Padding a step to a layout changes no bit of its logits and no byte of the cache.

The forward here is a one-layer model whose attention reads StepInputs token by token, in float64 and in a loop: every
token's arithmetic is its own, so that only wrong metadata can change a bit.
"""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime import runner as runner_module
from detcompile.runtime.block_pool import BlockPool
from detcompile.runtime.kv_blocks import KVBlocks
from detcompile.runtime.kv_cache import KVCache, KVShape
from detcompile.runtime.runner import MOST_VIEWS, Runner, _Staging
from detcompile.runtime.sampling import Sampler, likeliest
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import NOT_PENDING, StepEntry, build_arrays, build_step
from detcompile.runtime.step_layout import StepBuffer, StepLayout, table_widths
from detcompile.runtime.worker import Worker
from detcompile.step import PADDING_SLOT, KVGroup, kv_groups
from tests.bits import assert_bitwise_equal


def on_a_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")(test))


VOCAB_SIZE, DIM, NUM_BLOCKS, BLOCK_SIZE = 50, 4, 16, 16
GENERATOR = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(VOCAB_SIZE, DIM, dtype=torch.float64, generator=GENERATOR)
HEAD = torch.randn(DIM, 7, dtype=torch.float64, generator=GENERATOR)


def forward(input_ids, position_ids, step, logits_to_keep):
    """Causal attention of one head over the paged cache, then the head at ``logits_to_keep``."""
    hidden = EMBEDDING[input_ids[0]] + position_ids[0].unsqueeze(1) * 0.01
    keys = step.k_caches[0].view(-1, DIM)
    values = step.v_caches[0].view(-1, DIM)
    for t, slot in enumerate(step.slot_mappings[0].tolist()):
        if slot != PADDING_SLOT:
            keys[slot], values[slot] = hidden[t % len(hidden)], -hidden[t % len(hidden)]
    attended = torch.zeros_like(hidden)
    cu_seqlens, seq_lens = step.cu_seqlens.tolist(), step.seq_lens.tolist()
    for s, num_keys in enumerate(seq_lens):
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            position = num_keys - cu_seqlens[s + 1] + t
            blocks = step.block_tables[0][s].tolist()
            slots = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(position + 1)]
            weights = torch.softmax((keys[slots] * hidden[t]).sum(1), 0)
            attended[t] = (values[slots] * weights.unsqueeze(1)).sum(0)
    return torch.stack([((hidden + attended)[t].unsqueeze(1) * HEAD).sum(0) for t in logits_to_keep.tolist()])


ONE_GROUP = [KVGroup((0,), 0)]


def make_cache(value=float("nan")):
    cache = KVCache(
        [KVShape(1, DIM, DIM)],
        ONE_GROUP,
        dtype=torch.float64,
        device="cpu",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    for tensor in cache.k_caches + cache.v_caches:
        tensor.fill_(value)
    return cache


def make_blocks(num_blocks=NUM_BLOCKS, order=None):
    return KVBlocks(BlockPool(num_blocks, BLOCK_SIZE, order), ONE_GROUP, prefix_caching=False)


def run_in(layout, arrays, cache):
    """The forward of a step in a buffer of this layout."""
    runner = Runner(forward, cache, cuda_graphs=False)
    buffer = StepBuffer(layout, torch.device("cpu"))
    buffer.fill(arrays)
    return runner._forward(buffer)


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
    found = buffer.tensors()
    num_tokens, num_sequences = len(arrays.input_ids), len(arrays.seq_lens)
    assert (found["slot_mappings"][:, :, num_tokens:] == PADDING_SLOT).all()
    assert (found["pending"][num_tokens:] == NOT_PENDING).all()
    assert (found["cu_seqlens"][num_sequences:] == num_tokens).all()
    assert (found["seq_lens"][num_sequences:] == 0).all()
    assert (found["block_copies"][2] == 0).all(), "no tokens are copied"
    for (name, (dtype, shape)), given_array in zip(layout.fields().items(), arrays):
        tensor = found[name]
        assert tensor.shape == shape and tensor.numpy().dtype == dtype
        assert (tensor.numpy()[tuple(slice(0, size) for size in given_array.shape)] == given_array).all()


@given(first=steps(), second=steps(), more=MORE, shared=st.booleans())
def test_memory_that_is_filled_again_holds_the_new_step(first, second, more, shared):
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
    assert not torch.equal(runner._forward(buffer)[:3], expected)


def test_a_pending_token_is_read_where_the_last_step_drew_it():
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
    cache = KVCache(
        shapes, [KVGroup((0, 1), 0)], dtype=torch.bfloat16, device="cpu", num_blocks=3, block_size=32
    )
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
    cache = KVCache(
        [KVShape(1, 2, 2)] * 7, groups, dtype=torch.float32, device="cpu", num_blocks=4, block_size=16
    )
    places = [tensor.data_ptr() for tensor in cache.k_caches]
    assert len(set(places)) == 2
    for group in groups:
        assert len({places[layer] for layer in group.layers}) == len(group.layers), "two layers of a group share keys"
    assert KVCache.bytes_per_block([KVShape(1, 2, 2)] * 7, groups, torch.float32, 16) == 2 * 16 * 4 * 4


def test_layers_that_cannot_share_form_one_group_without_a_window():
    assert kv_groups([70, 0], [(1, 2, 2), (1, 4, 4)]) == (KVGroup((0, 1), 0),)
    assert kv_groups([70, 70], [(1, 2, 2), (1, 4, 4)]) == (KVGroup((0, 1), 70),)


def cuda_forward(input_ids, position_ids, step, logits_to_keep):
    """A forward that a graph can hold: it writes a number a token into the cache, and reads it back."""
    written = (input_ids[0] * 3 + position_ids[0]).to(torch.float64)
    keys = step.k_caches[0].view(-1)
    slot_mapping = step.slot_mappings[0]
    live = slot_mapping != PADDING_SLOT
    slots = slot_mapping.clamp_min(0)
    copies = len(slots) // len(written)  # of a token
    keys.index_add_(0, slots, torch.where(live, written.repeat(copies) - keys[slots], 0.0))
    sequence = torch.bucketize(logits_to_keep, step.cu_seqlens[1:].long(), right=True).clamp_max(len(step.seq_lens) - 1)
    first_key = keys[step.block_tables[0][sequence, 0].long() * BLOCK_SIZE]
    return torch.stack([written[logits_to_keep], first_key, step.seq_lens[sequence].double()], dim=1)


def cuda_runner(cuda_graphs, forward=cuda_forward):
    cache = KVCache(
        [KVShape(1, 1, 1)], ONE_GROUP, dtype=torch.float64, device="cuda", num_blocks=64, block_size=BLOCK_SIZE
    )
    cache.k_caches[0].zero_()  # compared whole
    return Runner(forward, cache, cuda_graphs)


@on_a_gpu
def test_replayed_steps_equal_plain_ones():
    results = []
    for cuda_graphs in (False, True):
        runner, blocks = cuda_runner(cuda_graphs), make_blocks(64)
        sequences = [Sequence([10 * i + t for t in range(90)]) for i in range(9)]
        logits = []
        for count in [300, 1, 9, 2, 9, 5, 20, 20, 20, 9, 3]:  # prefills of 306 and 20 tokens, and decodes
            chosen = sequences[: min(count, 9)]
            plan = [(s, {300: 34, 20: 2}.get(count, 1)) for s in chosen]
            logits.append(runner.run(build_step(plan, blocks)))
            for sequence, n in plan:
                sequence.num_computed += n
        results.append([torch.cat(logits), *runner.kv_cache.k_caches])
        if cuda_graphs:
            assert {(layout.tokens, layout.sequences) for layout in runner._graphs} == {
                (1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 16)
            }  # fmt: skip
    for replayed, plain in zip(*results):
        assert_bitwise_equal(replayed, plain)


class EagerGraph:
    """Stands for a captured forward where there is no GPU: it runs when it is made, and at every replay."""

    def __init__(self, forward, buffers, memory_pool):
        self.buffers, self.replay = buffers, forward
        forward()


def test_a_captured_step_reads_what_the_last_one_drew_and_leaves_what_it_draws(device):
    results = []
    for cuda_graphs in (False, True):
        if device == "cuda":
            runner = cuda_runner(cuda_graphs)
        else:
            runner = Runner(forward, make_cache(0.0), False)
            runner.cuda_graphs = cuda_graphs
        runner.sampled[:2] = torch.tensor([9, 4])
        sequences = [Sequence([5, 6], num_computed=2, num_pending=1), Sequence([7], num_computed=1, num_pending=1)]
        entries = [StepEntry(sequence, sequence.num_computed, 1) for sequence in sequences]
        tables = np.array([[[2], [3]]], np.int32)
        with mock.patch.object(runner_module, "_Graph", runner_module._Graph if device == "cuda" else EagerGraph):
            results.append(runner.run(build_arrays(entries, tables, BLOCK_SIZE, {sequences[0]: 1, sequences[1]: 0})))
        if cuda_graphs:
            assert_bitwise_equal(runner.drawn, likeliest(results[0]))
            assert_bitwise_equal(runner.sampled[:2], runner.drawn[:, 1])
    assert_bitwise_equal(results[1], results[0])


@given(most_blocks=st.integers(1, 3000), block_size=st.sampled_from([16, 48, 64, 256, 1024]))
def test_the_widest_table_of_a_warm_up_holds_any_sequence(most_blocks, block_size):
    widths = table_widths(most_blocks, block_size)
    assert widths[-2:-1] < [most_blocks] and widths[-1] >= most_blocks
    assert all(wider % narrower == 0 for narrower, wider in itertools.pairwise(widths))


def test_a_step_takes_the_narrowest_graph_that_holds_it():
    runner = Runner(forward, make_cache(), False)
    known = [StepLayout(8, 8, 8, blocks, 1) for blocks in (32, 256)]
    runner._graphs = dict(zip(known, ("narrow", "wide")))
    runner._widest = 256
    for blocks, graph in ((32, "narrow"), (64, "wide"), (256, "wide"), (512, None)):
        assert runner._graph_for(known[0]._replace(blocks=blocks)) == graph
    assert runner._graph_for(StepLayout(16, 16, 16, 32, 1)) is None


def test_staging_memory_keeps_views_of_few_layouts():
    """Steps of ever new sizes, as prefills are, leave nothing behind."""
    empty = torch.empty
    with (
        mock.patch.object(torch.cuda, "Event"),
        mock.patch.object(torch, "empty", lambda *size, pin_memory=False, **kind: empty(*size, **kind)),
    ):
        staging = _Staging()
        for num_tokens in range(MOST_VIEWS + 50, 0, -1):
            entry = StepEntry(Sequence([0] * num_tokens), 0, num_tokens)
            arrays = build_arrays([entry], np.zeros((1, 1, 40), np.int32), BLOCK_SIZE, {})
            buffer = StepBuffer(StepLayout.of(arrays), torch.device("cpu"))
            staging.upload(arrays, buffer)
            assert buffer.tensors()["seq_lens"].tolist() == [num_tokens]
        for array in arrays:
            array.setflags(write=False)
        for num_tokens in (8, 64, 8):  # from one memory, where arrays lie elsewhere in the layout between
            buffer, fresh = (StepBuffer(StepLayout(num_tokens, 1, 1, 40, 1), torch.device("cpu")) for _ in range(2))
            staging.upload(arrays, buffer)
            fresh.fill(arrays)
            for name, tensor in buffer.tensors().items():
                assert_bitwise_equal(tensor, fresh.tensors()[name], name)
    assert staging._host.cache_info().currsize == MOST_VIEWS


@on_a_gpu
def test_no_step_waits_for_a_capture_after_the_warm_up():
    """Sequences grow past the narrowest table, alone and beside others, a token at a time and several."""
    results = []
    for cuda_graphs in (False, True):
        runner, blocks = cuda_runner(cuda_graphs), make_blocks(64)
        if cuda_graphs:
            Worker(runner, Sampler(3, "cuda")).warm_up(4, 32, 63)
            runner._capture = None
        long, short = Sequence([t % 50 for t in range(700)]), Sequence([t % 40 for t in range(150)])
        logits = []
        together = [[(long, 1), (short, 1)]] * 8
        for plan in ([(long, 490)], [(long, 20), (short, 5)], *together, [(long, 12), (short, 12)]):
            logits.append(runner.run(build_step(plan, blocks)))
            for sequence, n in plan:
                sequence.num_computed += n
        results.append(torch.cat(logits))
    assert_bitwise_equal(results[1], results[0])


@on_a_gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_device_that_lags_behind_still_gets_every_step(cuda_graphs):
    steps = [[7 * step + t for t in range(8)] for step in range(20)]
    results = []
    for lags in (False, True):
        runner, blocks = cuda_runner(cuda_graphs), make_blocks(64)
        sequence = Sequence([0])
        runner.run(build_step([(sequence, 1)], blocks))  # captures
        torch.cuda.synchronize()
        logits = []
        for tokens in steps:
            if lags:
                torch.cuda._sleep(20_000_000)  # cycles: the host fills the next steps' arrays meanwhile
            sequence.token_ids[-1:] = tokens
            sequence.num_computed = sequence.num_tokens - 1
            logits.append(runner.run(build_step([(sequence, 1)], blocks)))
        results.append(torch.cat(logits))
    assert_bitwise_equal(results[1], results[0])


@on_a_gpu
def test_captures_share_the_memory_of_their_warm_ups():
    size = 64 << 20

    def forward(*arguments):
        torch.empty(size, dtype=torch.uint8, device="cuda").zero_()
        return cuda_forward(*arguments)

    runner, blocks = cuda_runner(True, forward), make_blocks(64)
    before = torch.cuda.memory_reserved()
    for count in (1, 2, 4, 8):
        runner.run(build_step([(Sequence([count]), 1) for _ in range(count)], blocks))
    assert len(runner._graphs) == 4
    assert torch.cuda.memory_reserved() - before < 3 * size  # the warm-ups' and the graphs'


@on_a_gpu
def test_garbage_that_holds_a_graph_does_not_spoil_a_capture():
    def littering(*arguments):
        if torch.cuda.is_current_stream_capturing():
            cycle = [list(old)]
            cycle.append(cycle)
            old.clear()
            del cycle
            _ = [[] for _ in range(100_000)]  # enough for the collector to start by itself
        return cuda_forward(*arguments)

    engine = cuda_runner(True)
    engine.run(build_step([(Sequence([1, 2]), 1)], make_blocks(64)))
    old = list(engine._graphs.values())
    del engine
    runner = cuda_runner(True, littering)
    step = build_step([(Sequence([3, 4]), 1)], make_blocks(64))
    assert_bitwise_equal(runner.run(step), cuda_runner(False).run(step))
    assert not old


def with_copies(arrays, copies):
    """The step as one of a draft tree: each token may belong to two branches, and blocks are copied first."""
    slots = np.pad(arrays.slot_mappings, ((0, 0), (0, 1), (0, 0)), constant_values=PADDING_SLOT)
    return arrays._replace(slot_mappings=slots, block_copies=np.array(copies, np.int64).reshape(-1, 3).T)


def test_a_step_copies_its_own_blocks_and_none_of_a_step_before(device):
    """All of one layout: on a GPU the first runs as it is, the second is captured, and the others are its replays."""
    runner = cuda_runner(True) if device == "cuda" else Runner(forward, make_cache(), False)
    storage = runner.kv_cache.k_caches[0]
    plan = [(Sequence([1, 2, 3]), 3), (Sequence([4, 5, 6]), 3)]
    arrays = build_step(plan, make_blocks())
    for copies in ([(5, 6, 9)], [(5, 9, 2), (7, 8, 16)], [(7, 10, 3), (5, 11, 16)], [(5, 12, 1)], []):
        storage[5:13] = torch.randn(storage[5:13].shape)
        expected = storage[5:13].clone()
        for source, target, num_tokens in copies:
            expected[target - 5, :num_tokens] = expected[source - 5, :num_tokens]
        runner.launch(with_copies(arrays, copies))
        assert_bitwise_equal(storage[5:13], expected)
