"""AdamW on the GPU has the CPU's bytes, over any shards."""

import pytest
import torch

from detcompile.templates.training.pointwise import AdamWStep, adamw, adamw_cuda
from tests.bits import assert_bitwise_equal
from tests.templates.cases import normal
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_TRITON

pytestmark = NEEDS_TRITON
COUNT = 3001 if INTERPRETED else 1_000_003


def updated(run, shards: int, device: str, with_copy: bool) -> list[torch.Tensor]:
    sizes = torch.exp(4 * normal((COUNT,), torch.float32, 5))
    start = [normal((COUNT,), torch.float32, 1), torch.zeros(COUNT), torch.zeros(COUNT)]
    parts = [[part.clone().to(device) for part in tensor.chunk(shards)] for tensor in start]
    copies = [torch.empty_like(part, dtype=torch.bfloat16) if with_copy else None for part in parts[0]]
    for step in (1, 2, 3):
        gradient = (normal((COUNT,), torch.float32, 10 + step) * sizes).to(device)
        numbers = AdamWStep(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=step)
        for p, m, v, copy, g in zip(*parts, copies, gradient.chunk(shards)):
            run(p, g.contiguous(), m, v, copy, numbers)
    given = [*parts, copies] if with_copy else parts
    return [torch.cat(tensors).cpu() for tensors in given]


@pytest.mark.parametrize("with_copy", [False] if INTERPRETED else [False, True])  # which cuts bfloat16 off
@pytest.mark.parametrize("shards", [1, 3, 16])
def test_an_update_has_the_cpus_bytes(shards, with_copy):
    expected = updated(adamw, 1, "cpu", with_copy)
    for actual, value in zip(updated(adamw_cuda, shards, DEVICE, with_copy), expected):
        assert_bitwise_equal(actual, value)
