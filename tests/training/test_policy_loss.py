"""policy_loss is PPO's clipped objective, and a token's gradient depends on that token alone."""

import pytest
import torch

from detcompile import policy_loss
from detcompile.errors import InvalidInput
from detcompile.templates.training.pointwise import policy_terms, policy_terms_cuda
from tests.bits import assert_bitwise_equal
from tests.templates.cases import normal

COUNT = 1003


def drawn(count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    old = normal((count,), torch.float32, 1) - 3
    return (old + 0.3 * normal((count,), torch.float32, 2)).requires_grad_(), old, normal((count,), torch.float32, 3)


def reference(logprobs, old, advantages, denominator, low, high):
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages).sum() / denominator


@pytest.mark.parametrize("clip", [0.2, (0.2, 0.28), (0.0, 0.0)])
def test_values_and_gradients_match_float64(clip):
    logprobs, old, advantages = drawn()
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    loss = policy_loss(logprobs, old, advantages, 700, clip)
    (actual,) = torch.autograd.grad(loss, logprobs)
    leaf = logprobs.detach().double().requires_grad_()
    exact = reference(leaf, old.double(), advantages.double(), 700, low, high)
    (expected,) = torch.autograd.grad(exact, leaf)
    assert loss.dtype == torch.float64 and abs(float(loss.detach() - exact.detach())) < 1e-6
    assert (actual - expected).abs().max() < 1e-9
    assert 0 < int((actual == 0).sum()) < COUNT


def test_token_loss_ignores_position_and_batch():
    logprobs, old, advantages = drawn()
    whole = policy_loss(logprobs, old, advantages, 700)
    (expected,) = torch.autograd.grad(whole, logprobs)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    for cuts in ([1, 2, 1000], [500, 503], [17] * 59):
        total, places = torch.zeros((), dtype=torch.float64), []
        for part in order.split(cuts):
            mine = logprobs.detach()[part].requires_grad_()
            loss = policy_loss(mine, old[part], advantages[part], 700)
            total = total + loss.detach()
            (gradient,) = torch.autograd.grad(loss, mine)
            assert_bitwise_equal(gradient, expected[part])
            places.append(part)
        assert_bitwise_equal(total, whole.detach())


def test_on_policy_gradient_is_the_advantage():
    logprobs, _, advantages = drawn()
    rows = logprobs.detach().view(17, 59).requires_grad_()
    loss = policy_loss(rows, None, advantages.view(17, 59), 256)
    (actual,) = torch.autograd.grad(2 * loss, rows)
    assert_bitwise_equal(actual, -2 * advantages.view(17, 59) / 256)
    assert abs(float(loss) + float(advantages.double().sum()) / 256) < 1e-6


def test_second_derivatives_are_refused():
    logprobs, old, advantages = drawn(40)
    (first,) = torch.autograd.grad(policy_loss(logprobs, old, advantages, 10) ** 2, logprobs, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        first.sum().backward()


def test_token_with_zero_advantage_adds_nothing():
    logprobs, old, advantages = drawn(40)
    advantages[7:] = 0
    loss = policy_loss(logprobs, old, advantages, 10)
    (actual,) = torch.autograd.grad(loss, logprobs)
    assert not actual[7:].any()
    assert_bitwise_equal(loss.detach(), policy_loss(logprobs[:7], old[:7], advantages[:7], 10).detach())


@pytest.mark.parametrize("terms_of", [policy_terms, policy_terms_cuda])
def test_token_with_zero_advantage_may_have_any_old_logprob(terms_of):
    """Unset padding: NaN, or a value so low that the ratio is infinite."""
    logprobs, old, advantages = (tensor.detach() for tensor in drawn(40))
    advantages[7:] = 0
    given = {"low": 0.8, "high": 1.2, "denominator": 10.0}
    expected = terms_of(logprobs, old, advantages, **given)
    old[7:20], old[20:30], logprobs[30:] = torch.nan, -200.0, -torch.inf
    for actual, known in zip(terms_of(logprobs, old, advantages, **given), expected, strict=True):
        assert_bitwise_equal(actual, known)
    loss = policy_loss(logprobs.requires_grad_(), old, advantages, 10)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert not gradient[7:].any() and bool(gradient[:7].any()) and bool(loss.isfinite())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"denominator": 0}, r"denominator=0\.0 positive"),
        ({"clip": (1.5, 0.2)}, r"clip=\(1\.5, 0\.2\) must be distances"),
        ({"clip": -0.1}, "must be distances"),
        ({"old": torch.zeros(3)}, r"old is torch.float32 \(3,\) on cpu, but must be float32 \(4,\)"),
        ({"advantages": torch.zeros(4).double()}, "advantages is torch.float64"),
        ({"logprobs": torch.zeros(4).bfloat16()}, "logprobs is torch.bfloat16"),
        ({"advantages": torch.zeros(4, device="meta")}, "advantages: it is on the meta device"),
        ({"old": torch.zeros(4).to_sparse()}, "old: it is of layout torch.sparse_coo"),
        ({"advantages": torch._neg_view(torch.zeros(4))}, "advantages: it is a negated view"),
        ({"advantages": 1.0}, "advantages is a float: pass a tensor"),
        ({"logprobs": [0.0]}, "logprobs is a list: pass a tensor"),
        ({"clip": (0.2, torch.nan)}, "clip is NaN: give a number"),
        ({"clip": (0.1, 0.2, 0.3)}, r"clip .* is a tuple: give a number"),
        ({"clip": "0.2"}, "clip '0.2' is a str: give a number"),
        ({"denominator": None}, "denominator None is .*: give a number"),
        ({"denominator": 1e-300}, "denominator=1e-300 positive and within float32"),
        ({"denominator": torch.inf}, "denominator=inf positive and within float32"),
    ],
)
def test_mismatched_inputs_are_refused(change, message):
    given = {"logprobs": torch.zeros(4), "old": torch.zeros(4), "advantages": torch.zeros(4), "denominator": 2.0}
    with pytest.raises(InvalidInput, match=message):
        policy_loss(**(given | change))


def test_clip_accepts_list_or_tuple():
    logprobs, old, advantages = drawn(40)
    actual = (policy_loss(logprobs, old, advantages, 10, clip).detach() for clip in ([0.1, 0.3], (0.1, 0.3)))
    assert_bitwise_equal(*actual)


def test_tensor_on_other_device_is_refused(monkeypatch):
    """A kernel would read from its address; the meta device stands for a GPU beside a CPU."""
    monkeypatch.setattr("detcompile.training.policy_loss.require_values", lambda tensor, name: None)
    with pytest.raises(InvalidInput, match=r"old is torch\.float32 .* on meta, but must be .* on cpu"):
        policy_loss(torch.zeros(4), torch.zeros(4, device="meta"), torch.zeros(4), 2.0)
