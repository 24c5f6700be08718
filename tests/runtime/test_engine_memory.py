"""A step that runs out of memory is repeated in parts, and no bit changes."""

import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile.errors import EngineError
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.sampling.sampler import SamplingParams
from detcompile.runtime.scheduler import CALM_STEPS
from detcompile.runtime.speculation.ngram_drafter import NGramDrafter
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.step.worker import Worker
from tests.model_cases import compiled
from tests.runtime.engine_cases import (
    GREEDY,
    MARK,
    OVERLAP,
    assert_as_alone,
    config_of,
    engine_configs,
    engine_of,
    prompt_of,
    run,
    sampling_params,
    tiny_model,
)

LAUNCH = Worker._launch


class Scarce:
    """Launches that do all of their work and then find no memory: the first, those too large, and others by chance."""

    def __init__(self, most_tokens, seed=0, chance=0.0):
        self.most_tokens, self.chance = most_tokens, chance
        self.random = random.Random(seed)
        self.sizes, self.num_failed = [], 0

    def __enter__(self):
        def launch(worker, work):
            launched = LAUNCH(worker, work)
            size = len(work.arrays.input_ids)
            if size > self.most_tokens or (size > 1 and self.random.random() < (self.chance if self.num_failed else 1)):
                self.num_failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self.sizes.append(size)
            return launched

        self.patch = mock.patch.object(Worker, "_launch", launch)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


def serve(engine, requests):
    names = {engine.add_request(prompt, params): params for prompt, params in requests}
    return [(output, names[output.request_id]) for output in run(engine)]


@settings(max_examples=6)
@given(
    config=engine_configs(30, 161),
    most_tokens=st.sampled_from([1, 3, 20]),
    seed=st.integers(0, 10**6),
    drawn=st.lists(sampling_params(most_tokens=9), min_size=1, max_size=4),
)
def test_scarce_memory_changes_no_bit(device, config, most_tokens, seed, drawn):
    model = tiny_model(device)
    engine = engine_of(model, config, max_context=120)
    with Scarce(most_tokens, seed, chance=0.2) as scarce:
        requests = [(prompt_of(7 + 13 * index, seed), params) for index, params in enumerate(drawn)]
        for output, params in serve(engine, requests):
            assert_as_alone(model, output, params)
    assert scarce.num_failed


@OVERLAP
def test_drafts_are_left_out_and_their_blocks_come_back(overlap, device):
    model = tiny_model(device)
    speculation = SpeculationConfig(drafter=NGramDrafter(4), switch="always")
    engine = model.engine(config_of(overlap=overlap), speculation=speculation)
    requests = [([1, 2, 3, 1, 2, 3, 1, 2] * (1 + index), GREEDY) for index in range(4)]
    with Scarce(30, chance=0.3) as scarce:
        for output, _ in serve(engine, requests):
            assert output.error is None
            prompt = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids], device=model.device)
            drawn = model(prompt).logits[0, len(output.prompt_token_ids) - 1 : -1].argmax(-1)
            assert drawn.tolist() == output.outputs[0].token_ids
    assert scarce.num_failed and engine.speculator.num_drafted
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


@OVERLAP
def test_a_state_that_the_step_moved_on_is_built_anew(overlap, device):
    model = compiled("mamba2", torch.bfloat16 if device == "cuda" else torch.float32, device)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, overlap=overlap)
    engine = engine_of(model, config)
    with Scarce(12, chance=0.2) as scarce:
        for output, params in serve(engine, [(prompt_of(20, seed), GREEDY) for seed in range(5)]):
            assert_as_alone(model, output, params)
    assert scarce.num_failed and engine.stats.num_preemptions


@OVERLAP
def test_request_whose_step_runs_out_of_memory_ends_alone(overlap, device):
    model = tiny_model(device)

    def forward(input_ids, *rest):
        if (input_ids == MARK).any():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model.executor.forwards.plain(input_ids, *rest)

    engine = engine_of(model, config_of(overlap=overlap, cuda_graphs=False), forward=forward)
    marked = [*prompt_of(10), MARK, *prompt_of(10)]
    names = {engine.add_request(prompt_of(20, seed), GREEDY): None for seed in range(3)}
    bad = engine.add_request(marked, SamplingParams(n=2, max_tokens=3))
    names |= {engine.add_request(prompt_of(30, seed), GREEDY): None for seed in range(3)}
    for output in run(engine):
        if output.request_id == bad:
            assert isinstance(output.error, EngineError) and "CUDA out of memory" in str(output.error)
        else:
            assert_as_alone(model, output, GREEDY)
            del names[output.request_id]
    assert not names and not engine.failed


def test_steps_get_large_again_once_memory_is_there(device):
    engine = engine_of(tiny_model(device), config_of(max_num_batched_tokens=64))
    with Scarce(5):
        serve(engine, [(prompt_of(60), GREEDY)])
    assert engine._scheduler.budget <= 5
    with Scarce(64) as plenty:
        while engine._scheduler.budget < 64 and len(plenty.sizes) < 7 * CALM_STEPS:
            serve(engine, [(prompt_of(100, len(plenty.sizes)), GREEDY)])
        serve(engine, [(prompt_of(100, 99), GREEDY)])
    assert max(plenty.sizes) == 64 and plenty.num_failed < 7


def test_failed_step_ends_engine_with_several_ranks(device):
    engine = engine_of(tiny_model(device), config_of())
    engine._pipeline._worker.is_alone = False
    engine.add_request(prompt_of(20), GREEDY)
    with Scarce(5), pytest.raises(EngineError, match="out of memory"):
        run(engine)
