"""Replayed graphs give what plain steps give, wait for nothing, and keep no memory; staging memory and block copies."""

import contextlib
import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.runtime.kv.kv_cache import KVCache, KVShape
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.filters import likeliest
from detcompile.runtime.sampling.sampler import Sampler
from detcompile.runtime.step import runner as runner_module
from detcompile.runtime.step.builder import StepEntry, build_arrays, build_step, pending_arrays
from detcompile.runtime.step.layout import StepBuffer, StepBuffers, StepLayout, table_widths
from detcompile.runtime.step.runner import CAPTURE_AFTER, MOST_VIEWS, Runner, _Staging
from detcompile.runtime.step.worker import Worker
from detcompile.step import PADDING_SLOT
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.runtime.step.runner_cases import BLOCK_SIZE, ONE_GROUP, forward, make_blocks, make_cache


def on_a_gpu(test):
    return pytest.mark.gpu(NEEDS_CUDA(test))


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


class EagerStaging:
    """Stands for pinned memory where there is no GPU."""

    def upload(self, steps, buffers):
        buffers.fill(steps)
        return mock.Mock()


def with_eager_graphs(device):
    """A CPU's runner goes the way of a GPU's, if it has CUDA graphs."""
    stand_ins = {} if device == "cuda" else {"Graph": EagerGraph, "_Staging": EagerStaging}
    return mock.patch.multiple(runner_module, **stand_ins) if stand_ins else contextlib.nullcontext()


def new_runner(device, cuda_graphs):
    """A runner on either device, with graphs that ``with_eager_graphs`` makes of a CPU's."""
    if device == "cuda":
        return cuda_runner(cuda_graphs)
    runner = Runner(forward, make_cache(0.0), False)
    runner.cuda_graphs, runner._on_host = cuda_graphs, not cuda_graphs
    return runner


def test_a_captured_step_reads_what_the_last_one_drew_and_leaves_what_it_draws(device):
    results = []
    for cuda_graphs in (False, True):
        runner = new_runner(device, cuda_graphs)
        runner.sampled[:2] = torch.tensor([9, 4])
        sequences = [Sequence([5, 6], num_computed=2, num_pending=1), Sequence([7], num_computed=1, num_pending=1)]
        entries = [StepEntry(sequence, sequence.num_computed, 1) for sequence in sequences]
        tables = np.array([[[2], [3]]], np.int32)
        with with_eager_graphs(device):
            results.append(runner.run(build_arrays(entries, tables, BLOCK_SIZE, {sequences[0]: 1, sequences[1]: 0})))
        if cuda_graphs:
            assert_bitwise_equal(runner.drawn, likeliest(results[0]))
            assert_bitwise_equal(runner.sampled[:2], runner.drawn[:, 1])
    assert_bitwise_equal(results[1], results[0])


def test_chained_steps_read_previous_tokens(device):
    """In one graph, in launches of their own, and with tokens that the host knows."""
    starts, num_steps = [[5, 6], [3]], 4
    tables = np.array([[[2, 4], [3, 5]]], np.int32)

    def entries(tokens, computed):
        return [StepEntry(Sequence(item), known, len(item) - known) for item, known in zip(tokens, computed)]

    runner, tokens, computed, expected = new_runner(device, False), [list(item) for item in starts], [0, 0], []
    for _ in range(num_steps):
        drawn = likeliest(runner.run(build_arrays(entries(tokens, computed), tables, BLOCK_SIZE, {})))
        expected.append(drawn)
        computed = [len(item) for item in tokens]
        for item, token in zip(tokens, drawn[:, 1].tolist()):
            item.append(token)
    lengths = np.array([len(item) for item in starts])
    first = build_arrays(entries(starts, [0, 0]), tables, BLOCK_SIZE, {})
    steps = [first, *pending_arrays(lengths + np.arange(num_steps - 1)[:, None], [0, 1], tables, BLOCK_SIZE)]
    for cuda_graphs in (False, True):
        runner = new_runner(device, cuda_graphs)
        with with_eager_graphs(device):
            for _ in range(2):  # captured, then replayed
                actual = runner.launch_chain(steps)[:, :2]
                assert_bitwise_equal(actual, torch.stack(expected))


@given(most_blocks=st.integers(1, 3000), block_size=st.sampled_from([16, 48, 64, 256, 1024]))
def test_the_widest_table_of_a_warm_up_holds_any_sequence(most_blocks, block_size):
    widths = table_widths(most_blocks, block_size)
    assert widths[-2:-1] < [most_blocks] and widths[-1] >= most_blocks
    assert all(wider % narrower == 0 for narrower, wider in itertools.pairwise(widths))


