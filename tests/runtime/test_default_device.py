"""torch.set_default_device does not move tensors that belong on the CPU. "meta" stands in for a GPU."""

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from transformers import MaxLengthCriteria

from detcompile import SamplingParams, SpeculationConfig
from detcompile.runtime.speculation.draft_tree import DraftTree
from tests.bits import assert_bitwise_equal
from tests.runtime.engine_cases import GREEDY, config_of, prompt_of, tiny_model

PARAMS = [
    SamplingParams(seed=1, max_tokens=8, top_p=0.9, top_k=20, min_p=0.01, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=2, max_tokens=8, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    SamplingParams(seed=3, max_tokens=8, logit_bias={3: 2.0, 4: -math.inf}, min_tokens=2, n=2),
    SamplingParams(seed=4, max_tokens=8, allowed_token_ids=[1, 2, 3, 4, 5]),
    GREEDY,
]
PROMPTS = [[7, 8, 9] * 4, *(prompt_of(length) for length in (1, 9, 20, 33))]


@contextlib.contextmanager
def default_device(name: str | None) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


class Repeats:
    """Guesses the last token again."""

    def propose(self, sequences, max_depth):
        return [DraftTree({(0,): sequence.token_ids[-1]}) for sequence in sequences]

    def forget(self, sequence):
        pass


@pytest.mark.parametrize("acceptance", [None, "exact", "rejection"])
def test_an_engine_keeps_its_bits(acceptance) -> None:
    model = tiny_model("cpu")

    def served(device: str | None):
        speculation = None
        if acceptance is not None:
            speculation = SpeculationConfig(drafter=Repeats(), acceptance=acceptance, switch="always")
        with default_device(device):
            engine = model.engine(config_of(), speculation=speculation)
            outputs = engine.generate(PROMPTS, PARAMS, progress=False)
        assert acceptance is None or engine.speculator.num_drafted
        return [(output.error, output.outputs, output.prompt_logprobs) for output in outputs]

    assert served("meta") == served(None)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_generate_and_a_call_keep_their_bits() -> None:
    model = tiny_model("cpu")
    ids = torch.tensor([prompt_of(9), prompt_of(9, 1)])
    kept = torch.tensor([0, 8])
    how = {"max_new_tokens": 6, "do_sample": True, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.3}

    def outputs_on(device: str | None):
        with default_device(device):
            watched = model.generate(ids, **how, stopping_criteria=[MaxLengthCriteria(13)])
            return model.generate(ids, **how), watched, model(ids, logits_to_keep=kept).logits

    for on_meta, plain in zip(outputs_on("meta"), outputs_on(None), strict=True):
        assert_bitwise_equal(on_meta, plain)
