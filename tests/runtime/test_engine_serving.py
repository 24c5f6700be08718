"""The engine among many requests: threads, preemption, prefix hits, windows, statistics, urgency."""

import asyncio
import contextlib
import threading
from dataclasses import replace
from unittest import mock

import pytest

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sampling_params import SamplingParams
from tests.runtime.engine_cases import (
    GREEDY,
    OVERLAP,
    assert_as_alone,
    config_of,
    engine_of,
    prompt_of,
    run,
    tiny_model,
)


@OVERLAP
def test_requests_come_and_go_from_other_threads(overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap))

    def ask(thread: int) -> None:
        for index in range(5):
            name = engine.add_request(prompt_of(10, thread), GREEDY, request_id=f"{thread}-{index}")
            if index % 2:
                engine.cancel(name)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    finished = []
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests:
        finished += [output for output in engine.step() if output.finished]
    for output in finished:
        assert_as_alone(model, output, GREEDY)
    assert sorted(o.request_id for o in finished) == [f"{thread}-{index}" for thread in range(4) for index in range(5)]


def test_generate_keeps_other_requests(device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of())
    engine.add_request(prompt_of(10), GREEDY, request_id="before")
    [output] = engine.generate([prompt_of(10, 1)], SamplingParams(max_tokens=20, temperature=0.0), progress=False)
    assert output.request_id != "before"
    [before] = run(engine)
    assert before.request_id == "before"
    assert_as_alone(model, before, GREEDY)


# Blocks


@OVERLAP
@pytest.mark.parametrize("one_group", [False, True])
@pytest.mark.parametrize("scheduler", ["stall_free", "prefill_first", "simple_chunking"])
def test_preemption_changes_no_bit(scheduler, one_group, overlap, device) -> None:
    model = tiny_model(device)
    num_blocks = 1 + 6 * (1 if one_group else 4)  # one of them needs that much at its end
    config = config_of(
        scheduler=scheduler, overlap=overlap, num_blocks=num_blocks, max_num_batched_tokens=16, prefix_caching=one_group
    )
    engine = engine_of(model, config, one_group=one_group)
    params = [
        SamplingParams(max_tokens=70, temperature=0.0, prompt_logprobs=2, logprobs=1),
        SamplingParams(max_tokens=70, seed=1, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(max_tokens=70, seed=2, top_p=0.9, n=2),
        SamplingParams(max_tokens=70, seed=3, prompt_logprobs=0, stop=["abab", "cdcd"]),
    ]
    names = [engine.add_request(prompt_of(25, seed), item) for seed, item in enumerate(params)]
    finished = {output.request_id: output for output in run(engine)}
    assert next(iter(finished)) == names[0] and engine.stats.num_preemptions > 0
    for name, item in zip(names, params):
        assert_as_alone(model, finished[name], item)
    assert sum(output.metrics.num_preemptions for output in finished.values()) == engine.stats.num_preemptions


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (64, 48), (65, 64), (120, 112)])
def test_a_hit_ends_before_the_last_token(length, cached, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of())
    for expected in (0, cached, cached):
        before = engine.stats
        [output] = engine.generate(prompt_of(length), GREEDY, progress=False)
        after = engine.stats
        assert_as_alone(model, output, GREEDY)
        assert output.metrics.num_cached_tokens == expected
        assert after.num_cached_tokens - before.num_cached_tokens == expected
        assert after.num_prefill_tokens - before.num_prefill_tokens == length - expected
        assert after.num_queried_tokens - before.num_queried_tokens == length


def test_a_cache_salt_hides_prefixes_and_moves_no_bit(device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of())
    for salt, expected in ((None, 0), ("a", 0), ("b", 0), ("a", 48), (None, 48), ("\ud800", 0), ("", 48)):
        prompt = {"prompt_token_ids": prompt_of(64), "cache_salt": salt}
        [output] = engine.generate(prompt, GREEDY, progress=False)
        assert_as_alone(model, output, GREEDY)
        assert output.metrics.num_cached_tokens == expected, salt


