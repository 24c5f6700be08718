"""One engine, many threads and coroutines: each gets its own outputs, with the bytes of a run alone; none is lost."""

import _thread
import asyncio
import collections
import signal
import threading
import time
from unittest import mock

import pytest
import torch

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.turns import Place, Turns
from tests.runtime.engine_cases import GREEDY, OVERLAP, config_of, engine_of, prompt_of, tiny_model

NUM_THREADS = 6


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=8 + seed % 5, seed=seed, logprobs=1)


def together(*calls) -> list:
    """What calls return, or raise, that run at the same time."""
    results, gate = [None] * len(calls), threading.Barrier(len(calls))

    def run(place: int) -> None:
        gate.wait()
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a caller waits for ever"
    return results


@OVERLAP
def test_generate_stream_and_step_from_many_threads_serve_everybody(overlap, device):
    model = tiny_model(device)
    prompts = [prompt_of(12 + seed, seed) for seed in range(4 * NUM_THREADS)]
    alone = engine_of(model, config_of()).generate(prompts, [params(s) for s in range(len(prompts))], progress=False)
    engine = engine_of(model, config_of(overlap=overlap))

    def generate(thread: int) -> dict:
        mine = [4 * thread, 4 * thread + 1]
        outputs = engine.generate([prompts[i] for i in mine], [params(i) for i in mine], progress=False)
        return dict(zip(mine, outputs))

    def stream(thread: int) -> dict:
        async def last(index: int):
            return [output async for output in engine.stream(prompts[index], params(index))][-1]

        async def both():
            return await asyncio.gather(last(4 * thread + 2), last(4 * thread + 3))

        return dict(zip((4 * thread + 2, 4 * thread + 3), asyncio.run(both())))

    def step() -> dict:
        names = {engine.add_request(prompts[i], params(i)): i for i in range(3)}
        actual = {}
        while len(actual) < len(names):
            actual |= {names[output.request_id]: output for output in engine.step() if output.finished}
            engine.check()
            assert engine.stats.num_steps >= 0
        return actual

    callers = [lambda item=item, t=t: item(t) for t in range(NUM_THREADS) for item in (generate, stream)]
    results = together(*callers, step)
    for actual in results:
        assert isinstance(actual, dict), actual
        for index, output in actual.items():
            assert output.error is None and output.outputs == alone[index].outputs
            assert output.prompt_token_ids == prompts[index]
    deadline = time.monotonic() + 30  # of the thread's last step
    while engine.has_unfinished_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.check()
    assert not engine.has_unfinished_requests


def test_a_compiled_model_generates_in_many_threads(device):
    model = tiny_model(device)
    rows = [[prompt_of(9, seed), prompt_of(9, seed + 50)] for seed in range(NUM_THREADS)]
    batches = [torch.tensor(row, device=device) for row in rows]
    expected = [(model.generate(ids, max_new_tokens=6), model(ids).logits) for ids in batches]
    calls = [lambda ids=ids: (model.generate(ids, max_new_tokens=6), model(ids).logits) for ids in batches]
    for actual, item in zip(together(*calls), expected):
        assert isinstance(actual, tuple), actual
        assert all(torch.equal(one, other) for one, other in zip(actual, item))


def test_of_equal_ids_that_race_one_gets_in(device):
    engine = engine_of(tiny_model(device), config_of())
    for attempt in range(20):
        name = f"mine-{attempt}"
        results = together(*[lambda name=name: engine.add_request(prompt_of(5), GREEDY, request_id=name)] * 4)
        assert sum(actual == name for actual in results) == 1
        assert sum(isinstance(actual, InvalidInput) and "in use" in str(actual) for actual in results) == 3
    finished = []
    while engine.has_unfinished_requests:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert sorted(finished) == sorted(f"mine-{attempt}" for attempt in range(20))


def test_an_id_that_looks_like_the_engines_own_takes_nobodys_place(device):
    engine = engine_of(tiny_model(device), config_of())
    for kind in ("request", "generate", "stream"):
        for number in range(6):
            engine.add_request(prompt_of(5), GREEDY, request_id=f"{kind}-{number}")
    engine.add_request(prompt_of(5), GREEDY)
    [output] = engine.generate(prompt_of(5), GREEDY, progress=False)
    assert output.error is None and len(output.outputs[0].token_ids) == 6


