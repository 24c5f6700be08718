"""Workers on GPUs give the bits of one GPU for drawn batches, chunks, drafts and sizes, or end in time.

The model is that of tests/test_workers.py with all its layers; four ranks hold each of its two key heads twice.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import detcompile
from detcompile import SamplingParams
from detcompile.errors import EngineError
from detcompile.models.remote import RemoteModel
from detcompile.runtime.engine_config import EngineConfig
from tests.bits import assert_bitwise_equal
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, compiled, random_model
from tests.parallel.cases import needs_gpus, served_logits
from tests.runtime.engine_cases import engine_configs, sampling_params
from tests.runtime.speculation.test_speculator import Oracle, workload
from tests.test_workers import assert_drafts_unmoved, comparable

NAME = "granite_swa"  # four KV groups
CONFIGS = engine_configs(120, 400)


@pytest.fixture(scope="module", params=[pytest.param(tp, marks=needs_gpus(tp), id=f"cuda-{tp}") for tp in (2, 4)])
def workers(request: pytest.FixtureRequest) -> Iterator[RemoteModel]:
    model = detcompile.compile(random_model(NAME, torch.float32, "cuda"), tp=request.param, max_context=MAX_CONTEXT)
    assert isinstance(model, RemoteModel)
    with model:
        yield model


def test_logits_tokens_and_the_fingerprint(workers: RemoteModel) -> None:
    here = compiled(NAME, torch.float32, "cuda")
    assert workers.fingerprint_parts == here.fingerprint_parts
    actual = served_logits(workers)
    for what, expected in served_logits(here).items():
        assert_bitwise_equal(actual[what], expected, f"{what} on {workers.group.num_ranks} workers")


def test_archive_of_workers(workers: RemoteModel, tmp_path: Path) -> None:
    path = detcompile.export(workers, tmp_path / "m.pt2")
    loaded = detcompile.load(path)
    assert isinstance(loaded, RemoteModel)
    with loaded:
        assert loaded.fingerprint_parts == workers.fingerprint_parts
        actual = served_logits(loaded)
        for what, expected in served_logits(compiled(NAME, torch.float32, "cuda")).items():
            assert_bitwise_equal(actual[what], expected, f"{what} on {workers.group.num_ranks} workers")


@settings(max_examples=8)
@given(
    params=st.lists(sampling_params(most_tokens=8), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 150), min_size=8, max_size=8),
    config=CONFIGS,
)
def test_engine_answers_equal_one_gpu(
    workers: RemoteModel, params: list[SamplingParams], lengths: list[int], config: EngineConfig
) -> None:
    params = [replace(item, stop=()) for item in params]
    prompts = [[(7 * i + j) % VOCAB_SIZE for j in range(lengths[i])] for i in range(len(params))]
    outputs = []
    for model, item in ((workers, config), (compiled(NAME, torch.float32, "cuda"), EngineConfig(num_blocks=400))):
        engine = model.engine(item)
        outputs.append([comparable(output) for output in engine.generate(prompts, params, progress=False)])
        engine.check()
    assert outputs[0] == outputs[1]


@settings(max_examples=4)
@given(accuracy=st.sampled_from([0.0, 0.7, 1.0]), seed=st.integers(0, 99), max_nodes=st.integers(1, 16), config=CONFIGS)
def test_drafts_change_no_bit(
    workers: RemoteModel, accuracy: float, seed: int, max_nodes: int, config: EngineConfig
) -> None:
    plain = workload(NAME, "cuda")
    assert_drafts_unmoved(workers, Oracle(plain[2], accuracy, seed), config, plain, max_nodes=max_nodes)


def test_dead_rank_is_named_within_two_seconds(workers: RemoteModel) -> None:
    """The other ranks wait for it inside a kernel."""
    engine = workers.engine(EngineConfig(num_blocks=400, block_size=16, restarts=0))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=1000, ignore_eos=True))
    engine.step()
    os.kill(workers.group.process_ids[1], signal.SIGKILL)
    since = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 of \d failed: its process was ended by SIGKILL"):
        while engine.has_unfinished_requests:
            engine.step()
    assert time.monotonic() - since < 2
