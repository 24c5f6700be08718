"""A step's rows reach a worker process unchanged, without keys and tokens that it already has."""

import math
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from detcompile.runtime.processes.remote_worker import RankStep, RemoteWorker, StageClock, WorkReader
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.sampling_tensors import SampleRow
from detcompile.runtime.step.worker import StepResult, StepWork, idle_arrays

NEVER_LOST = (lambda _group, _name: None, lambda group: group)  # what makes a worker in it, and its successor


def test_rows_arrive_as_they_were() -> None:
    sent = []
    post = lambda command, name, packed: sent.append(packed)  # noqa: E731
    group = SimpleNamespace(num_ranks=1, call=lambda *_, **__: [None], post=post)
    worker = RemoteWorker(group, deque(), *NEVER_LOST, torch.device("cpu"))
    reader = WorkReader()
    penalized = SamplingParams(repetition_penalty=1.5, seed=3, bad_words_ids=[[1, 2]])
    allowed = SamplingParams(allowed_token_ids=[4, 5], seed=4)
    matching = SamplingParams(grammar={"regex": "a+"}, seed=5)
    for position in (5, 6):
        rows = (
            SampleRow(allowed, position, 1, key="a", token_ids=[1] * 5),
            SampleRow(penalized, position, 2, key="b", token_ids=[2] * 5, forbidden=(2, 7)),
            SampleRow(allowed, position, 3, 1, key="c", forbidden=(9,) * (position == 6)),
            SampleRow(matching, position, 4, key="d", mask=np.array([7, -1], np.int32) * position),
        )
        worker.launch(StepWork(idle_arrays(3, 3, 1), rows, ()))
        actual = reader.read(sent.pop()).rows
        assert [row[:4] for row in actual] == [row[:4] for row in rows]
        assert [row.forbidden for row in actual] == [row.forbidden for row in rows]
        assert [list(row.token_ids) for row in actual] == [[], [2] * 5 if position == 5 else [], [], []]
        masks = [None if row.mask is None else row.mask.tolist() for row in actual]
        assert masks == [None, None, None, [7 * position, -position]]
        assert len({row.key for row in actual}) == 4


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", ["launch", "collect", "launch", "collect", "launch", "collect"]),
        ("cuda", ["launch", "launch", "collect", "launch", "collect", "collect"]),  # the host launches one ahead
    ],
)
def test_stage_results_are_requested_once_per_step_in_order(device: str, expected: list[str]) -> None:
    calls: list[str] = []
    result = StepResult([], [], [], [], {})
    requested: list[int] = []

    def submit(command: str, _name: int) -> int:
        calls.append(command)
        requested.append(len(requested))
        return requested[-1]

    group = SimpleNamespace(
        call=lambda *_, **__: [None],
        post=lambda command, *_: calls.append(command),
        submit=submit,
        result=lambda ticket: [RankStep(None, None, 0.5), RankStep(result._replace(tokens=[ticket]), None, 0.5)],
    )
    worker = RemoteWorker(group, deque(), *NEVER_LOST, torch.device(device), num_stages=2)
    first, second = (worker.launch(StepWork(idle_arrays(1, 1, 1), (), ())) for _ in range(2))
    assert worker.collect(first).tokens == [0]
    third = worker.launch(StepWork(idle_arrays(1, 1, 1), (), ()))
    assert [worker.collect(step).tokens for step in (second, third)] == [[1], [2]]
    assert calls == expected


def test_idle_share_counts_idle_stages_during_steps() -> None:
    now = 0.0
    clock = StageClock(2, clock=lambda: now)
    assert clock.idle_share == 0.0 and clock.shortest == math.inf
    clock.started()
    now = 4.0
    clock.started()
    clock.ended([2.0, 2.0])
    now = 6.0
    clock.ended([2.0, 2.0])
    assert clock.idle_share == pytest.approx(1 - 8 / 12) and clock.shortest == 2.0
    now = 100.0  # nothing is under way
    clock.started()
    now = 102.0
    clock.ended([2.0, 2.0])
    assert clock.idle_share == pytest.approx(1 - 12 / 16)
