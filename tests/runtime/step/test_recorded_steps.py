"""Decode steps on the host repeat recorded calls: the bytes are those of the forward, in any mix of steps."""

import pytest
import torch

from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.step import runner
from detcompile.templates.recorded_calls import RecordedCalls
from tests.model_cases import compiled
from tests.runtime.engine_cases import config_of, engine_of, prompt_of

PROMPTS = [prompt_of(length, length) for length in (3, 70, 2, 15, 40)]
LENGTHS = [40, 12, 25, 33, 7]  # of the answers: batches of one to five, tables of several widths
CONFIGS = {"plain": config_of(), "overlap": config_of(overlap=True), "few blocks": config_of(num_blocks=17)}


def answers(config: EngineConfig) -> str:
    """Tokens and logprobs of every answer; a float's text has all of its bits."""
    engine = engine_of(compiled("qwen3", torch.float32), config, tokenizer=None)
    params = [SamplingParams(max_tokens=n, logprobs=2, temperature=0.7, seed=n, ignore_eos=True) for n in LENGTHS]
    outputs = engine.generate(PROMPTS, params, progress=False)
    return repr([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])


@pytest.mark.parametrize("name", CONFIGS)
def test_repeated_calls_give_forward_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = []
    repeat = RecordedCalls.repeat
    monkeypatch.setattr(RecordedCalls, "repeat", lambda calls: repeated.append(repeat(calls)) or repeated[-1])
    actual = answers(CONFIGS[name])
    assert repeated.count(True) > 30
    monkeypatch.setattr(runner, "MOST_RECORDED_TOKENS", 0)
    del repeated[:]
    assert answers(CONFIGS[name]) == actual
    assert not repeated


def test_recordings_beyond_their_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(CONFIGS["plain"])
    monkeypatch.setattr(runner, "MOST_RECORDED_BYTES", 1)
    monkeypatch.setattr(RecordedCalls, "repeat", lambda calls: calls.output is None)
    assert answers(CONFIGS["plain"]) == expected
