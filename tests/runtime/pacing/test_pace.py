"""Steps with decodes stay within their time on a simulated clock, and no answer changes."""

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import H200_8B, StepCost, log_normal_trace, simulate, summarize
from detcompile.errors import InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.pacing.cost_model import CostModel, StepShape
from detcompile.runtime.pacing.pace import LEAST_CHUNK, Pace
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.step.builder import StepEntry
from tests.model_cases import compiled

SLO = 25.0  # milliseconds


class Hidden:
    """The true cost of steps, unknown to the model: noise, drift, and rarely a step that takes ten times as long."""

    def __init__(self, cost: StepCost = H200_8B, *, noise: float = 0.1, drift: float = 0.0, seed: int = 0) -> None:
        self._cost = cost
        self._noise = noise
        self._drift = drift
        self._random = np.random.default_rng(seed)
        self._num_steps = 0

    def of(self, entries: Iterable[StepEntry]) -> tuple[float, int]:
        seconds, decode_keys = self._cost.of(entries)
        self._num_steps += 1
        seconds *= 1 + self._drift * self._num_steps / 5000
        if self._num_steps % 1500 == 700:
            seconds *= 10
        return seconds * float(np.exp(self._random.normal(0, self._noise))), decode_keys


def run(config: EngineConfig, rate: float, hidden: Hidden, requests: int = 150) -> dict[str, float]:
    return summarize(simulate(log_normal_trace(requests, rate), config, 20_000, hidden))  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [4.0, 6.0, 8.0, 1e6])
@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_gaps_hold_the_slo_at_every_load(rate: float, drift: float) -> None:
    paced = run(EngineConfig(max_num_seqs=256, tbt_slo=SLO), rate, Hidden(drift=drift))
    free = run(EngineConfig(max_num_seqs=256), rate, Hidden(drift=drift))
    assert paced["tbt_p99_ms"] <= 1.1 * SLO < free["tbt_p99_ms"]


def test_no_fixed_budget_that_holds_the_slo_gives_more() -> None:
    paced = run(EngineConfig(max_num_seqs=256, tbt_slo=SLO), 8.0, Hidden(noise=0.02))
    assert paced["tbt_p99_ms"] <= 1.1 * SLO
    for budget in (128, 256, 384, 512, 768, 1024):
        fixed = run(EngineConfig(max_num_seqs=256, max_num_batched_tokens=budget), 8.0, Hidden(noise=0.02))
        if fixed["tbt_p99_ms"] <= 1.1 * SLO:
            assert paced["output_tokens_per_s"] >= 0.95 * fixed["output_tokens_per_s"], budget


def test_an_slo_that_decodes_alone_exceed_starves_nobody() -> None:
    slow = StepCost(base=0.1)
    actual = run(EngineConfig(max_num_seqs=256, tbt_slo=SLO), 8.0, Hidden(slow), 40)
    tokens = sum(arrival.num_output for arrival in log_normal_trace(40, 8.0))
    assert round(actual["output_tokens_per_s"] * actual["seconds"]) == tokens


@given(
    cost=st.tuples(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6), st.floats(1e-11, 1e-8)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_the_model_finds_the_cost_of_steps_that_it_has_not_seen(cost: tuple[float, ...], seed: int) -> None:
    """To 8 %; of a step far shorter than those that were seen, whose noise hides it, to 0.5 % of a usual one."""
    base, token, key, pair = cost
    usual = base + token * 300 + key * 100_000 + pair * 500_000
    random, model = np.random.default_rng(seed), CostModel()

    def draw() -> tuple[StepShape, float]:
        shape = StepShape(*(int(random.integers(least, most)) for least, most in ((1, 600), (0, 200_000), (0, 10**6))))
        seconds = base + token * shape.num_tokens + key * shape.decode_keys + pair * shape.prefill_pairs
        return shape, seconds

    for number in range(320):
        shape, seconds = draw()
        model.observe(shape, seconds * (20 if number % 100 == 50 else float(random.uniform(0.98, 1.02))))
    for _ in range(20):
        shape, seconds = draw()
        assert model.seconds(shape) == pytest.approx(seconds, rel=0.08, abs=0.005 * usual)


def test_a_step_that_was_predicted_to_take_no_time_is_counted() -> None:
    """Where all steps so far took what their keys explain, one without keys should take none."""
    model = CostModel()
    for number in range(1, 200):
        model.observe(StepShape(1, 1000 * number, 0.0), 1e-3 * number)
    assert model.known and model.seconds(StepShape(1, 0, 0.0)) == 0.0
    assert model.observe(StepShape(1, 0, 0.0), 1.0) == pytest.approx(1.0, abs=1e-5)
    assert model.observe(StepShape(1, 0, 0.0), 0.0) == 0.0
    for number in range(1, 50):  # until it is fitted anew
        model.observe(StepShape(1, 1000 * number, 0.0), 1e-3 * number)
    assert model.margin < 0.5


@given(steps=st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 10**6), st.floats(1e-5, 10)), max_size=100))
@settings(max_examples=60, deadline=None)
def test_chunk_is_at_most_the_requested_size(steps: list[tuple[int, int, float]]) -> None:
    pace = Pace(SLO / 1e3)
    for tokens, keys, seconds in steps:
        pace.observe(StepShape(tokens, keys, 0.0), seconds)
    decodes = StepShape(10, 5000, 0.0)
    for wanted in (1, 63, 64, 65, 1000):
        first = pace.chunk(decodes, 100, wanted)
        second = pace.chunk(decodes._replace(prefill_pairs=1.0), 100, wanted)
        assert min(wanted, LEAST_CHUNK) <= first <= wanted and 0 <= second <= wanted
        assert {count for count in (first, second) if count != wanted and count % LEAST_CHUNK} == set()
        assert pace.chunk(StepShape(), 100, wanted) == wanted  # nobody waits


