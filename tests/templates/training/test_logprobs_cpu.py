"""token_logprobs on the CPU: log_softmax's bytes, blind to other rows; float64's gradients; what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.sampling.logprobs import token_logprobs
from detcompile.templates.training.logprobs import (
    reference_token_logprobs,
    token_logprobs_backward_cpu,
    token_logprobs_cpu,
)
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, normal, sample

OURS = torch.ops.detcompile


def drawn(rows: int, V: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.randint(0, V, (rows,), generator=torch.Generator().manual_seed(3))
    return sample("heavy", (rows, V), dtype, V), targets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "radices"), [(1, ()), (50, ()), (4097, ()), (4097, (2, 2))])
def test_logprobs_have_the_engines_bytes(V, radices, dtype):
    logits, targets = drawn(20, V, dtype)
    actual, _ = OURS.token_logprobs(logits, targets, 1.0, radices)
    assert_bitwise_equal(actual, OURS.log_softmax(logits, torch.float32, radices).gather(1, targets[:, None])[:, 0])
    if not radices:
        assert_bitwise_equal(actual, token_logprobs(logits, targets).chosen)
    warm, _ = OURS.token_logprobs(logits, targets, 0.7, radices)
    scaled = OURS.log_softmax(logits.float() / torch.tensor(0.7), torch.float32, radices)
    assert_bitwise_equal(warm, scaled.gather(1, targets[:, None]).squeeze(1))


@pytest.mark.parametrize("dtype", DTYPES)
@given(m=st.integers(1, 30), start=st.integers(0, 9), V=st.sampled_from([1, 16, 50, 1025]))
def test_a_row_ignores_its_neighbors(dtype, m, start, V):
    logits, targets = drawn(40, V, dtype)
    g, of_entropy, rows = normal((40,), torch.float32, 1), normal((40,), torch.float32, 2), slice(start, start + m)
    whole = OURS.token_logprobs(logits, targets, 1.5)
    for part, value in zip(OURS.token_logprobs(logits[rows], targets[rows], 1.5), whole):
        assert_bitwise_equal(part, value[rows])
    ours = OURS.token_logprobs_backward
    assert_bitwise_equal(
        ours(g[rows], of_entropy[rows], logits[rows], targets[rows], 1.5),
        ours(g, of_entropy, logits, targets, 1.5)[rows],
    )


def test_instruction_sets_and_threads_do_not_matter():
    threads = torch.get_num_threads()
    for dtype in DTYPES:
        logits, targets = drawn(33, 1030, dtype)
        g = normal((33,), torch.float32, 1)
        expected = *token_logprobs_cpu(logits, targets, 0.5), token_logprobs_backward_cpu(g, g, logits, targets, 0.5)
        torch.set_num_threads(2)
        for isa in ISAS:
            actual = token_logprobs_cpu(logits, targets, 0.5, isa=isa)
            actual = *actual, token_logprobs_backward_cpu(g, g, logits, targets, 0.5, isa=isa)
            for ours, value in zip(actual, expected):
                assert_bitwise_equal(ours, value, isa)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_are_float64_autograds(temperature, with_entropy):
    logits, targets = normal((9, 300), torch.float32, 4), torch.arange(9) * 31
    weights = normal((2, 9), torch.float32, 5)

    def gradient(dtype, op):
        leaf = logits.to(dtype).requires_grad_()
        logprob, entropy = op(leaf, targets, temperature)
        loss = (logprob * weights[0]).sum() + ((entropy * weights[1]).sum() if with_entropy else 0.0)
        return torch.autograd.grad(loss, leaf)[0], logprob, entropy

    for actual, exact in zip(
        gradient(torch.float32, OURS.token_logprobs), gradient(torch.float64, reference_token_logprobs)
    ):
        assert (actual - exact).norm() < 2e-6 * exact.norm()


def test_the_gradient_of_the_entropy_alone():
    logits, targets = normal((4, 30), torch.float32, 4).requires_grad_(), torch.arange(4)
    (actual,) = torch.autograd.grad(OURS.token_logprobs(logits, targets)[1].sum(), logits)
    leaf = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(reference_token_logprobs(leaf, targets)[1].sum(), leaf)
    assert (actual - exact).norm() < 1e-6 * exact.norm()


def test_a_forbidden_token_has_no_probability_and_no_gradient():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    logprob, entropy = OURS.token_logprobs(logits, torch.tensor([2]))
    expected = torch.log_softmax(torch.tensor([0.0, 1.0]), -1)
    assert abs(float(logprob) - float(expected[1])) < 1e-6
    assert abs(float(entropy) + float((expected.exp() * expected).sum())) < 1e-6
    actual = OURS.token_logprobs_backward(torch.ones(1), torch.ones(1), logits, torch.tensor([2]))
    assert bool(actual.isfinite().all()) and float(actual[0, 1]) == 0.0


def test_a_gradient_is_as_accurate_as_torchs():
    logits, targets = drawn(50, 3000, torch.bfloat16)
    g = normal((50,), torch.float32, 5)
    leaf = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(reference_token_logprobs(leaf, targets)[0], leaf, g.double())
    theirs = logits.clone().requires_grad_()
    (torchs,) = torch.autograd.grad(torch.log_softmax(theirs.float(), -1).gather(1, targets[:, None])[:, 0], theirs, g)
    ours = OURS.token_logprobs_backward(g, None, logits, targets)
    assert (ours - exact).norm() <= 1.05 * (torchs - exact).norm()


def test_the_operations_are_as_torch_wants_them():
    logits, targets = normal((3, 9), torch.float32, 1), torch.tensor([1, 0, 8])
    torch.library.opcheck(OURS.token_logprobs.default, (logits.clone().requires_grad_(), targets, 0.5))
    torch.library.opcheck(OURS.token_logprobs_backward.default, (torch.ones(3), None, logits, targets))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, t: OURS.token_logprobs(x, t[1:]), r"targets .* must be .* \[M\]"),
        (lambda x, t: OURS.token_logprobs(x, t.float()), r"targets .* must be .* \[M\]"),
        (lambda x, t: OURS.token_logprobs(x, t, 0.0), r"temperature=0\.0 must be positive"),
        (lambda x, t: OURS.token_logprobs(x, t + 4), r"target 4 of row 0 is outside .*\[0, 4\)"),
        (lambda x, t: OURS.token_logprobs(x, t - 1), "target -1 of row 0"),
        (lambda x, t: OURS.token_logprobs_backward(x[0], None, x, t), "(g|logits) is torch.float32"),
        (lambda x, t: OURS.token_logprobs_backward(x[:, 0], t, x, t), "g_entropy is torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(InvalidInput, match=message):
        call(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
