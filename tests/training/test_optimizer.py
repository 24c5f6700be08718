"""AdamW's bits are of each element alone, over any shards; its values are torch's."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from detcompile import AdamW
from detcompile.errors import InvalidInput
from tests.bits import assert_bitwise_equal

COUNT = 100_003
SHARDS = [1, 2, 3, 7, 16, 1000]


def drawn(steps: int = 4) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(COUNT, generator=generator)
    sizes = [10.0 ** torch.randint(-9, 1, (COUNT,), generator=generator) for _ in range(steps)]
    return start, [torch.randn(COUNT, generator=generator) * size for size in sizes]


def trained(start, gradients, shards=1, copies=False, **options):
    """The parameters, and their rounded copies, after a step for each gradient."""
    parameters = [nn.Parameter(part.clone()) for part in start.chunk(shards)]
    kept = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in parameters} if copies else None
    optimizer = AdamW(parameters, lr=1e-3, weight_decay=0.1, compute_copies=kept, **options)
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.chunk(shards)):
            parameter.grad = part.clone()
        optimizer.step()
    rounded = torch.cat(list(kept.values())) if kept else None
    return torch.cat([parameter.detach() for parameter in parameters]), rounded


def test_no_shard_moves_a_bit():
    start, gradients = drawn()
    expected, rounded = trained(start, gradients, copies=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for shards in SHARDS:
        found, copies = trained(start, gradients, shards, copies=True)
        assert_bitwise_equal(found, expected, f"{shards} shards")
        assert_bitwise_equal(copies, rounded, f"{shards} shards")
    torch.set_num_threads(threads)
    assert_bitwise_equal(rounded, expected.bfloat16())


def test_the_update_is_the_formula_in_float32():
    start, gradients = drawn(3)
    f = np.float32  # torch's square root is not IEEE's on a CPU
    p, m, v = start.numpy(), np.zeros(COUNT, f), np.zeros(COUNT, f)
    for step, gradient in enumerate(gradients, 1):
        g = gradient.numpy()
        m = m + (g - m) * f(1 - 0.9)
        v = v * f(0.999) + (g * g) * f(1 - 0.999)
        divisor = np.sqrt(v) / f((1 - 0.999**step) ** 0.5) + f(1e-8)
        p = p * f(1 - 1e-3 * 0.1) - f(1e-3 / (1 - 0.9**step)) * (m / divisor)
    assert_bitwise_equal(trained(start, gradients)[0], torch.from_numpy(p))


def test_values_are_torchs():
    start, gradients = drawn()
    parameter = nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.double()
        optimizer.step()
    found, _ = trained(start, gradients)
    assert (found.double() - parameter.detach()).abs().max() < 1e-6


def test_groups_closures_and_parameters_without_a_gradient():
    a, b, c = (nn.Parameter(torch.ones(5)) for _ in range(3))
    optimizer = AdamW([{"params": [a], "lr": 0.0, "weight_decay": 0.0}, {"params": [b, c]}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (a * a).sum() + (b * b).sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 10.0
    assert bool((a == 1).all()) and bool((b < 1).all()) and bool((c == 1).all())


def test_a_state_that_is_loaded_goes_on():
    start, gradients = drawn()
    parameter = nn.Parameter(start.clone())
    optimizer = AdamW([parameter], lr=1e-3, weight_decay=0.1)
    for index, gradient in enumerate(gradients):
        if index == 2:
            known = copy.deepcopy(optimizer.state_dict())
            optimizer = AdamW([parameter])
            optimizer.load_state_dict(known)
        parameter.grad = gradient.clone()
        optimizer.step()
    assert_bitwise_equal(parameter.detach(), trained(start, gradients)[0])


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}]
)
def test_numbers_out_of_their_range_are_refused(options):
    with pytest.raises(InvalidInput, match="none may be negative, and betas are below 1"):
        AdamW([nn.Parameter(torch.ones(2))], **options)


def test_what_is_not_float32_is_refused():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(InvalidInput, match=r"a parameter is torch.bfloat16 \(4,\), where float32"):
        AdamW([parameter]).step()
    turned = nn.Parameter(torch.ones(4, 3).t())
    turned.grad = torch.ones(3, 4)
    with pytest.raises(InvalidInput, match="is not contiguous"):
        AdamW([turned]).step()
    with pytest.raises(InvalidInput, match=r"must be contiguous bfloat16 \(4,\), not torch.float32 \(4,\)"):
        AdamW([parameter], compute_copies={parameter: torch.ones(4)})
