"""An engine restarts lost workers and continues with the bits of an undisturbed run."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile.errors import EngineError, WorkerError
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, engine_over, new_worker
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.processes.restarts import WINDOW_SECONDS, Restarts
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.worker import StepWork, Worker
from tests.runtime.engine_cases import (
    LETTERS,
    MARK,
    config_of,
    engine_configs,
    prompt_of,
    run,
    sampling_params,
    tiny_model,
)
from tests.runtime.grammar_cases import small_tokenizer
from tests.runtime.speculation.test_speculator import Oracle

MATCHING = SamplingParams(temperature=1.0, seed=6, max_tokens=20, grammar=Grammar.regex("(ab|ba|[a-c]){4,30}"))
NEVER = repeat(False)


class MortalWorker:
    """A Worker that is lost at some of its calls, with its KV cache and all that it had launched.

    Args:
        make: makes the worker.
        losses: whether each call of ``launch`` and ``collect`` finds it lost.
        vain: whether each restart does.

    Attributes:
        kills: whether it is lost by a step.
    """

    accepts_rejection = is_alone = False
    head_shares, idle_share = 1, 0.0
    shortest_step = math.inf  # of a pipeline's stages; 0.0 has one more step under way than stages

    def __init__(
        self, make: Callable[[], Worker], losses: Iterator[bool], vain: Iterator[bool] = NEVER, num_stages: int = 1
    ) -> None:
        self._make, self._losses, self._vain = make, losses, vain
        self.num_stages = num_stages
        self.num_lost = 0
        self.kills: Callable[[StepWork], bool] = lambda work: False
        self._begin()

    def _begin(self) -> None:
        self.alive = True
        self._worker = self._make()
        self._worker.runner.fill_caches(float("nan"))  # whoever reads what was lost finds no number

    def _live(self, lost: bool = False) -> Worker:
        assert self.alive, "nothing is asked of what is lost but to restart"
        if next(self._losses, False) or lost:
            self.alive = False
            self.num_lost += 1
            raise WorkerError("worker of rank 1 of 2 failed: it was lost", 1)
        return self._worker

    def launch(self, work: Any) -> Any:
        return self._live(self.kills(work)).launch(work)

    def collect(self, launched: Any) -> Any:
        return self._live().collect(launched)

    def restart(self) -> None:
        assert not self.alive
        if next(self._vain, False):
            self.num_lost += 1
            raise WorkerError("worker of rank 0 of 2 failed: it was lost while it started", 0)
        self._begin()

    @property
    def sampler(self) -> Any:
        return self._worker.sampler


def mortal_engine(
    config: EngineConfig,
    losses: Iterator[bool],
    *,
    vain: Iterator[bool] = NEVER,
    num_stages: int = 1,
    speculation: SpeculationConfig | None = None,
    tokenizer: Any = LETTERS,
) -> tuple[Engine, MortalWorker]:
    model = tiny_model("cpu")
    facts, forward = model.facts, model.executor.forwards.plain
    make = lambda: new_worker(facts, forward, config, config.num_blocks or 0)  # noqa: E731
    worker = MortalWorker(make, losses, vain, num_stages)
    return engine_over(worker, config.num_blocks or 0, EngineModel(facts), config, tokenizer, speculation), worker


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """All outputs of each request, as deltas and whole, without times."""
    deltas: dict[str, list[Any]] = {}
    names = [engine.add_request(*item, stream_text=True, output_kind="delta") for item in requests]
    while engine.has_unfinished_requests:
        for output in engine.step():
            item = deltas.setdefault(output.request_id, [{}, [], None, 0])
            for sample in output.outputs:
                calls = item[0].setdefault(sample.index, [[], [], "", None, None])
                calls[0] += sample.token_ids
                calls[1] += sample.logprobs or []
                calls[2] += sample.text
                calls[3:] = sample.finish_reason, sample.stop_reason
            item[1] += output.prompt_logprobs or []
            item[2:] = output.error, output.seed
        engine.check()
    return [deltas[name] for name in names]


def some_losses(numbers: list[int]) -> Iterator[bool]:
    """A loss after so many calls without one, and so on."""
    return chain.from_iterable([*repeat(False, number), True] for number in numbers)


LOSSES = st.lists(st.integers(0, 25), min_size=1, max_size=3)  # four might block a request, as they should


@settings(max_examples=6)
@given(
    params=st.lists(sampling_params(), min_size=1, max_size=4),
    config=engine_configs(161, 61),
    numbers=LOSSES,
    vain=st.booleans(),
    num_stages=st.sampled_from([1, 1, 2]),
    shortest_step=st.sampled_from([0.0, math.inf]),
)
def test_losses_at_any_call_move_no_bit(params, config, numbers, vain, num_stages, shortest_step):
    if num_stages > 1:
        config = replace(config, overlap=False)
    requests = [(prompt_of(5 + 17 * index, index), item) for index, item in enumerate(params)]
    undisturbed, _ = mortal_engine(config, NEVER, num_stages=num_stages)
    expected = answers(undisturbed, requests)
    disturbances = {"vain": iter([vain]), "num_stages": num_stages}
    engine, worker = mortal_engine(replace(config, restarts=9), some_losses(numbers), **disturbances)
    worker.shortest_step = shortest_step
    assert answers(engine, requests) == expected
    assert worker.num_lost == engine.stats.num_restarts
    assert answers(engine, requests) == expected  # nothing of a cache that was lost is found


@settings(max_examples=4)
@given(accuracy=st.sampled_from([0.0, 0.8, 1.0]), numbers=LOSSES, config=engine_configs(161))
def test_lost_workers_change_no_bit_with_drafts(accuracy, numbers, config):
    requests = [(prompt_of(20, seed), SamplingParams(temperature=0.8, seed=seed, max_tokens=20)) for seed in range(3)]
    requests.append((prompt_of(9), SamplingParams(n=2, seed=9, max_tokens=12, repetition_penalty=1.3, logprobs=2)))
    outputs = mortal_engine(config, NEVER)[0].generate(*map(list, zip(*requests)), progress=False)
    drafter = Oracle(outputs, accuracy, seed=1)
    engine, worker = mortal_engine(
        config, some_losses(numbers), speculation=SpeculationConfig(drafter=drafter, switch="always")
    )
    actual = engine.generate(*map(list, zip(*requests)), progress=False)
    assert [output.outputs for output in actual] == [output.outputs for output in outputs]
    assert engine.speculator.error is None and worker.num_lost == engine.stats.num_restarts > 0
    engine.check()


def test_grammar_continues_after_restart():
    requests = [(prompt_of(9), MATCHING), (prompt_of(20), replace(MATCHING, n=2, seed=1))]
    given = {"tokenizer": small_tokenizer()}
    expected = answers(mortal_engine(config_of(), NEVER, **given)[0], requests)
    engine, worker = mortal_engine(config_of(), some_losses([7, 5]), **given)
    assert answers(engine, requests) == expected and worker.num_lost == 2


def test_request_canceled_during_restart_ends():
    engine, worker = mortal_engine(config_of(overlap=True), some_losses([6]))
    names = [engine.add_request(prompt_of(9, seed), SamplingParams(seed=seed, max_tokens=20)) for seed in range(3)]
    restart = worker.restart

    def restart_meanwhile() -> None:
        engine.cancel(names[1])
        restart()

    worker.restart = restart_meanwhile
    outputs = {output.request_id: output.outputs[0] for output in run(engine)}
    assert [outputs[name].finish_reason for name in names] == ["length", "abort", "length"]
    assert engine.stats.num_restarts == 1


@pytest.mark.parametrize("restarts", [0, 2])
def test_more_losses_than_allowed_end_the_engine_with_their_error(restarts):
    engine, worker = mortal_engine(config_of(restarts=restarts), repeat(True))
    engine.add_request(prompt_of(9), SamplingParams(max_tokens=5))
    with pytest.raises(EngineError, match=r"a step failed, .*rank 1 of 2 failed: it was lost") as caught:
        run(engine)
    assert isinstance(caught.value.__cause__, WorkerError) and caught.value.__cause__.rank == 1
    assert worker.num_lost == restarts + 1 and engine.failed
    with pytest.raises(EngineError, match="this engine failed before"):
        engine.add_request(prompt_of(9))


def test_restarts_are_limited_by_time_and_progress():
    now, lost = 0.0, WorkerError("lost", 0)
    restarts = Restarts(2, clock=lambda: now)
    started = []
    worker = type("Remote", (), {"restart": lambda _: started.append(now)})()
    for _ in range(2):
        restarts.restart(worker, lost)
        restarts.progressed()
    with pytest.raises(WorkerError, match="lost"):
        restarts.restart(worker, lost)
    now = WINDOW_SECONDS
    for _ in range(2):  # no step since
        restarts.restart(worker, lost)
        now += WINDOW_SECONDS
    with pytest.raises(WorkerError, match="lost"):
        restarts.restart(worker, lost)
    assert started == [0.0, 0.0, 60.0, 120.0] and restarts.count == 4


def test_workers_that_were_closed_are_not_started_again():
    started = []
    worker = type("Remote", (), {"restart": lambda _: started.append(1)})()
    with pytest.raises(WorkerError, match="were closed"):
        Restarts(5).restart(worker, WorkerError("the workers were closed"))
    assert not started


def test_refused_restart_ends_engine():
    engine, worker = mortal_engine(config_of(), some_losses([3]))
    engine.add_request(prompt_of(9), SamplingParams(max_tokens=5))

    def refuse() -> None:
        raise EngineError("the workers are lost, and with them weights")

    worker.restart = refuse
    with pytest.raises(EngineError, match="and with them weights"):
        run(engine)
    assert engine.failed


def reads_mark(work: StepWork) -> bool:
    return MARK in work.arrays.input_ids.tolist()


def draws_late(work: StepWork) -> bool:
    """A row of the request of seed 13, five tokens into its answer."""
    return any(row.params.seed == 13 and row.num_generated >= 5 for row in work.rows)


@pytest.mark.parametrize("kills", [reads_mark, draws_late])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_request_that_crashes_workers_ends_alone(kills, num_stages):
    """It ends workers twice among others and twice alone. The others keep their bits."""
    config = config_of(overlap=num_stages == 1)
    item = {"temperature": 1.0, "max_tokens": 16, "logprobs": 1}
    requested = [SamplingParams(seed=10 + row, n=1 + row % 2, **item) for row in range(5)]
    requests = [(prompt_of(9 + 20 * row, row), item) for row, item in enumerate(requested)]
    expected = answers(mortal_engine(config, NEVER, num_stages=num_stages)[0], requests)
    requests[3][0][4] = MARK if kills is reads_mark else requests[3][0][4]
    engine, worker = mortal_engine(config, NEVER, num_stages=num_stages)
    worker.kills = kills
    actual = answers(engine, requests)
    assert isinstance(actual[3][2], EngineError) and "crashed 2 times while they served it alone" in str(actual[3][2])
    assert [item for row, item in enumerate(actual) if row != 3] == [
        item for row, item in enumerate(expected) if row != 3
    ]
    assert engine.stats.num_restarts == 4
    worker.kills = lambda work: False
    requests[3] = (prompt_of(69, 3), requested[3])
    assert answers(engine, requests) == expected


def test_new_requests_wait_for_suspects_and_are_served():
    """Suspects that are canceled before or during their trial delay no other request."""
    engine, worker = mortal_engine(config_of(), some_losses([6, 4]))
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20) for seed in range(4)]
    names = [engine.add_request(prompt_of(30, seed), params[seed]) for seed in range(3)]
    outputs = {}

    def step() -> None:
        outputs.update((output.request_id, output.outputs[0]) for output in engine.step())
        engine.check()

    while worker.num_lost < 2:
        step()
    step()
    assert len(engine._scheduler.running) == 1 and engine.stats.num_waiting == 2
    trial = next(iter(engine._scheduler.running)).seed
    engine.cancel(names[trial])
    engine.cancel(names[(trial + 1) % 3])
    names.append(engine.add_request(prompt_of(30, 3), params[3]))
    step()
    assert [sequence.seed for sequence in engine._scheduler.running] == [(trial + 2) % 3]
    while engine.has_unfinished_requests:
        step()
    last = (trial + 2) % 3
    requests = [(prompt_of(30, seed), params[seed]) for seed in (last, 3)]
    expected = [item[0][0][0] for item in answers(mortal_engine(config_of(), NEVER)[0], requests)]
    assert [outputs[names[seed]].token_ids for seed in (last, 3)] == expected
    assert [outputs[names[seed]].finish_reason for seed in (trial, (trial + 1) % 3)] == ["abort", "abort"]