def test_a_step_takes_a_wider_graph_until_its_own_pays(device):
    """And goes on with it where there is no memory for its own, which is not tried again."""
    runner = new_runner(device, True)
    runner._widest = 256
    wide, narrow = (StepLayout(8, 8, 8, blocks, 1) for blocks in (256, 64))
    assert runner._wider(narrow) is None and runner._worth_a_graph(narrow, is_served=False)
    runner._missed.clear()
    runner._graphs[wide] = graph = mock.Mock()
    for blocks in (32, 64, 128):
        assert runner._wider(narrow._replace(blocks=blocks)) is graph
    assert runner._wider(wide._replace(blocks=512)) is None
    assert runner._wider(StepLayout(16, 16, 16, 32, 1)) is None
    assert not any(runner._worth_a_graph(narrow, is_served=True) for _ in range(CAPTURE_AFTER - 1))
    assert runner._worth_a_graph(narrow, is_served=True)
    runner._refused.add(narrow)
    assert not runner._worth_a_graph(narrow, is_served=True)


def test_warmup_runs_mixed_steps_no_more_often_than_plain_ones(device):
    """A step whose tokens are several of a sequence is otherwise captured the second time that it occurs."""
    counts = []
    for tokens in (8, 16):
        runner = new_runner(device, True)
        runner.forward = mock.Mock(wraps=runner.forward)
        with with_eager_graphs(device):
            Worker(runner, Sampler(3, device)).capture(tokens, 8, 32)
        assert runner.num_graphs == 1
        counts.append(runner.forward.call_count)
    assert counts[0] == counts[1]


def test_narrow_graphs_come_when_they_are_often_missed(device):
    """With the bits of plain steps before and after."""
    results = []
    for cuda_graphs in (False, True):
        with with_eager_graphs(device):
            runner, blocks = new_runner(device, cuda_graphs), make_blocks()
            if cuda_graphs:
                Worker(runner, Sampler(3, device)).capture(1, 1, 64)
            sequence, logits, counts = Sequence([5]), [], []
            for token in range(CAPTURE_AFTER + 2):
                logits.append(runner.run(build_step([(sequence, 1)], blocks)))
                counts.append(runner.num_graphs)
                sequence.token_ids.append(token)
                sequence.num_computed += 1
        if cuda_graphs:
            assert counts == [1] * (CAPTURE_AFTER - 1) + [2] * 3
        results.append(torch.cat(logits))
    assert_bitwise_equal(results[1], results[0])


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
            buffers = StepBuffers((StepLayout.of(arrays),), torch.device("cpu"))
            staging.upload((arrays,), buffers)
            assert buffers.steps[0].tensors()["seq_lens"].tolist() == [num_tokens]
        for array in arrays:
            array.setflags(write=False)
        for num_tokens in (8, 64, 8):  # from one memory, where arrays lie elsewhere in the layout between
            layouts = StepLayout(num_tokens, 1, 1, 40, 1), StepLayout(num_tokens + 8, 2, 1, 40, 1)
            steps = arrays, arrays._replace(seq_lens=arrays.seq_lens + 1)
            buffers = StepBuffers(layouts, torch.device("cpu"))
            staging.upload(steps, buffers)
            for actual, step, layout in zip(buffers.steps, steps, layouts):
                alone = StepBuffer(layout, torch.device("cpu"))
                alone.fill(step)
                for name, tensor in actual.tensors().items():
                    assert_bitwise_equal(tensor, alone.tensors()[name], name)
    assert staging._host.cache_info().currsize == MOST_VIEWS


@on_a_gpu
def test_no_step_waits_for_a_capture_after_the_warm_up():
    """Sequences grow past the narrowest table, alone and beside others, a token at a time and several."""
    results = []
    for cuda_graphs in (False, True):
        runner, blocks = cuda_runner(cuda_graphs), make_blocks(64)
        if cuda_graphs:
            Worker(runner, Sampler(3, "cuda")).warm_up(4, 32, 63)
            captured = runner.num_graphs
        long, short = Sequence([t % 50 for t in range(700)]), Sequence([t % 40 for t in range(150)])
        logits = []
        together = [[(long, 1), (short, 1)]] * 8
        for plan in ([(long, 490)], [(long, 20), (short, 5)], *together, [(long, 12), (short, 12)]):
            logits.append(runner.run(build_step(plan, blocks)))
            for sequence, n in plan:
                sequence.num_computed += n
            if cuda_graphs:
                assert runner.num_graphs == captured
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
