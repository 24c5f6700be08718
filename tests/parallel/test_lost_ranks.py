"""Killed or stopped ranks cost an engine time and no bit. If it cannot continue, it says so and leaves no process."""

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from detcompile import LLM, EngineConfig, EngineError, Numerics, SamplingParams
from detcompile.executors import ranks
from detcompile.executors.remote_weights import RemoteWeights
from detcompile.models.compiled import CompiledModel
from detcompile.models.remote import RemoteModel, compile_in_workers
from detcompile.passes import program_source
from detcompile.passes.programs.aot import run_plainly
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.processes.group import WorkerGroup
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import random_model
from tests.runtime.grammar_cases import small_tokenizer
from tests.runtime.processes.test_group import assert_gone
from tests.runtime.test_engine_restarts import answers
from tests.runtime.test_threads import together

CONFIG = EngineConfig(num_blocks=80, block_size=16, max_num_batched_tokens=40)
PROMPTS = [[(11 * row + 7 * place) % 150 for place in range(length)] for row, length in enumerate((5, 40, 90, 20, 7))]
REQUESTS = list(
    zip(
        PROMPTS,
        [
            SamplingParams(temperature=0.9, seed=1, max_tokens=30, logprobs=3, prompt_logprobs=2),
            SamplingParams(temperature=1.2, seed=2, max_tokens=25, n=2, stop=["ab", "q"]),
            SamplingParams(temperature=1.0, seed=3, max_tokens=30, repetition_penalty=1.3, presence_penalty=0.5),
            SamplingParams(temperature=1.0, seed=4, max_tokens=30, grammar=Grammar.regex("(ab|ba|[a-c]){9,40}")),
            SamplingParams(temperature=0.0, seed=5, max_tokens=30, bad_words_ids=[[word, word] for word in range(150)]),
        ],
    )
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)


def module(num_layers: int = 2) -> PreTrainedModel:
    """A model of two KV groups, one with a window, without Inductor, which would take most of the time of a start."""
    program_source.compile_fx_inner = run_plainly
    return random_model("granite_swa", torch.float32, num_hidden_layers=num_layers)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteModel]:
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        with compile_in_workers(module, tp=2, numerics=Numerics(), max_context=300) as model:
            yield model
            pids = model.group.process_ids
        assert_gone(pids)
        # Shared memory is named after the process that made it; other tests' processes make theirs meanwhile.
        names = [path.name for path in Path("/dev/shm").iterdir()]
        shared = [name for name in names if set(pids) & {int(number) for number in re.findall(r"\d+", name)}]
        assert not list(folder.iterdir()) and not shared


def engine_of(model: RemoteModel, config: EngineConfig = CONFIG) -> Any:
    return model.engine(config, tokenizer=small_tokenizer())


def disturbed(model: RemoteModel, rank: int, number: int, at: int = 9) -> tuple[list[Any], Any]:
    """The answers of an engine whose rank gets a signal after some steps; and the engine."""
    engine, step, pids = engine_of(model), None, model.group.process_ids
    step, count = engine.step, iter(range(10**6))

    def signaling() -> Any:
        if next(count) == at:
            assert len(engine._scheduler.running) >= 4
            os.kill(pids[rank], number)
        return step()

    engine.step = signaling
    actual = answers(engine, REQUESTS)
    assert_gone(pids)
    return actual, engine


@EXHAUSTIVE  # 50 CPU seconds: two ranks that start three times
def test_killed_rank_changes_no_bit(two: RemoteModel) -> None:
    """For any request. The model answers in the new processes, and other engines continue there."""
    other, before = engine_of(two), two.fingerprint
    expected = answers(other, REQUESTS)
    assert all(error is None for _, _, error, _ in expected)
    actual, engine = disturbed(two, 1, signal.SIGKILL)
    assert actual == expected and engine.stats.num_restarts == 1
    pids = two.group.process_ids
    assert answers(other, REQUESTS) == expected and two.group.process_ids == pids
    assert two.fingerprint == before and two.weights_version == 0


@EXHAUSTIVE
def test_stopped_rank_changes_no_bit(two: RemoteModel) -> None:
    expected = answers(engine_of(two), REQUESTS)
    actual, engine = disturbed(two, 0, signal.SIGSTOP)
    assert actual == expected and engine.stats.num_restarts == 1


