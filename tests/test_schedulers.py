"""What the schedulers promise, over the trace of benchmarks/schedulers.py with the real Scheduler and KVBlocks."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plots import RESULTS
from benchmarks.schedulers import POLICIES, ROOMY, real_rows
from benchmarks.simulation import (
    FITTED,
    H200_8B,
    Arrival,
    HostCost,
    Simulation,
    log_normal_trace,
    simulate,
    summarize,
)
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.pacing.pace import Lanes
from tests.model_cases import compiled

LONGEST = 8192  # tokens of a request of the trace


def served(policy: str, rate: float, requests: int = 80, seed: int = 0) -> Simulation:
    config = EngineConfig(**POLICIES[policy], max_num_seqs=256)
    return simulate(log_normal_trace(requests, rate, seed), config, ROOMY)


def chunk_seconds(budget: int, decode_keys: int) -> float:
    """A step of ``budget`` tokens whose chunk is the end of the longest prompt, beside decodes of so many keys."""
    return H200_8B.seconds(budget, decode_keys, budget * LONGEST)


@given(
    policy=st.sampled_from(["stall_free 512", "stall_free 2048"]),
    rate=st.sampled_from([1.0, 4.0, 8.0, 1e6]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12)
def test_under_stall_free_no_decode_waits_longer_than_one_chunk(policy: str, rate: float, seed: int) -> None:
    idle_share_and_speed = served(policy, rate, seed=seed)
    budget = POLICIES[policy]["max_num_batched_tokens"]
    assert max(idle_share_and_speed.step_tokens) <= budget
    longest = chunk_seconds(budget, idle_share_and_speed.most_decode_keys)
    for seconds, steps in idle_share_and_speed.gaps():
        assert steps == 1 and seconds <= longest
    assert idle_share_and_speed.num_preemptions == 0 and summarize(idle_share_and_speed)["stalls"] == 0


def test_under_prefill_first_decodes_wait_for_whole_prompts() -> None:
    idle_share_and_speed = served("prefill_first 8192", 6.0)
    assert max(seconds for seconds, _ in idle_share_and_speed.gaps()) > chunk_seconds(
        2048, idle_share_and_speed.most_decode_keys
    )
    assert summarize(idle_share_and_speed)["stalls"] > 0


def test_under_simple_chunking_a_decode_waits_for_one_chunk_at_most() -> None:
    assert summarize(served("simple_chunking 2048", 6.0))["longest_stall_steps"] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_all_its_tokens(policy: str) -> None:
    idle_share_and_speed = served(policy, 8.0)
    assert [len(request.times) for request in idle_share_and_speed.served] == [
        a.num_output for a in log_normal_trace(80, 8.0)
    ]
    assert all(request.times[0] > request.arrival.time for request in idle_share_and_speed.served)


@pytest.mark.parametrize(("num_stages", "rate"), [(2, 9.0), (4, 16.0), (4, 20.0)])
def test_stages_are_idle_below_five_percent_under_load(num_stages: int, rate: float) -> None:
    """And give more than one stage could, without preemptions."""
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=1024)
    idle_share_and_speed = simulate(log_normal_trace(300, rate), config, 4 * ROOMY, num_stages=num_stages)
    assert idle_share_and_speed.idle_share_under_load < 0.05 and idle_share_and_speed.num_preemptions == 0
    alone = simulate(log_normal_trace(300, rate), config, 4 * ROOMY)
    assert summarize(idle_share_and_speed)["output_tokens_per_s"] > 1.2 * summarize(alone)["output_tokens_per_s"]


def test_one_step_beyond_stages_hides_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host takes longer per step than the stages take to read their weights. Otherwise it costs more."""
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=1024)
    trace = [Arrival(0.0, 20, 20)]  # whose steps read the weights and do little else
    trace += [Arrival(1.0, 200, 100 + number % 56) for number in range(1024)]

    def idle_share_and_speed(host: HostCost) -> tuple[float, float]:
        simulation = simulate(trace, config, 4 * ROOMY, num_stages=2, host=host)
        return simulation.idle_share, summarize(simulation)["output_tokens_per_s"]

    slow, quick = HostCost(1e-3, 16e-6), HostCost(1e-3, 0.0)
    hidden, given = idle_share_and_speed(slow), idle_share_and_speed(quick)
    monkeypatch.setattr(Lanes, "count", 2)
    assert hidden[0] < 0.05 < 0.15 < idle_share_and_speed(slow)[0] and hidden[1] > 1.1 * idle_share_and_speed(slow)[1]
    assert given == idle_share_and_speed(quick)


def test_lazy_preempts_when_blocks_run_out_and_reserve_does_not() -> None:
    trace = log_normal_trace(80, 8.0)
    lazy, reserve = (
        simulate(trace, EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256, allocation=allocation), 600)
        for allocation in ("lazy", "reserve")
    )
    assert lazy.num_preemptions > 0 and reserve.num_preemptions == 0
    for idle_share_and_speed in (lazy, reserve):  # whom nobody preempted never waits
        assert all(steps == 1 for _, steps in idle_share_and_speed.gaps(preempted=False))


def test_the_cost_model_is_within_a_tenth_of_the_measured_steps() -> None:
    measured = json.loads((RESULTS / FITTED).read_text())["ms, tp_sizes=(1, 2, 4, 8)"]
    for step, milliseconds in measured.items():
        kind, count = step.split()
        size = int(count)
        prefill = kind == "prefill"
        keys, pairs = (0, size * (size + 1) / 2) if prefill else (size * 513, 0.0)
        assert 1e3 * H200_8B.seconds(size, keys, pairs) == pytest.approx(milliseconds, rel=0.1), step


def test_trace_has_declared_lengths_and_rate() -> None:
    trace = log_normal_trace(4000, 5.0)
    prompts, outputs = sorted(a.num_prompt for a in trace), sorted(a.num_output for a in trace)
    assert prompts[2000] == pytest.approx(1730, rel=0.06) and prompts[3600] == pytest.approx(5696, rel=0.08)
    assert outputs[2000] == pytest.approx(415, rel=0.04) and outputs[3600] == pytest.approx(834, rel=0.06)
    assert trace[-1].time == pytest.approx(4000 / 5.0, rel=0.05)
    assert trace == log_normal_trace(4000, 5.0) != log_normal_trace(4000, 5.0, seed=1)


def test_real_answers_are_equal_under_every_scheduler() -> None:
    model = compiled("qwen3", torch.bfloat16)
    trace = [Arrival(0.01 * i, 5 + 37 * i % 90, 3 + i % 9) for i in range(12)]
    names = ("stall_free", "prefill_first", "simple_chunking")
    policies = {name: {"scheduler": name, "max_num_batched_tokens": 32} for name in names}
    rows = list(real_rows(model, trace, policies, 200))  # asserts it
    assert [row["policy"] for row in rows] == list(names)
    assert all(0 < row["tbt_p50_ms"] <= row["tbt_max_ms"] and row["ttft_p50_ms"] > 0 for row in rows)
