"""A model in stages has the bits and the fingerprint of one process, or is rejected."""

import functools
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import detcompile
from detcompile import InvalidInput, Numerics, SamplingParams
from detcompile.api import compile_here
from detcompile.commands.verification import PP, verify
from detcompile.errors import DetcompileError, EngineError, UnsupportedModel, WorkerError
from detcompile.models.compiled import CompiledModel
from detcompile.models.remote import RemoteModel, compile_in_workers
from detcompile.models.spec import ModelSpec
from detcompile.parallel import PipelineStage
from detcompile.passes import program_source
from detcompile.passes.program_source import layers_of_stage
from detcompile.passes.programs.aot import run_plainly
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.pacing.pace import Lanes, most_lanes
from detcompile.runtime.speculation.medusa_heads import MedusaHeads
from detcompile.runtime.speculation.speculator import SpeculationConfig
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, certified, random_model, without_inductor
from tests.parallel.cases import needs_gpus
from tests.runtime.engine_cases import engine_configs, sampling_params
from tests.runtime.speculation.test_speculator import Oracle, Workload, workload_of
from tests.test_workers import assert_drafts_unmoved, comparable

IDS = torch.arange(74).view(2, 37) * 7 % 150
SIZES = ["2x1", "2x2", "4x1", "4x2"]  # stages, and ranks of each
ON_GPUS = [pytest.param(f"cuda-{pp}x{tp}", marks=needs_gpus(pp * tp)) for pp, tp in ((2, 1), (2, 2), (4, 1))]
CONFIGS = engine_configs(60, 400)


def module(device: str = "cpu") -> PreTrainedModel:
    """Two KV groups, of which a stage may have one; a bfloat16 head that is the embedding."""
    return random_model("granite_swa", torch.bfloat16, device, num_hidden_layers=6, tie_word_embeddings=True)


def module_without_inductor() -> PreTrainedModel:
    """In a worker process, which compiles nothing else."""
    program_source.compile_fx_inner = run_plainly
    return module()


@functools.cache
def alone(device: str) -> CompiledModel:
    compile_model = certified if device == "cpu" else detcompile.compile
    return compile_model(module(device), max_context=MAX_CONTEXT)


@functools.cache
def plain_answers(device: str) -> Workload:
    return workload_of(alone(device))


@pytest.fixture(scope="module", params=[*exhaustive_unless(lambda sizes: sizes == "2x1", SIZES), *ON_GPUS])
def stages(request: pytest.FixtureRequest) -> Iterator[RemoteModel]:
    device, _, sizes = request.param.rpartition("-")
    pp, tp = map(int, sizes.split("x"))
    numbers = {"tp": tp, "pp": pp, "numerics": Numerics(), "max_context": MAX_CONTEXT}
    build = functools.partial(module, device) if device else module_without_inductor
    with compile_in_workers(build, **numbers) as model:
        assert model.group.num_ranks == pp * tp
        yield model


