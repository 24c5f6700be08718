"""Kernels are compiled before anyone is served: by steps of every size, of which nothing is kept."""

import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from detcompile.runtime.step import warmup
from detcompile.runtime.step.layout import graph_layouts
from detcompile.runtime.step.runner import Runner
from detcompile.runtime.step.stage_forward import StageForward
from detcompile.runtime.step.warmup import warm_up_kernels, warmup_steps
from detcompile.templates.device.cuda_graphs import is_alone, is_for_graph, is_warmup
from tests.bits import assert_bitwise_equal
from tests.runtime.step.runner_cases import forward, make_cache


def launched(steps, forward=forward, cache=None):
    """Warm up on a CPU; returns the cache, and of every launch its extents and whether it was as a graph's."""
    cache, actual = make_cache(0.0) if cache is None else cache, []

    def recorded(input_ids, position_ids, step, logits_to_keep):
        assert is_warmup() and not torch.is_grad_enabled()
        actual.append((input_ids.shape[1], len(step.seq_lens), step.block_tables[0].shape[1], is_for_graph()))
        return forward(input_ids, position_ids, step, logits_to_keep)

    staging = SimpleNamespace(record=lambda: None)
    with (
        mock.patch.object(torch.cuda, "device", lambda device: mock.MagicMock()),
        mock.patch.object(Runner, "_start_upload", lambda self, steps, buffers: (buffers.fill(steps), staging)[1]),
    ):
        warm_up_kernels(forward if isinstance(forward, StageForward) else recorded, cache, steps)
    return cache, actual


def test_every_step_runs_once_and_writes_nothing():
    steps = warmup_steps(graph_layouts(8, 32, 40, 16), 8, 32, 40)
    cache, actual = launched(steps)
    assert sorted(actual) == sorted(map(tuple, steps)) and {graph for *_, graph in actual} == {True, False}
    for given, fresh in zip(cache.k_caches + cache.v_caches, make_cache(0.0).k_caches * 2):
        assert_bitwise_equal(given, fresh)
    assert not is_warmup()


def test_sizes_are_powers_of_two_and_steps_without_graphs_take_the_widest_table():
    graphs = graph_layouts(48, 8192, 640, 64)
    steps = warmup_steps(graphs, 48, 8192, 640)
    as_graphs = {step[:3] for step in steps if step.as_graph}
    assert as_graphs == {layout for layout in graphs if all(size.bit_count() == 1 for size in layout)}
    plain = [step for step in steps if not step.as_graph]
    assert {step.tokens for step in plain} == {1024, 2048, 4096, 8192} and {step.width for step in plain} == {640}
    assert {step.sequences for step in plain} == {1, 48}
    assert steps[0].tokens == 8192, "the longest to compile comes first"
    assert {step.tokens for step in warmup_steps([], 4, 20, 5)} == {1, 2, 4, 8, 16, 20}


def test_one_step_of_each_number_of_tokens_comes_first():
    steps = warmup_steps(graph_layouts(1024, 16896, 641, 64), 1024, 16896, 641)
    count = len({step.tokens for step in steps})
    assert len(steps) > 4 * count
    for part in (steps[:count], steps[count:]):
        assert part == sorted(part, reverse=True)
    assert len({step.tokens for step in steps[:count]}) == count


def test_a_step_without_memory_is_left_out_and_any_other_failure_is_raised():
    steps = warmup_steps([], 4, 16, 2)
    lock, failures = threading.Lock(), [torch.OutOfMemoryError("out of memory")]

    def failing(*step):
        with lock:
            if failures:
                raise failures.pop()
        return forward(*step)

    _, actual = launched(steps, failing)
    assert len(actual) == len(steps)
    failures.append(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        launched(steps, failing)


def test_threads_are_as_many_as_cores_at_most(monkeypatch):
    requests = []
    pool = warmup.ThreadPoolExecutor
    monkeypatch.setattr(warmup, "ThreadPoolExecutor", lambda count: requests.append(count) or pool(count))
    monkeypatch.setattr(warmup.os, "cpu_count", lambda: 3)
    launched(warmup_steps([], 1, 1, 1))
    assert requests == [3]


def test_a_stage_runs_alone_over_rows_of_its_own():
    actual = []

    def program(rows, position_ids, step, logits_to_keep):
        assert is_alone() and not rows.any()
        actual.append(rows.shape)
        return rows + 1

    stage = StageForward(program, torch.ones(1, 1, 8), before=0, after=2)
    steps = warmup_steps([], 4, 16, 2)
    launched(steps, stage)  # no other stage is there to receive from or to send to
    assert sorted(actual) == sorted((1, step.tokens, 8) for step in steps)
    assert stage._given is None and not stage._sent