def test_the_answer_is_cached_too_and_prompt_logprobs_look_nothing_up(device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of())
    [output] = engine.generate(prompt_of(20), SamplingParams(max_tokens=44, temperature=0.0), progress=False)
    longer = output.prompt_token_ids + output.outputs[0].token_ids + [3]
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    [computed] = engine.generate(longer, params, progress=False)
    assert computed.metrics.num_cached_tokens == 0
    assert_as_alone(model, computed, params)
    [actual] = engine.generate(longer, GREEDY, progress=False)
    assert actual.metrics.num_cached_tokens == 64
    assert_as_alone(model, actual, GREEDY)


@OVERLAP
def test_blocks_behind_the_window_are_freed(overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap, max_num_batched_tokens=16))
    params = SamplingParams(max_tokens=100, temperature=0.0)
    engine.add_request(prompt_of(150), params)
    most = 0
    while engine.has_unfinished_requests:
        finished = engine.step()
        stats = engine.stats
        most = max(most, stats.num_blocks - stats.num_free_blocks)
    full, windowed = -(-250 // 16), (70 + 2 * 16 - 2) // 16 + 2
    assert full < most <= full + 3 * windowed < 4 * full
    assert_as_alone(model, finished[0], params)


@OVERLAP
@pytest.mark.parametrize("budget", [40, 400])
def test_blocks_freed_behind_the_window_are_written_by_others(budget, overlap, device) -> None:
    """Prompts that arrive at every step take the blocks freed last, and fill them at once."""
    model = tiny_model(device)
    config = config_of(overlap=overlap, max_num_batched_tokens=budget, prefix_caching=False)
    engine = engine_of(model, config)
    params = SamplingParams(max_tokens=80, temperature=0.0, logprobs=1)
    one = replace(params, max_tokens=1)
    engine.add_request(prompt_of(150), params, request_id="long")
    finished = []
    for seed in range(1, 1000):
        if any(output.request_id == "long" for output in finished):
            break
        engine.add_request(prompt_of(33, seed), one)
        finished += [output for output in engine.step() if output.finished]
    for output in finished:
        assert_as_alone(model, output, params if output.request_id == "long" else one)


# Numbers


@OVERLAP
def test_statistics(overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap, max_num_batched_tokens=30, max_num_seqs=2))
    for seed, length in enumerate([20, 25, 10]):
        engine.add_request(prompt_of(length, seed), SamplingParams(max_tokens=5, seed=1))
    engine.step()
    assert (engine.stats.num_running, engine.stats.num_waiting) == (2, 1)
    outputs = run(engine)
    stats = engine.stats
    assert stats.num_generated_tokens == 15
    assert stats.num_prefill_tokens == stats.num_queried_tokens == 55
    assert (stats.num_cached_tokens, stats.cache_hit_rate, stats.num_preemptions) == (0, 0.0, 0)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_steps == len(stats.recent)
    assert sum(record.num_prefill_tokens for record in stats.recent) == 55
    assert sum(record.num_decodes for record in stats.recent) == 12
    assert all(record.launched <= record.finished and record.host_seconds > 0 for record in stats.recent)
    assert stats.host_seconds == pytest.approx(sum(record.host_seconds for record in stats.recent))
    for output in outputs:
        metrics = output.metrics
        times = [metrics.arrival, metrics.first_scheduled, *metrics.token_times, metrics.finished]
        assert times == sorted(times) and len(metrics.token_times) == 5
        assert metrics.time_to_first_token == metrics.token_times[0] - metrics.arrival


@OVERLAP
def test_a_row_too_many_is_not_counted(overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap))
    params = SamplingParams(max_tokens=60, seed=1, stop=["ab", "cd"])
    [output] = engine.generate(prompt_of(9), params, progress=False)
    assert output.outputs[0].stop_reason is not None
    run(engine)
    assert engine.stats.num_generated_tokens == len(output.outputs[0].token_ids)