@pytest.fixture
def drawn_lanes(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Lanes that start and finish at random steps, for any host timing."""
    drawn = random.Random(0)
    count = property(lambda lanes: drawn.randint(lanes.num_stages, most_lanes(lanes.num_stages)))
    monkeypatch.setattr(Lanes, "count", count)
    return drawn


def test_stages_keep_logits_fingerprint_and_proof(stages: RemoteModel) -> None:
    here, ids = alone(stages.device.type), IDS.to(stages.device)
    assert_bitwise_equal(stages(ids).logits, here(ids).logits)
    assert torch.equal(stages.generate(ids, max_new_tokens=9), here.generate(ids, max_new_tokens=9))
    assert stages.fingerprint_parts == here.fingerprint_parts
    assert (stages.certificate.orders, stages.num_parameters()) == (here.certificate.orders, here.num_parameters())
    actual, expected = stages.executor.description.facts, here.executor.description.facts
    assert actual.kv_groups == expected.kv_groups and len(actual.kv_shapes) == len(expected.kv_shapes)
    assert_bitwise_equal(stages.head_weight(), here.head_weight())


def test_stage_holds_only_its_weights(stages: RemoteModel) -> None:
    names = stages.apply(held)
    pp = stages.stages
    layers = [sorted({int(name.split(".")[2]) for name in item if ".layers." in name}) for item in names]
    per_stage = layers[:: len(names) // pp]
    assert sorted(layer for item in per_stage for layer in item) == list(range(6))
    ends = [any("embed_tokens" in name or "lm_head" in name for name in item) for item in names[:: len(names) // pp]]
    assert ends == [True, *[False] * (pp - 2), True]


def test_new_weights_reach_every_stage(stages: RemoteModel) -> None:
    """All stages take them or none does. Replacements of lost processes have them too."""
    here, ids = alone(stages.device.type), IDS.to(stages.device)
    before = {name: tensor.clone() for name, tensor in module().state_dict().items()}
    new = {name: tensor.flip(-1) for name, tensor in before.items()}
    logits, parts = stages(ids).logits, stages.fingerprint_parts
    name = "model.layers.5.mlp.down_proj.weight"
    odd = [{k: v for k, v in new.items() if k != name}, new | {name: new[name][:-1]}, new | {"other": new[name]}]
    for refused in odd:
        with pytest.raises(InvalidInput, match="other" if "other" in refused else name):
            stages.update_weights(refused)
        assert stages.fingerprint_parts == parts
        assert_bitwise_equal(stages(ids).logits, logits)
    try:
        here.update_weights(new)
        stages.update_weights(new)
        assert stages.fingerprint_parts == here.fingerprint_parts != parts
        assert_bitwise_equal(stages(ids).logits, here(ids).logits)
        os.kill(stages.group.process_ids[-1], signal.SIGKILL)
        with pytest.raises(WorkerError):
            stages(ids)
        with stages.engine(EngineConfig(num_blocks=16)).idle():
            assert stages.fingerprint_parts == here.fingerprint_parts
        assert_bitwise_equal(stages(ids).logits, here(ids).logits)
    finally:
        here.update_weights(before)
        stages.update_weights(before)
    assert stages.fingerprint_parts == parts
    assert_bitwise_equal(stages(ids).logits, logits)


def held(model: CompiledModel) -> list[str]:
    return [name for name, _ in model.model.named_parameters()]


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.lists(sampling_params(most_tokens=8), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 90), min_size=6, max_size=6),
    config=CONFIGS,
    seed=st.integers(0, 99),
)
def test_engine_answers_equal_one_process(
    stages: RemoteModel,
    drawn_lanes: random.Random,
    params: list[SamplingParams],
    lengths: list[int],
    config: EngineConfig,
    seed: int,
) -> None:
    drawn_lanes.seed(seed)
    params = [replace(item, stop=()) for item in params]
    prompts = [[(7 * i + j) % VOCAB_SIZE for j in range(lengths[i])] for i in range(len(params))]
    outputs = []
    for model in (stages, alone(stages.device.type)):
        engine = model.engine(config)
        outputs.append([comparable(o) for _ in range(2) for o in engine.generate(prompts, params, progress=False)])
        engine.check()
    assert outputs[0] == outputs[1]


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(accuracy=st.sampled_from([0.0, 0.7, 1.0]), seed=st.integers(0, 99), config=CONFIGS)
def test_drafts_change_no_bit(
    stages: RemoteModel, drawn_lanes: random.Random, accuracy: float, seed: int, config: EngineConfig
) -> None:
    drawn_lanes.seed(seed)
    workload = plain_answers(stages.device.type)
    assert_drafts_unmoved(stages, Oracle(workload[2], accuracy, seed), config, workload, max_nodes=7)


def test_unsupported_features_are_refused_by_name(stages: RemoteModel, tmp_path: Path) -> None:
    drafter = stages.medusa_drafter(MedusaHeads(80, 2).to(torch.bfloat16), num_nodes=4)
    with pytest.raises(InvalidInput, match="reads hidden states, which stages do not return"):
        stages.engine(EngineConfig(num_blocks=40), speculation=SpeculationConfig(drafter=drafter))
    with pytest.raises(UnsupportedModel, match="in stages"):
        detcompile.export(stages, tmp_path / "m.pt2")
    ids = IDS.to(stages.device)
    assert_bitwise_equal(stages(ids).logits, alone(stages.device.type)(ids).logits)


def test_lost_stage_ends_the_requests(stages: RemoteModel) -> None:
    engine = stages.engine(EngineConfig(num_blocks=60, restarts=0))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
    engine.step()
    os.kill(stages.group.process_ids[-1], signal.SIGKILL)
    since = time.monotonic()
    with pytest.raises(EngineError, match="its process was ended by SIGKILL"):
        while engine.has_unfinished_requests:
            engine.step()
    assert time.monotonic() - since < 10
    with pytest.raises(WorkerError, match="SIGKILL"):
        stages(IDS)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {}, "pp=3: the model has 2 layers, and every stage needs one"),
        ("rwkv", {"num_hidden_layers": 3}, "RwkvForCausalLM: pp=3, but its layers carry states from token to token"),
    ],
)
def test_unsplittable_models_are_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    model = random_model(name, torch.float32, **changes)
    with without_inductor(), pytest.raises(DetcompileError, match=message):
        compile_here(model, 1, Numerics(), MAX_CONTEXT, stage=PipelineStage(size=3, index=1))


def test_a_model_without_a_single_list_of_layers_is_refused() -> None:
    model = random_model("llama", torch.float32)
    model.extra = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: pp=2, but its layers are not in a single list"):
        layers_of_stage(model, PipelineStage(size=2, index=0), None, carries_states=False)


def test_running_ranks_cannot_become_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(InvalidInput, match="pp=2: compile"):
        detcompile.compile(module(), pp=2)
    with pytest.raises(InvalidInput, match="pp=0"):
        detcompile.compile(module(), pp=0)


@EXHAUSTIVE
def test_the_pp_axis_is_measured_on_two_and_four_stages(tmp_path: Path) -> None:
    random_model("gpt2", torch.float32, n_layer=5, n_positions=700).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), dtype="float32", device="cpu")
    results = verify(spec.compile(), spec, [PP], count=2)
    assert results[PP].holds and results[PP].configurations == 2 + 2 * 2 * 2


@EXHAUSTIVE
def test_pp_axis_detects_changed_stage_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the last bit of what a stage sends depends on the number of rows."""
    compiled = ModelSpec.compile

    def planted(spec: ModelSpec, tp: int = 1, pp: int = 1) -> CompiledModel:
        model = compiled(spec, tp, pp)
        if isinstance(model, RemoteModel):
            model.apply(send_otherwise)
        return model

    random_model("gpt2", torch.float32, n_layer=2, n_positions=700).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), dtype="float32", device="cpu")
    monkeypatch.setattr(ModelSpec, "compile", planted)
    assert not verify(spec.compile(), spec, [PP], count=2)[PP].holds


def send_otherwise(model: CompiledModel) -> None:
    """In a worker: change the last bit of what the stage sends if there are many rows."""
    forward = model.executor.forwards.plain
    send = forward.send
    infinity = torch.tensor(float("inf"))
    forward.send = lambda rows: send(torch.nextafter(rows, infinity) if rows.shape[1] > 1 else rows)