@EXHAUSTIVE
def test_rank_killed_during_start_is_restarted(two: RemoteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, started = answers(engine_of(two), REQUESTS), []

    class Killed(WorkerGroup):
        """The first of these groups loses a rank while it starts."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self.process_ids)
            if len(started) == 1:
                threading.Timer(1.0, os.kill, (self.process_ids[1], signal.SIGKILL)).start()

    monkeypatch.setattr(ranks, "WorkerGroup", Killed)
    actual, engine = disturbed(two, 0, signal.SIGKILL)
    assert actual == expected and engine.stats.num_restarts == len(started) == 2
    assert_gone(started[0])


@EXHAUSTIVE
def test_killed_stage_changes_no_bit() -> None:
    build = functools.partial(module, num_layers=6)
    with compile_in_workers(build, tp=1, pp=2, numerics=Numerics(), max_context=300) as model:
        expected = answers(engine_of(model), REQUESTS)
        actual, engine = disturbed(model, 0, signal.SIGKILL)
        assert actual == expected and engine.stats.num_restarts == 1


@EXHAUSTIVE
def test_restored_ranks_get_only_updates_still_in_effect() -> None:
    """In order, and other files are deleted."""
    given: list[list[str]] = []

    def call(command: str, *args: Any, **_: Any) -> list[Any]:
        if command == "update_weights":
            given.append(list(torch.load(args[0])))
        return ["same"] if command == "identity" else [len(given)]

    group: Any = SimpleNamespace(call=call)
    weights, (one, two) = RemoteWeights(group), (torch.ones(1), torch.zeros(2))
    for item in ({"a": one}, {"b": two}, {"a": one, "b": two}, {"b": two}, {"c": one}, {"b": two}):
        weights.update(item)
    given.clear()
    weights.restore(group)
    assert given == [["a", "b"], ["c"], ["b"]] and len(weights.files) == 3
    assert weights.version() == 6
    assert weights.update({"a": one, "b": two, "c": one}) == 7 and len(weights.files) == 1
    weights.close()
    assert not weights.files


def scaled(model: CompiledModel, factor: float) -> None:
    model.model.model.norm.weight.data.mul_(factor)


@EXHAUSTIVE
def test_restart_restores_new_weights_but_not_in_place_changes(two: RemoteModel) -> None:
    given = {name: tensor * 1.25 for name, tensor in module().state_dict().items()}
    version = two.update_weights(given)
    expected, before = answers(engine_of(two), REQUESTS), two.fingerprint
    actual, engine = disturbed(two, 1, signal.SIGKILL)
    assert actual == expected and two.fingerprint == before and two.weights_version == version
    pids = two.group.process_ids
    os.kill(pids[0], signal.SIGKILL)  # while nothing runs
    assert_gone(pids[:1])
    assert two.update_weights(module().state_dict()) == version + 1 and two.group.process_ids != pids
    assert answers(engine, REQUESTS) != expected
    two.apply(scaled, 2.0)
    engine.add_request(PROMPTS[0], GREEDY)
    os.kill(two.group.process_ids[1], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"weights that were changed in place \(apply\)"):
        while engine.has_unfinished_requests:
            engine.step()


@EXHAUSTIVE
def test_files_changed_since_start_are_not_served(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    torch.save(module().state_dict(), weights)
    os.environ["TEST_LOST_RANKS"] = str(weights)
    with compile_in_workers(module_of_file, tp=2, numerics=Numerics(), max_context=300) as model:
        engine = engine_of(model)
        engine.add_request(PROMPTS[0], GREEDY)
        torch.save({name: tensor * 2 for name, tensor in module().state_dict().items()}, weights)
        os.kill(model.group.process_ids[1], signal.SIGKILL)
        with pytest.raises(EngineError, match="the model's files or this machine's packages have changed since"):
            while engine.has_unfinished_requests:
                engine.step()
        pids = model.group.process_ids
    assert_gone(pids)


def module_of_file() -> PreTrainedModel:
    made = module()
    made.load_state_dict(torch.load(os.environ["TEST_LOST_RANKS"]))
    return made


@EXHAUSTIVE
def test_every_caller_continues_after_rank_loss(tmp_path: Path) -> None:
    """Engines of two threads, LLM, generate() and a stream, over ranks that die three times."""
    ids = torch.tensor([PROMPTS[1]])
    with compile_in_workers(module, tp=2, numerics=Numerics(), max_context=300) as model:
        llm = LLM(model, num_gpu_blocks_override=60, block_size=16, tokenizer=small_tokenizer())
        engine = engine_of(model)
        requests = SamplingParams(temperature=0.8, max_tokens=20, seed=1)
        calls = (
            lambda: llm.generate([{"prompt_token_ids": item} for item in PROMPTS], requests)[3].outputs[0].token_ids,
            lambda: model.generate(ids, max_new_tokens=20, do_sample=True, seed=3).tolist(),
            lambda: engine.generate(PROMPTS, requests, progress=False)[2].outputs,
            lambda: model.generate(ids, max_new_tokens=5, output_scores=True, return_dict_in_generate=True).sequences,
        )
        expected = [call() for call in calls]
        for rank in (0, 1):
            timer = threading.Timer(0.2 * rank, os.kill, (model.group.process_ids[rank], signal.SIGKILL))
            timer.start()
            assert together(*calls[:3]) == expected[:3]
            timer.join()
            assert torch.equal(calls[3](), expected[3])
        os.kill(model.group.process_ids[0], signal.SIGKILL)
        time.sleep(0.5)
        llm.close()
        fresh = LLM(model, num_gpu_blocks_override=60, block_size=16, tokenizer=small_tokenizer())
        assert fresh.generate([{"prompt_token_ids": PROMPTS[3]}], requests)[0].outputs[0].token_ids == expected[0]
        model.close()
        with pytest.raises(EngineError, match="were closed"):
            engine.generate(PROMPTS, requests, progress=False)
