"""Models on a GPU that is not the current one, alone and as the drafter of a model on another GPU."""

from collections.abc import Iterator

import pytest
import torch

import detcompile
from detcompile import CompiledModel, Engine, MirrorDrafter, SamplingParams, SpeculationConfig
from tests.conftest import NEEDS_CUDA

pytestmark = [
    pytest.mark.gpu,
    NEEDS_CUDA,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
PROMPTS = [[7, 8, 9, 10] * 4, [5, 6, 7], list(range(40, 90))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def models() -> Iterator[list[CompiledModel]]:
    yield [detcompile.compile("tiny", device=f"cuda:{index}", dtype=torch.bfloat16) for index in range(2)]


def tokens(engine: Engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY, progress=False)]


def test_second_gpu_gives_the_same_bits(models: list[CompiledModel]) -> None:
    assert torch.cuda.current_device() == 0
    ids = torch.tensor([PROMPTS[0]])
    dense = [model(ids.to(model.device)).logits.cpu().view(torch.uint8) for model in models]
    assert torch.equal(*dense)
    assert tokens(models[0].engine()) == tokens(models[1].engine())
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("mirrored", [False, True])
def test_drafter_on_second_gpu_keeps_tokens(models: list[CompiledModel], mirrored: bool) -> None:
    target, other = models
    drafter = other.drafter(4)
    speculation = SpeculationConfig(drafter=MirrorDrafter(drafter) if mirrored else drafter, switch="always")
    engine = target.engine(speculation=speculation)
    assert tokens(engine) == tokens(target.engine())
    assert engine.speculator is not None
    assert engine.speculator.error is None
    assert engine.speculator.statistics.num_accepted > 0
