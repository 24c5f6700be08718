"""AdamW's bits depend on each element alone, over any shards; its values are torch's."""

import copy
import pickle

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


def test_update_is_equal_for_any_shards():
    start, gradients = drawn()
    expected, rounded = trained(start, gradients, copies=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for shards in SHARDS:
        actual, copies = trained(start, gradients, shards, copies=True)
        assert_bitwise_equal(actual, expected, f"{shards} shards")
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


def test_values_match_torch_adamw():
    start, gradients = drawn()
    parameter = nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.double()
        optimizer.step()
    actual, _ = trained(start, gradients)
    assert (actual.double() - parameter.detach()).abs().max() < 1e-6


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


def test_loaded_state_continues_training():
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
    "options",
    [
        *({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}),
        *({"lr": torch.nan}, {"lr": torch.inf}, {"betas": (0.9, torch.nan)}, {"eps": torch.nan}),
        *({"weight_decay": torch.nan}, {"weight_decay": "0.1"}, {"lr": None}, {"lr": torch.ones(2)}, {"eps": None}),
        *({"betas": 0.9}, {"betas": (0.9,)}, {"betas": (0.9, 0.9, 0.9)}, {"betas": None}, {"betas": "ab"}),
    ],
)
def test_out_of_range_options_are_refused(options):
    with pytest.raises(InvalidInput, match="must be finite and not negative, and betas must be two numbers below 1"):
        AdamW([nn.Parameter(torch.ones(2))], **options)


def test_only_float32_parameters_are_accepted():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(InvalidInput, match=r"a parameter is torch.bfloat16 \(4,\), but must be float32"):
        AdamW([parameter]).step()
    turned = nn.Parameter(torch.ones(4, 3).t())
    turned.grad = torch.ones(3, 4)
    with pytest.raises(InvalidInput, match="is not contiguous"):
        AdamW([turned]).step()
    with pytest.raises(InvalidInput, match=r"must be contiguous bfloat16 \(4,\) on cpu, not torch.float32 \(4,\)"):
        AdamW([parameter], compute_copies={parameter: torch.ones(4)})


def test_negated_view_is_read_with_its_sign():
    expected, actual = (nn.Parameter(torch.ones(4)) for _ in range(2))
    expected.grad, actual.grad = -torch.ones(4), torch._neg_view(torch.ones(4))
    AdamW([expected, actual]).step()
    assert torch.equal(expected, actual)


def stepped(*shape: int) -> tuple[nn.Parameter, AdamW]:
    """A parameter with a gradient, and its optimizer after a step."""
    parameter = nn.Parameter(torch.ones(*shape))
    parameter.grad = torch.ones(*shape)
    optimizer = AdamW([parameter], lr=1e-3)
    optimizer.step()
    return parameter, optimizer


def test_mismatched_state_is_refused_before_any_write():
    (parameter, optimizer), (_, other) = stepped(1000), stepped(10)
    before = parameter.detach().clone()
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(InvalidInput, match=r"is torch.float32 \(10,\) on cpu, but must be .* float32 \(1000,\)"):
        optimizer.step()
    state = optimizer.state[parameter]
    for name in ("exp_avg", "exp_avg_sq"):
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros(1000), torch.zeros(1000)
        for bad in (torch.zeros(2000)[::2], torch.zeros(1000).double(), torch.zeros(1000, device="meta")):
            state[name] = bad
            with pytest.raises(InvalidInput, match="over the same parameters in the same order"):
                optimizer.step()
    assert float(state["step"]) == 1
    optimizer.state[parameter] = {"momentum_buffer": torch.zeros(1000)}
    with pytest.raises(InvalidInput, match="has no step, exp_avg, exp_avg_sq"):
        optimizer.step()
    assert_bitwise_equal(parameter.detach(), before)


def test_resized_compute_copy_is_refused():
    parameter, rounded = nn.Parameter(torch.ones(4)), torch.ones(4, dtype=torch.bfloat16)
    optimizer = AdamW([parameter], compute_copies={parameter: rounded})
    rounded.resize_(2)
    parameter.grad = torch.ones(4)
    with pytest.raises(InvalidInput, match=r"a compute copy must be contiguous bfloat16 \(4,\)"):
        optimizer.step()


def test_step_count_passes_256_with_bfloat16_default_dtype():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = AdamW([parameter])
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[parameter]["step"].dtype is torch.float32
    optimizer.state[parameter]["step"] = torch.tensor(256, dtype=torch.bfloat16)  # that was kept so
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 257


def test_step_bumps_autograd_version_of_weights():
    parameter, optimizer = stepped(3)
    kept = (parameter * parameter).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.parametrize(
    "option", [{"amsgrad": True}, {"maximize": True}, {"differentiable": True}, {"decoupled_weight_decay": False}]
)
def test_unsupported_options_are_refused(option):
    (name,) = option
    with pytest.raises(InvalidInput, match=f"{name}=.* is not supported"):
        AdamW([{"params": [nn.Parameter(torch.ones(2))], **option}])
    _, optimizer = stepped(2)
    known = optimizer.state_dict()
    known["param_groups"][0].update(option)
    with pytest.raises(InvalidInput, match=f"{name}=.* is not supported"):
        optimizer.load_state_dict(known)
    optimizer.param_groups[0].update(option)
    with pytest.raises(InvalidInput, match=f"{name}=.* is not supported"):
        optimizer.step()


def test_torch_adamw_state_is_accepted():
    parameter, _ = stepped(2)
    other = torch.optim.AdamW([parameter], lr=1e-3)
    other.step()
    optimizer = AdamW([parameter])
    optimizer.load_state_dict(other.state_dict())
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_copied_optimizer_updates_its_own_weights(copied):
    parameter, rounded = nn.Parameter(torch.ones(4)), torch.ones(4, dtype=torch.bfloat16)
    optimizer = AdamW([parameter], lr=0.5, compute_copies={parameter: rounded})
    other = copied(optimizer)
    (item,) = other.param_groups[0]["params"]
    item.grad = torch.ones(4)
    other.step()
    assert_bitwise_equal(other.compute_copies[item], item.detach().bfloat16())
    assert bool((item < 1).all()) and bool((parameter == 1).all()) and bool((rounded == 1).all())
