"""AdamW and the rounding of gradients have the CPU's bytes on the GPU, over any shards."""

import math

import pytest
import torch

from detcompile.templates.training.exactness import largest_magnitude
from detcompile.templates.training.pointwise import (
    AdamWStep,
    adamw,
    adamw_cuda,
    rounded_gradient,
    rounded_gradient_cuda,
)
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


@pytest.mark.parametrize("special", [None, -math.inf, math.nan])
def test_a_rounded_gradient_and_its_largest_element_are_the_cpus(special):
    exact = normal((7, COUNT), torch.float64, 3) + 2.0**-30 * normal((7, COUNT), torch.float64, 4)
    exact[3, 5] = -9.0
    exact[:2, 0] = torch.tensor([1 + 2.0**-24, 1 + 3 * 2.0**-24], dtype=torch.float64)  # halfway between two float32
    if special is not None:
        exact[6, COUNT - 1] = special
    (actual, magnitudes), (expected, values) = rounded_gradient_cuda(exact.to(DEVICE)), rounded_gradient(exact)
    for ours, value in ((actual, expected), (largest_magnitude(magnitudes), largest_magnitude(values))):
        assert ours.dtype is value.dtype
        torch.testing.assert_close(ours.cpu(), value, rtol=0, atol=0, equal_nan=True)