def test_changing_outputs_does_not_affect_engine(device):
    model = tiny_model(device)
    item = SamplingParams(max_tokens=10, seed=1, logprobs=1, prompt_logprobs=1)
    [expected] = engine_of(model, config_of()).generate(prompt_of(9), item, progress=False)
    engine = engine_of(model, config_of())
    engine.add_request(prompt_of(9), item)
    seen = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            [sample] = output.outputs
            seen.append(list(sample.token_ids))
            if output.finished:
                assert output.outputs == expected.outputs and output.prompt_logprobs == expected.prompt_logprobs
                assert output.prompt_token_ids == prompt_of(9)
            sample.token_ids.clear()
            sample.logprobs.clear()
            output.prompt_token_ids.clear()
            output.prompt_logprobs.clear()
            output.metrics.token_times.clear()
            output.outputs.clear()
    tokens = expected.outputs[0].token_ids
    assert seen == [tokens[: count + 1] for count in range(len(tokens))]


@pytest.fixture
def interruptible():
    """Processes that a shell put in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_only_requests_of_its_thread(device):
    model = tiny_model(device)
    long = SamplingParams(max_tokens=400, temperature=0.0)
    [expected] = engine_of(model, config_of()).generate(prompt_of(9), long, progress=False)
    engine, results = engine_of(model, config_of()), []
    other = threading.Thread(
        target=lambda: results.append(engine.generate(prompt_of(9), long, progress=False)), daemon=True
    )
    other.start()
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt_of(9, seed) for seed in range(5)], SamplingParams(max_tokens=1500), progress=False)
    other.join(120)
    assert not engine.failed and results[0][0].outputs == expected.outputs
    assert not engine.has_unfinished_requests and engine.stats.num_free_blocks == engine.stats.num_blocks
    engine.check()


@pytest.mark.parametrize("raised", [LookupError, KeyboardInterrupt])
def test_interrupted_generate_queues_nothing(raised, device):
    engine = engine_of(tiny_model(device), config_of())
    before = engine.add_request(prompt_of(5), GREEDY)
    add, calls = engine._admission.request, []

    def third_time(*arguments, **options):
        calls.append(None)
        if len(calls) == 3:
            raise raised("planted")
        return add(*arguments, **options)

    with mock.patch.object(engine._admission, "request", third_time), pytest.raises(raised, match="planted"):
        engine.generate([prompt_of(5, seed) for seed in range(4)], GREEDY, progress=False)
    finished = []
    while engine.has_unfinished_requests:
        finished += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in finished] == [before] and engine.stats.num_generated_tokens == 6


def test_a_failed_step_is_told_to_every_thread_that_waits(device):
    engine = engine_of(tiny_model(device), config_of())
    with mock.patch.object(engine._pipeline._worker, "launch", side_effect=RuntimeError("the device is gone")):
        results = together(*[lambda: engine.generate(prompt_of(5), GREEDY, progress=False)] * 4)
    assert all(isinstance(actual, EngineError) and "the device is gone" in str(actual) for actual in results), results


def test_a_stream_whose_loop_is_closed_holds_nobody_up(device):
    engine = engine_of(tiny_model(device), config_of())
    loop = asyncio.new_event_loop()
    stream = engine.stream(prompt_of(5), SamplingParams(max_tokens=1000))
    loop.run_until_complete(anext(stream))
    loop.close()
    [output] = engine.generate(prompt_of(5), GREEDY, progress=False)
    assert output.error is None and len(output.outputs[0].token_ids) == 6
    deadline = time.monotonic() + 30
    while engine.has_unfinished_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.has_unfinished_requests and engine.stats.num_generated_tokens < 1000


# Turns


def test_turns_are_granted_in_request_order():
    turns, order = Turns(), []

    def work(name: int) -> None:
        for _ in range(50):
            with turns, turns:  # also inside
                order.append(name)

    turns.take(Place())
    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
        while len(turns._waiting) <= threads.index(thread):
            time.sleep(0.001)
    turns.give()
    for thread in threads:
        thread.join(30)
    assert collections.Counter(order) == {0: 50, 1: 50, 2: 50}
    assert all(set(order[start : start + 3]) == {0, 1, 2} for start in range(0, 120, 3))


def test_who_is_excused_goes_without_a_turn():
    turns, place = Turns(), Place()
    turns.excuse(place)
    assert not turns.take(place) and turns.take(place)
    waits = Place()
    taken = []
    thread = threading.Thread(target=lambda: taken.append(turns.take(waits)))
    thread.start()
    while not turns._waiting:
        time.sleep(0.001)
    turns.excuse(waits)
    thread.join(30)
    assert taken == [False]
    turns.give()
    with turns:
        pass
