"""The drafters shipped with the embedded model are often right and change no bit."""

import functools

import pytest
import torch

import detcompile
from detcompile import EngineConfig, SamplingParams, SpeculationConfig
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import compiled

PROMPTS = ("def mean(values):\n", "import json\n\n\ndef load(path):\n", "class Stack:\n    def __init__(self):\n")
ROOMY = EngineConfig(num_blocks=64)
FEWEST_RIGHT = {"draft": 0.1, "heads": 0.04}  # of the tokens drafted in chains of 3, where 1 in 4096 is chance


@functools.cache
def answers():
    params = [SamplingParams(max_tokens=40, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.8, 0.0)]
    model = compiled("tiny", torch.bfloat16)
    prompts = [model.tokenizer(prompt).input_ids for prompt in PROMPTS]
    return prompts, params, model.engine(ROOMY).generate(prompts, params, progress=False)


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["draft", "heads"])
def test_shipped_drafters_are_often_right(name):
    model = compiled("tiny", torch.bfloat16)
    if name == "draft":
        drafter = compiled("tiny-draft", torch.bfloat16).drafter(3)
        assert drafter.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    else:
        drafter = model.medusa_drafter("tiny", paths=[(0,), (0, 0), (0, 0, 0)])
    prompts, params, expected = answers()
    engine = model.engine(ROOMY, speculation=SpeculationConfig(drafter=drafter, switch="always"))
    actual = engine.generate(prompts, params, progress=False)
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    right = engine.speculator.num_accepted / engine.speculator.num_drafted
    print(f"{name}: {right:.3f} of the drafts were right")
    assert right > FEWEST_RIGHT[name]


def test_the_draft_model_is_a_sixth_of_the_target():
    sizes = [sum(p.numel() for p in detcompile.load_model(name).parameters()) for name in ("tiny", "tiny-draft")]
    assert 6 * sizes[1] < sizes[0]
