"""Streaming: coroutines get the outputs of requests that a thread serves, and the bits are the same."""

import asyncio
import itertools
import time
from unittest import mock

import pytest
import torch

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams
from tests.model_cases import compiled

PROMPTS = ([5, 6, 7], [9] * 40, [1, 2])
CONFIG = EngineConfig(num_blocks=100, block_size=16)


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, seed=seed, logprobs=1)


def new_engine():
    return compiled("qwen3", torch.float32).engine(CONFIG)


async def collect(engine, prompt, item):
    return [output async for output in engine.stream(prompt, item)]


def test_streams_side_by_side_give_the_bits_of_an_offline_run_token_by_token():
    expected = new_engine().generate(PROMPTS, [params(i) for i in range(3)], progress=False)
    engine = new_engine()

    async def everything():
        return await asyncio.gather(*(collect(engine, prompt, params(i)) for i, prompt in enumerate(PROMPTS)))

    for outputs, offline in zip(asyncio.run(everything()), expected):
        assert outputs[-1].finished and outputs[-1].outputs == offline.outputs
        tokens = offline.outputs[0].token_ids
        assert [output.outputs[0].token_ids for output in outputs] == [tokens[: n + 1] for n in range(len(tokens))]
    # a second loop on the same engine, and an offline call beside the thread
    assert asyncio.run(collect(engine, PROMPTS[0], params(0)))[-1].outputs == expected[0].outputs
    assert engine.generate(PROMPTS[1], params(1), progress=False)[0].outputs == expected[1].outputs
    # and somebody who steps by hand
    name, actual = engine.add_request(PROMPTS[2], params(2)), {}
    while name not in actual:
        actual |= {output.request_id: output for output in engine.step() if output.finished}
    assert actual.keys() == {name} and actual[name].outputs == expected[2].outputs


def test_text_grows_while_it_streams():
    model = compiled("tiny", torch.bfloat16)
    offline = model.engine(CONFIG).generate("def mean(", params(1), progress=False)[0].outputs[0].text
    texts = [o.outputs[0].text for o in asyncio.run(collect(model.engine(CONFIG), "def mean(", params(1)))]
    assert texts[-1] == offline and len(set(texts)) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_leaving_early_cancels_only_that_request():
    engine = new_engine()
    long = SamplingParams(max_tokens=500, seed=1)

    async def leave() -> int:
        async for output in engine.stream(PROMPTS[0], long):
            if len(output.outputs[0].token_ids) == 3:
                break
        return 3

    async def both():
        return await asyncio.gather(leave(), collect(engine, PROMPTS[1], params(1)))

    _, outputs = asyncio.run(both())
    expected = new_engine().generate(PROMPTS[1], params(1), progress=False)[0]
    assert outputs[-1].outputs == expected.outputs
    deadline = time.monotonic() + 30
    while engine.has_unfinished_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.has_unfinished_requests
    engine.check()
    assert engine.stats.num_generated_tokens < 500


def test_stream_rejects_bad_prompt():
    engine = new_engine()
    with pytest.raises(InvalidInput, match="the prompt is empty"):
        asyncio.run(collect(engine, [], params(0)))
    assert asyncio.run(collect(engine, PROMPTS[0], params(0)))[-1].finished


def test_a_failed_step_ends_every_stream_with_the_error():
    engine = new_engine()

    async def everything():
        return await asyncio.gather(
            *(collect(engine, prompt, params(i)) for i, prompt in enumerate(PROMPTS)), return_exceptions=True
        )

    with mock.patch.object(engine._pipeline._worker, "launch", side_effect=RuntimeError("the device is gone")):
        errors = asyncio.run(everything())
    assert all(isinstance(error, EngineError) for error in errors), errors
    with pytest.raises(EngineError, match="failed before"):
        asyncio.run(collect(engine, PROMPTS[0], params(0)))


def test_generate_gets_a_new_engine_after_a_failure():
    model = compiled("gpt2", torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, max_new_tokens=4)
    broken = mock.patch.object(model._generator.engine._pipeline._worker, "launch", side_effect=RuntimeError("gone"))
    with broken, pytest.raises(EngineError, match="gone"):
        model.generate(ids, max_new_tokens=4)
    assert torch.equal(model.generate(ids, max_new_tokens=4), expected)
