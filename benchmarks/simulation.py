"""Run the real Scheduler and KVBlocks over a trace, with a cost model instead of the model.

The cost of a step is that of an H200 with an 8B model, fitted to six whole-model figures (FITTED: commit 099064d,
Qwen3-8B shape, tp_sizes=(1, 2, 4, 8)); tests/test_schedulers.py says how well. It is a model: no step was run.
Without stages nothing overlaps: a step is planned when the one before has ended. Of a pipeline each stage takes its
part of a step's cost, and several steps are under way (``Lanes``). The host takes no time, or a ``HostCost`` a step.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BlockPool
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.pacing.pace import Lanes
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.scheduler import Scheduler, StepPlan
from detcompile.runtime.step.builder import StepEntry
from detcompile.step import KVGroup

__all__ = [
    "Arrival",
    "FITTED",
    "H200_8B",
    "HostCost",
    "Simulation",
    "StepCost",
    "latencies",
    "log_normal_trace",
    "simulate",
    "summarize",
]

END = 1  # the token that ends an answer
FITTED = "model-nvidia-h200-099064d.json"  # the results that H200_8B was fitted to
MAX_TOKENS = 2048  # of each client's request; "reserve" reserves as much
NORMAL_P90 = 1.2815515655446004  # 90th percentile of the standard normal distribution


class StepCost(NamedTuple):
    """Seconds of a step: weights are read once; tokens beyond a few are compute; attention reads keys."""

    base: float = 4.75e-3
    free_tokens: int = 80  # whose products cost no more than reading the weights
    per_token: float = 26e-6  # beyond them
    per_decode_key: float = 50e-9  # a key that a decode reads
    per_prefill_pair: float = 1.4e-9  # a query and a key that it sees, in a prefill

    def seconds(self, num_tokens: int, decode_keys: int, prefill_pairs: float) -> float:
        """Return the seconds of one step."""
        compute = self.per_token * max(0, num_tokens - self.free_tokens)
        return self.base + compute + self.per_decode_key * decode_keys + self.per_prefill_pair * prefill_pairs

    def of(self, entries: Iterable[StepEntry]) -> tuple[float, int]:
        """Return the seconds of a planned step, and the keys that its decodes read."""
        num_tokens = decode_keys = 0
        pairs = 0.0
        for sequence, start, count, _ in entries:
            num_tokens += count
            if start >= sequence.num_prompt_tokens:
                decode_keys += start + count
            else:
                pairs += count * (start + (count + 1) / 2)
        return self.seconds(num_tokens, decode_keys, pairs), decode_keys


H200_8B = StepCost()


class HostCost(NamedTuple):
    """Seconds of the host between a step and the next one of its sequences."""

    base: float
    per_token: float  # of those that the step draws

    def seconds(self, num_tokens: int) -> float:
        """Return the host's seconds for a step that draws ``num_tokens``."""
        return self.base + self.per_token * num_tokens


NO_HOST = HostCost(0.0, 0.0)


class Arrival(NamedTuple):
    """A request of a trace: when it comes, in seconds, and its lengths in tokens."""

    time: float
    num_prompt: int
    num_output: int