def test_the_urgent_request_is_served_first(device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(max_num_seqs=1))
    for name, priority in [("late", 5), ("usual", 0), ("urgent", -1), ("also usual", 0)]:
        engine.add_request(prompt_of(5), GREEDY, request_id=name, priority=priority)
    assert [output.request_id for output in run(engine)] == ["urgent", "usual", "also usual", "late"]


def test_engines_of_one_model_are_independent(device) -> None:
    model = tiny_model(device)
    engines = [engine_of(model, config_of(block_size=size, num_blocks=161 * 16 // size)) for size in (16, 64)]
    params = SamplingParams(max_tokens=20, seed=1, repetition_penalty=1.2)
    for seed in range(3):
        for index, engine in enumerate(engines):
            engine.add_request(prompt_of(30, seed + 10 * index), params)
    finished = []
    while any(engine.has_unfinished_requests for engine in engines):
        for engine in engines:
            finished += [output for output in engine.step() if output.finished]
    assert len(finished) == 6
    for output in finished:
        assert_as_alone(model, output, params)


ASKS = {"nothing": {}, "bad words": {"bad_words_ids": [[1, 2, 3]]}}


@OVERLAP
@pytest.mark.parametrize("asks", ASKS)
def test_canceled_request_delivers_its_tokens_once(overlap, asks):
    engine = engine_of(tiny_model("cpu"), config_of(overlap=overlap))
    params = SamplingParams(temperature=0.0, max_tokens=40, **ASKS[asks])
    [alone] = engine.generate([prompt_of(9)], params, progress=False)
    name = engine.add_request(prompt_of(9), params, output_kind="delta")
    deltas = [output for _ in range(5) for output in engine.step()]
    engine.cancel(name)
    while engine.has_unfinished_requests:
        deltas += engine.step()
    drawn = [token for delta in deltas for sample in delta.outputs for token in sample.token_ids]
    assert drawn == alone.outputs[0].token_ids[: len(drawn)] and 3 <= len(drawn) <= 6
    assert [delta.finished for delta in deltas].count(True) == 1


@pytest.mark.parametrize("asks", ASKS)
def test_of_a_stream_that_was_left_nothing_is_kept(asks):
    engine = engine_of(tiny_model("cpu"), config_of(overlap=True))

    async def leave() -> None:
        stream = engine.stream(prompt_of(9), SamplingParams(max_tokens=100, **ASKS[asks]))
        async for output in stream:
            if len(output.outputs[0].token_ids) > 3:
                break
        await stream.aclose()

    asyncio.run(leave())
    while engine._steps.has_work:
        engine._steps.step()
    assert not engine.has_unfinished_requests and engine.step() == []


def test_a_name_is_in_use_until_the_last_output_is_handed_on():
    """Another thread asks for it between the end of a request and what the engine says of that."""
    engine = engine_of(tiny_model("cpu"), config_of(overlap=True))
    params = SamplingParams(temperature=0.0, max_tokens=6, bad_words_ids=[[1, 2, 3]])
    prompts = [prompt_of(9), prompt_of(9, 1)]
    alone = [output.outputs[0].token_ids for output in engine.generate(prompts, params, progress=False)]
    engine.add_request(prompts[0], params, request_id="a", output_kind="delta")
    engine.add_request(prompt_of(9, 2), SamplingParams(max_tokens=40), request_id="neighbor", output_kind="final_only")
    launch, taken = engine._pipeline._worker.launch, []

    def launching(work):
        with contextlib.suppress(InvalidInput):
            taken.append(engine.add_request(prompts[1], params, request_id="a", output_kind="delta"))
        return launch(work)

    drawn: list[list[int]] = [[], []]
    with mock.patch.object(engine._pipeline._worker, "launch", launching):
        while len(taken) < 2 and engine.has_unfinished_requests:
            for output in engine.step():
                if output.request_id == "a" and output.prompt_token_ids in prompts:
                    of = prompts.index(output.prompt_token_ids)
                    drawn[of] += [token for sample in output.outputs for token in sample.token_ids]
    assert drawn[0] == alone[0] and drawn[1][:6] == alone[1]
