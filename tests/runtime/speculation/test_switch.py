"""The switch drafts where it gains, stops where it loses, tries again, and bounds the loss."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.pacing.cost_model import StepClock
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation import switch as speculation_switch
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.speculation.switch import Load, SpeculationSwitch
from tests.model_cases import VOCAB_SIZE, compiled
from tests.runtime.speculation.test_speculator import Oracle, assert_unmoved, workload

PLAIN = 0.005  # seconds


class Simulation:
    """Steps of one load, whose drafted ones take ``cost`` plain steps and give ``tokens`` on average.

    Args:
        noise: share of a step's time that is random, to both sides.
    """

    def __init__(self, seed: int = 0, noise: float = 0.03) -> None:
        self.switch = SpeculationSwitch()
        self.random = random.Random(seed)
        self.noise = noise
        self.seconds = self.tokens = 0.0

    def run(self, steps: int, cost: float, tokens: float, load: Load | None = None) -> int:
        """Returns how many steps drafted."""
        load = Load(8) if load is None else load
        num_drafted = 0
        for _ in range(steps):
            drafted = self.switch.wants(load)
            noise = 1.0 + self.noise * self.random.uniform(-1.0, 1.0)
            seconds = noise * PLAIN * (cost if drafted else 1.0)
            got = self.random.choice([1.0, 2.0 * tokens - 1.0]) if drafted else 1.0
            self.switch.observe(load, seconds, got, drafted=drafted)
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + got
            num_drafted += drafted
        return num_drafted

    @property
    def lost(self) -> float:
        """Plain steps that the tokens took longer than plainly."""
        return self.seconds / PLAIN - self.tokens


def test_a_gain_is_found_and_kept():
    simulation = Simulation()
    assert simulation.run(1000, cost=1.5, tokens=3.5) > 950
    assert simulation.switch.gain(Load(8)) == pytest.approx(3.5 / 1.5, rel=0.4)


def test_a_loss_is_given_up_within_a_few_steps():
    simulation = Simulation()
    assert simulation.run(60, cost=2.0, tokens=1.2) < 10
    assert simulation.run(10_000, cost=2.0, tokens=1.2) < 300
    assert simulation.lost / simulation.tokens < 0.03


def test_it_comes_back_when_drafts_are_right_again():
    simulation = Simulation()
    simulation.run(2000, cost=1.5, tokens=1.05)
    simulation.run(300, cost=1.5, tokens=4.0)
    assert simulation.run(100, cost=1.5, tokens=4.0) > 95


@pytest.mark.parametrize("seconds", [1.0, 60.0, 3600.0])
def test_one_slow_step_does_not_end_drafts_for_everybody(seconds):
    """As of one request with a context that no other has: a plain step takes 5 ms."""
    simulation = Simulation()
    simulation.run(20, cost=1.5, tokens=4.0)
    simulation.switch = SpeculationSwitch()
    while not simulation.switch.wants(Load(8)):
        simulation.switch.observe(Load(8), PLAIN, 1.0, drafted=False)
    for _ in range(speculation_switch.WARM_UP):
        simulation.switch.observe(Load(8), PLAIN, 4.0, drafted=True)
    simulation.switch.observe(Load(8), seconds, 4.0, drafted=True)
    simulation.run(1500, cost=1.5, tokens=4.0)
    assert simulation.run(200, cost=1.5, tokens=4.0) > 190


def test_drafts_that_always_take_long_are_tried_ever_more_rarely():
    simulation = Simulation()
    simulation.run(200_000, cost=400.0, tokens=1.0)
    assert simulation.run(100_000, cost=400.0, tokens=1.0) < 10


def test_a_load_is_tried_again_though_another_one_drafts_between():
    """One request's bad guesses among two decodes, while eight decodes draft well."""
    simulation = Simulation()
    for _ in range(10):
        simulation.run(40, cost=1.5, tokens=4.0)
        simulation.run(10, cost=1.5, tokens=1.0, load=Load(2))
    for _ in range(60):
        simulation.run(10, cost=1.5, tokens=4.0)
        simulation.run(10, cost=1.5, tokens=4.0, load=Load(2))
    assert simulation.run(50, cost=1.5, tokens=4.0, load=Load(2)) > 45


def test_it_stops_when_drafts_go_wrong():
    simulation = Simulation()
    simulation.run(500, cost=1.5, tokens=4.0)
    simulation.run(60, cost=1.5, tokens=1.0)
    assert simulation.run(1000, cost=1.5, tokens=1.0) < 100


