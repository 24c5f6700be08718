"""A model cut between layers gives, stage after stage, the bytes and the proof of the whole model."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import detcompile
from detcompile import CompiledModel, Numerics
from detcompile.api import compile_here
from detcompile.executors.local import LocalExecutor
from detcompile.executors.started_ranks import joined_description
from detcompile.parallel import PipelineStage
from detcompile.runtime.engine_setup import Forwards
from detcompile.step import StepInputs
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, random_model, without_inductor
from tests.passes.layers.test_layered_programs import CASES, answers

IDS = torch.arange(1, 41)[None] % VOCAB_SIZE


def stages_of(name: str, size: int, dtype: torch.dtype = torch.float32) -> list[LocalExecutor]:
    actual = []
    for index in range(size):
        module = random_model(name, dtype, **CASES[name])
        stage = PipelineStage(size=size, index=index)
        actual.append(compile_here(module, 1, Numerics(), MAX_CONTEXT, stage=stage).executor)
    return actual  # type: ignore[return-value]


def chained(stages: list[LocalExecutor]) -> CompiledModel:
    """The stages one behind the other in this process, over one cache of all layers."""

    def forward(input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Any:
        rows, first = input_ids, 0
        for stage in stages:
            part = slice(first, first + len(stage.description.facts.kv_shapes))
            item = step._replace(k_caches=step.k_caches[part], v_caches=step.v_caches[part])
            rows, first = stage.forwards.plain(rows, position_ids, item, logits_to_keep), part.stop
        return rows

    description = joined_description([stage.description for stage in stages])
    first = stages[0]
    return CompiledModel(LocalExecutor(description, Forwards(forward), first.weights, first.origin))


@EXHAUSTIVE
def test_weights_of_other_stages_are_freed() -> None:
    module = random_model("granite_swa", torch.float32, **CASES["granite_swa"])
    given = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    with without_inductor():
        compiled = compile_here(module, 1, Numerics(), MAX_CONTEXT, stage=PipelineStage(size=2, index=0))
    torch._dynamo.reset()  # as a worker does
    gc.collect()
    alive = {name for name, parameter in given.items() if parameter() is not None}
    assert alive == set(dict(compiled.model.named_parameters())) < set(given)
    assert {name for name in given if ".layers.0." in name} <= alive


@EXHAUSTIVE  # tests/parallel/test_pipeline_parallel.py serves with two stages
@pytest.mark.parametrize("name", CASES)
def test_stages_have_the_bytes_of_the_whole(name: str):
    with without_inductor():
        stages = stages_of(name, 2)
        whole = detcompile.compile(random_model(name, torch.float32, **CASES[name]), max_context=MAX_CONTEXT)
    cut = chained(stages)
    assert_bitwise_equal(cut(IDS).logits, whole(IDS).logits)
    assert answers(cut) == answers(whole)
    for stage in stages:
        assert stage.fingerprint_parts() == whole.fingerprint_parts
    assert cut.certificate.counts == whole.certificate.counts
    assert cut.executor.description.facts == whole.executor.description.facts