def test_longer_prompts_and_more_decodes_shrink_chunks() -> None:
    pace = Pace(SLO / 1e3)
    random = np.random.default_rng(0)
    for _ in range(400):
        shape = StepShape(*(int(random.integers(1, most)) for most in (600, 10**5, 10**6)))
        pace.observe(shape, H200_8B.seconds(*shape))
    cases = (10**4, 0), (10**4, 20_000), (2 * 10**5, 0)
    chunks = [pace.chunk(StepShape(16, keys, 0.0), start, 4096) for keys, start in cases]
    assert chunks[0] > chunks[1] >= LEAST_CHUNK and chunks[0] > chunks[2] >= LEAST_CHUNK
    assert not pace.full(StepShape(16, 10**4, 0.0)) and pace.full(StepShape(16, 10**6, 0.0))


def test_slo_requires_stall_free_scheduler() -> None:
    with pytest.raises(InvalidInput, match="stall_free"):
        EngineConfig(tbt_slo=25.0, scheduler="prefill_first")
    with pytest.raises(InvalidInput, match="tbt_slo"):
        EngineConfig(tbt_slo=0.0)


class _Drawn(Pace):
    """Chunks at random, whatever steps take."""

    def __init__(self, seed: int) -> None:
        super().__init__(SLO / 1e3)
        self._random = np.random.default_rng(seed)

    def full(self, shape: StepShape) -> bool:
        return bool(shape.decode_keys and self._random.random() < 0.3)

    def chunk(self, shape: StepShape, start: int, wanted: int) -> int:
        return int(self._random.integers(1 if shape.prefill_pairs == 0 else 0, wanted + 1)) if wanted else 0


@pytest.fixture(scope="module")
def answers() -> Iterator[tuple[list, list, list]]:
    """Prompts, parameters and answers of an engine without a pace."""
    model, random = compiled("tiny", torch.float32), np.random.default_rng(5)
    prompts = [random.integers(3, 2000, int(random.integers(1, 150))).tolist() for _ in range(24)]
    params = [SamplingParams(max_tokens=12, seed=row, temperature=0.5 * (row % 3), logprobs=1) for row in range(24)]
    engine = model.engine(EngineConfig(num_blocks=200, block_size=16, max_num_batched_tokens=512))
    yield prompts, params, [output.outputs for output in engine.generate(prompts, params, progress=False)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_drawn_at_random_change_no_bit(seed: int, overlap: bool, answers: tuple[list, list, list]) -> None:
    prompts, params, expected = answers
    settings = {"num_blocks": 60, "block_size": 16, "max_num_batched_tokens": 512, "overlap": overlap, "tbt_slo": SLO}
    engine = compiled("tiny", torch.float32).engine(EngineConfig(**settings))
    engine._scheduler.pace = _Drawn(seed)
    actual = engine.generate(prompts, params, progress=False)
    engine.check()
    assert [output.outputs for output in actual] == expected


def test_engine_learns_step_costs(answers: tuple[list, list, list]) -> None:
    prompts, params, expected = answers
    engine = compiled("tiny", torch.float32).engine(EngineConfig(num_blocks=200, block_size=16, tbt_slo=1e-3))
    actual = engine.generate(prompts, params, progress=False)
    assert [output.outputs for output in actual] == expected
    stats, pace = engine.stats, engine._scheduler.pace
    assert pace is not None and pace.model.known and stats.num_late_steps > 0 and stats.cost_error_seconds > 0
    assert all(record.num_prefill_tokens <= LEAST_CHUNK for record in stats.recent if record.num_decodes)