def log_normal_trace(
    count: int,
    rate: float,
    seed: int = 0,
    *,
    prompt: tuple[float, float, int] = (1730, 5696, 6144),
    output: tuple[float, float, int] = (415, 834, MAX_TOKENS),
) -> list[Arrival]:
    """Draw Poisson arrivals at ``rate`` a second, and log-normal lengths: (median, 90th percentile, most) each.

    The defaults are those of the openchat_sharegpt4 trace of Sarathi-Serve (OSDI 2024, table 2), cut to 8192 tokens.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    times = np.cumsum(rng.exponential(1 / rate, count))
    prompts, outputs = (_lengths(rng, count, *shape) for shape in (prompt, output))
    return [Arrival(float(t), int(p), int(o)) for t, p, o in zip(times, prompts, outputs)]


@dataclass(eq=False)
class _Served:
    """One request: when its tokens came, and in which steps."""

    arrival: Arrival
    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    preempted_before: set[int] = field(default_factory=set)  # indices of tokens


@dataclass(eq=False)
class Simulation:
    """Result of a simulated run."""

    served: list[_Served]
    step_tokens: list[int]
    seconds: float = 0.0
    num_preemptions: int = 0
    most_decode_keys: int = 0
    idle_share: float = 0.0  # of the stages' time while steps were under way
    idle_share_under_load: float = 0.0  # the same until the last request came

    def gaps(self, *, preempted: bool = True) -> list[tuple[float, int]]:
        """Return (seconds, steps) between tokens of an answer; preempted=False omits gaps caused by preemption."""
        return [
            (request.times[i] - request.times[i - 1], request.steps[i] - request.steps[i - 1])
            for request in self.served
            for i in range(1, len(request.times))
            if preempted or i not in request.preempted_before
        ]


class _InFlight(NamedTuple):
    """A step that was launched."""

    entries: tuple[StepEntry, ...]
    drawn: list[Sequence]  # whose next token it draws
    end: float


def simulate(
    trace: list[Arrival],
    config: EngineConfig,
    num_blocks: int,
    cost: StepCost = H200_8B,
    num_stages: int = 1,
    host: HostCost = NO_HOST,
) -> Simulation:
    """Serve a trace to its end."""
    pool = BlockPool(num_blocks, config.block_size)
    blocks = KVBlocks(pool, [KVGroup(tuple(range(36)), 0)], prefix_caching=False)
    scheduler = Scheduler(config, blocks, num_stages)
    served = {_sequence(arrival, number): _Served(arrival) for number, arrival in enumerate(trace)}
    simulation = Simulation(list(served.values()), [])
    stages, lanes = _Stages(num_stages), Lanes(num_stages)
    coming = list(served)[::-1]
    now, shortest = 0.0, math.inf
    in_flight: deque[_InFlight] = deque()
    while coming or scheduler.num_unfinished:
        while coming and served[coming[-1]].arrival.time <= now:
            assert scheduler.most_blocks(coming[-1]) <= pool.num_usable, "a request that never fits"
            scheduler.add(coming.pop())
            if not coming:
                simulation.idle_share_under_load = stages.idle_share
        scheduler.num_lanes = lanes.count
        plan = scheduler.plan() if len(in_flight) < scheduler.num_lanes else StepPlan((), (), ())
        for sequence in plan.preempted:
            served[sequence].preempted_before.add(sequence.num_generated)
            simulation.num_preemptions += 1
        if plan.entries:
            seconds, decode_keys = cost.of(plan.entries)
            shortest = min(shortest, seconds / num_stages)
            simulation.most_decode_keys = max(simulation.most_decode_keys, decode_keys)
            scheduler.observe(plan, sum(entry.num_tokens for entry in plan.entries), seconds)
            in_flight.append(_InFlight(plan.entries, _drawn(plan.entries), stages.run(now, seconds)))
        elif not in_flight:
            assert coming, "sequences are left and none can run"
            now = served[coming[-1]].arrival.time
            continue
        if not plan.entries or len(in_flight) >= scheduler.num_lanes:
            due = in_flight.popleft()
            host_seconds = host.seconds(len(due.drawn))
            now = max(now, due.end) + host_seconds
            lanes.observe(host_seconds, shortest)
            _finish(due, scheduler, served, now, len(simulation.step_tokens))
            simulation.step_tokens.append(sum(entry.num_tokens for entry in due.entries))
    simulation.seconds, simulation.idle_share = now, stages.idle_share
    return simulation


class _Stages:
    """Time at which each stage is free again, and the time that all have used."""

    def __init__(self, num_stages: int) -> None:
        self._free = [0.0] * num_stages
        self._busy = self._seconds = 0.0

    def run(self, now: float, seconds: float) -> float:
        """Run a step that is launched now; return when it ends."""
        ended = self._free[-1]
        end = now
        for stage, free in enumerate(self._free):
            end = self._free[stage] = max(end, free) + seconds / len(self._free)
        self._busy += seconds
        self._seconds += end - max(now, ended)
        return end

    @property
    def idle_share(self) -> float:
        """Return the share of the stages' time in which they had no step, while steps were under way."""
        return 1 - self._busy / (len(self._free) * self._seconds) if self._seconds else 0.0


def latencies(first: list[float], between: list[float]) -> dict[str, float]:
    """Return percentiles of milliseconds to the first token, and between tokens."""
    return {
        "ttft_p50_ms": float(np.percentile(first, 50)),
        "ttft_p99_ms": float(np.percentile(first, 99)),
        "tbt_p50_ms": float(np.percentile(between, 50)),
        "tbt_p99_ms": float(np.percentile(between, 99)),
        "tbt_max_ms": max(between),
    }


def summarize(simulation: Simulation) -> dict[str, float]:
    """Return milliseconds to the first token and between tokens, throughput, stalls and preemptions.

    A stall is a gap between two tokens of an answer that spans a step in which the answer had no part.
    """
    first = [1e3 * (request.times[0] - request.arrival.time) for request in simulation.served]
    gaps = simulation.gaps()
    between = [1e3 * seconds for seconds, _ in gaps]
    tokens = sum(len(request.times) for request in simulation.served)
    prompts = sum(request.arrival.num_prompt for request in simulation.served)
    return latencies(first, between) | {
        "stalls": sum(steps > 1 for _, steps in gaps),
        "longest_stall_steps": max(steps for _, steps in gaps) - 1,
        "output_tokens_per_s": tokens / simulation.seconds,
        "prompt_tokens_per_s": prompts / simulation.seconds,
        "seconds": simulation.seconds,
        "steps": len(simulation.step_tokens),
        "most_tokens_a_step": max(simulation.step_tokens),
        "preemptions": simulation.num_preemptions,
    }


def _lengths(rng: np.random.Generator, count: int, median: float, p90: float, most: int) -> np.ndarray:
    sigma = np.log(p90 / median) / NORMAL_P90
    return np.clip(np.rint(rng.lognormal(np.log(median), sigma, count)), 1, most)


def _sequence(arrival: Arrival, number: int) -> Sequence:
    params = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(END,), seed=number)
    return Sequence([0] * arrival.num_prompt, params, arrival=number)


def _drawn(entries: Iterable[StepEntry]) -> list[Sequence]:
    """Return sequences whose last known token a step computes; their next one is pending."""
    drawn = [sequence for sequence, start, count, _ in entries if start + count == sequence.num_tokens]
    for sequence in drawn:
        sequence.num_pending += 1
    return drawn


def _finish(due: _InFlight, scheduler: Scheduler, served: dict[Sequence, _Served], now: float, step: int) -> None:
    """Take the tokens of a finished step; remove the sequences that ended."""
    for sequence in due.drawn:
        request = served[sequence]
        request.times.append(now)
        request.steps.append(step)
        sequence.num_pending -= 1
        sequence.append(END if len(request.times) == request.arrival.num_output else 0)
    for sequence, _, _, _ in due.entries:
        if sequence in scheduler.running:
            scheduler.blocks.commit(sequence)
        if sequence.finish_reason is not None:
            scheduler.remove(sequence)