def test_late_graph_capture_does_not_disable_drafts():
    simulation = Simulation()
    simulation.run(100, cost=1.5, tokens=3.5)
    simulation.run(1, cost=1000.0, tokens=3.5)
    assert simulation.run(500, cost=1.5, tokens=3.5) > 480


def test_each_load_is_judged_by_itself():
    simulation = Simulation()
    simulation.run(2000, cost=3.0, tokens=2.0, load=Load(64))
    assert simulation.run(400, cost=1.4, tokens=3.0, load=Load(1)) > 350
    assert simulation.run(100, cost=3.0, tokens=2.0, load=Load(64)) < 20
    assert not simulation.switch.wants(Load(0)) and not simulation.switch.wants(Load(64, 500))


def test_an_empty_account_ends_trials_of_other_loads_too():
    simulation = Simulation()
    loads = [Load(1 << power) for power in range(10)]
    drafted = [simulation.run(12, cost=8.0, tokens=1.0, load=load) for load in loads]
    assert 0 < drafted[0] <= speculation_switch.WARM_UP + 1 and drafted[1:] == [0] * 9


def test_plain_steps_are_measured_again():
    """Plain steps that became ten times as fast are noticed, though speculation is on."""
    simulation = Simulation()
    simulation.run(300, cost=1.0, tokens=3.0)
    switch, drafted = simulation.switch, 0
    for _ in range(1000):
        wants = switch.wants(Load(8))
        switch.observe(Load(8), PLAIN if wants else PLAIN / 10, 3.0 if wants else 1.0, drafted=wants)
        drafted += wants
    assert drafted < 400


phases = st.lists(
    st.tuples(st.integers(1, 400), st.floats(0.8, 8.0), st.floats(1.0, 5.0), st.sampled_from([1, 8, 30])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200)
@given(phases=phases, seed=st.integers(0, 99))
def test_lost_time_is_bounded(phases, seed):
    """Whatever drafts cost and give, also as that changes: RATE, DEPOSIT, one overdraft, and the steps not counted."""
    simulation = Simulation(seed, noise=0.0)
    for steps, cost, tokens, decodes in phases:
        simulation.run(steps, cost, tokens, Load(decodes))
    uncounted = 3 * speculation_switch.WARM_UP * 8.0
    allowed = speculation_switch.DEPOSIT + 8.0 + speculation_switch.RATE * simulation.tokens
    assert simulation.lost <= allowed + uncounted


class Fickle:
    """A switch that says yes or no at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def wants(self, load):
        return self.random.random() < 0.5

    def observe(self, load, seconds, tokens, *, drafted):
        pass


@settings(max_examples=6)
@given(seed=st.integers(0, 99), seats=st.integers(1, 8), blocks=st.sampled_from([60, 400]))
def test_switching_moves_no_bit(seed, seats, blocks, device):
    """Plain steps that overlap, drained before each step that drafts."""
    config = EngineConfig(num_blocks=blocks, block_size=16, max_num_seqs=seats, overlap=True)
    drafter = Oracle(workload("qwen3", device)[2], 0.6, seed)
    assert_unmoved("qwen3", device, config, SpeculationConfig(drafter=drafter), Fickle(seed))


class Wrong:
    """Drafts that are never right."""

    def propose(self, sequences, max_depth):
        return [DraftTree.chain([(s.token_ids[-1] + 1) % VOCAB_SIZE] * min(4, m)) for s, m in zip(sequences, max_depth)]

    def forget(self, sequence):
        pass


def test_switched_off_steps_overlap_again():
    """A clock that makes drafts a loss: after the trial, a step is in flight whenever the engine is not."""
    config = EngineConfig(num_blocks=100, block_size=16, overlap=True)
    speculation = SpeculationConfig(drafter=Wrong())
    engine = compiled("qwen3", torch.float32).engine(config, speculation=speculation)
    pipeline, now = engine._pipeline, 0.0

    def clock() -> float:
        """Half a second for each look at the clock, and three more where a step drafts."""
        nonlocal now
        now += 0.5 + 3.0 * (engine.speculator.num_drafted > clock.seen)
        clock.seen = engine.speculator.num_drafted
        return now

    clock.seen = 0
    pipeline._clock = StepClock(clock)
    engine.add_request([3, 4, 5], SamplingParams(max_tokens=120, seed=1))
    busy = []
    while engine.has_unfinished_requests:
        engine.step()
        busy.append(pipeline.busy)
    assert 0 < engine.speculator.num_drafted < 4 * 12
    assert all(busy[40:-1])
