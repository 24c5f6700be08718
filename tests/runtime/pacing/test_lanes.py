"""How many steps a pipeline keeps in flight, from the durations of the host and the stages."""

import math
from itertools import repeat
from typing import Any

import pytest

from detcompile import SamplingParams
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.pacing.pace import NEWEST, Lanes, most_lanes
from tests.runtime.test_engine_restarts import mortal_engine


@pytest.mark.parametrize("num_stages", [2, 4])
def test_slow_host_adds_a_lane(num_stages: int) -> None:
    lanes = Lanes(num_stages)
    assert lanes.count == num_stages
    for _ in range(4 * NEWEST):
        lanes.observe(5e-3, 4e-3)
    assert lanes.count == num_stages + 1 == most_lanes(num_stages)
    for _ in range(4 * NEWEST):
        lanes.observe(3e-3, 4e-3)
    assert lanes.count == num_stages


def test_one_slow_step_of_the_host_changes_nothing() -> None:
    lanes = Lanes(2)
    for _ in range(4 * NEWEST):
        lanes.observe(1e-3, 4e-3)
    lanes.observe(20e-3, 4e-3)
    assert lanes.count == 2


def test_before_a_step_has_ended_nothing_is_known() -> None:
    lanes = Lanes(3)
    lanes.observe(1.0, math.inf)
    assert lanes.count == 3


def test_a_single_stage_has_a_single_step() -> None:
    lanes = Lanes(1)
    lanes.observe(1.0, 0.0)
    assert lanes.count == most_lanes(1) == 1


def test_lanes_that_become_fewer_are_left() -> None:
    """Count the steps in flight at each launch, of an engine whose shortest step is reported as short, then as long."""
    config = EngineConfig(num_blocks=200, block_size=16, max_num_batched_tokens=64, overlap=False)
    engine, worker = mortal_engine(config, repeat(False), num_stages=2)
    launch, collect, under_way, seen = worker.launch, worker.collect, 0, []

    def counting_launch(work: Any) -> Any:
        nonlocal under_way
        under_way += 1
        seen.append(under_way)
        return launch(work)

    def counting_collect(launched: Any) -> Any:
        nonlocal under_way
        under_way -= 1
        return collect(launched)

    worker.launch, worker.collect = counting_launch, counting_collect  # type: ignore[method-assign]
    for seed in range(12):
        engine.add_request([5, 6, 7 + seed], SamplingParams(max_tokens=90, ignore_eos=True, seed=seed))
    for shortest, most in ((0.0, 3), (math.inf, 2), (0.0, 3)):
        worker.shortest_step = shortest
        for _ in range(10):
            engine.step()
        seen.clear()
        for _ in range(20):
            engine.step()
        assert max(seen) == most
