"""Gradients of rows on the GPU: the order's bits with any neighbors, near float64's values."""

import numpy as np
import pytest
import torch
from torch import Tensor

from detcompile.orders.numerics import row_order
from detcompile.templates.rows.norms import reference_layer_norm, reference_rms_norm
from detcompile.templates.rows.softmax_gpu import log_normalizer_cuda, log_softmax_cuda
from detcompile.templates.training import logprobs
from detcompile.templates.training.logprobs import (
    reference_token_logprobs,
    scored_tokens,
    token_logprobs_backward_cuda,
    token_logprobs_cuda,
)
from detcompile.templates.training.row_gradients_gpu import (
    layer_norm_backward_cuda,
    logit_gradients,
    rms_norm_backward_cuda,
    softmax_backward_cuda,
)
from tests.bits import assert_bitwise_equal
from tests.templates.cases import normal
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [20, 128, 257, 1030] if INTERPRETED else [20, 128, 257, 4096, 16386]
VOCABULARY = 300 if INTERPRETED else 151_936
LONG = 33_000 if INTERPRETED else 151_936  # tokens: rows of chunks


def rows_of(length: int, dtype: torch.dtype, seed: int, count: int = 37) -> Tensor:
    return normal((count, length), dtype, seed).to(DEVICE)


def weight_of(x: Tensor) -> Tensor:
    return (normal(x.shape[-1:], x.dtype, 101) + 1).to(DEVICE)


GRADIENTS = {
    "rms_norm": lambda g, x: rms_norm_backward_cuda(g, x, weight_of(x), 1e-6, True),
    "rms_norm, weight first": lambda g, x: rms_norm_backward_cuda(g, x, weight_of(x).float(), 1e-6, False),
    "rms_norm, no weight": lambda g, x: rms_norm_backward_cuda(g, x, None, 1e-6, False),
    "layer_norm": lambda g, x: layer_norm_backward_cuda(g, x, weight_of(x), 1e-5),
    "softmax": lambda g, x: [softmax_backward_cuda(g, torch.softmax(x, -1), x.dtype)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_row_ignores_its_neighbors_and_strides(name, length, dtype):
    g, x = rows_of(length, dtype, 1), rows_of(length, dtype, 2)
    whole = GRADIENTS[name](g, x)
    wide = torch.nn.functional.pad(x, (3, 2))[:, 3 : 3 + length]
    for actual, value in zip(GRADIENTS[name](g.t().contiguous().t(), wide), whole):
        assert_bitwise_equal(actual, value)
    if name == "softmax":  # torch's own has other bits in a part
        return
    for start, count in ((0, 1), (5, 1), (9, 17)):
        rows = slice(start, start + count)
        for actual, value in zip(GRADIENTS[name](g[rows], x[rows]), whole):
            assert_bitwise_equal(actual, value[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_gradients_are_float64_autograds(name, length, dtype):
    g, x = rows_of(length, dtype, 3), rows_of(length, dtype, 4)
    leaves = [x.double().requires_grad_(), weight_of(x).double().requires_grad_()]
    value = {
        "rms_norm": lambda x, w: reference_rms_norm(x, w, 1e-6),
        "layer_norm": lambda x, w: reference_layer_norm(x, w, None, 1e-5),
        "softmax": lambda x, w: torch.softmax(x, -1),
    }[name](*leaves)
    exact = torch.autograd.grad(value, leaves, g.double(), allow_unused=True)
    actual = GRADIENTS[name](g, x)
    most = 2e-6 if dtype is torch.float32 else 2e-2
    assert (actual[0].double() - exact[0]).norm() < most * exact[0].norm()
    if name != "softmax":
        assert (actual[1].double().sum(0) - exact[1]).norm() < most * exact[1].norm()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_softmax_has_the_bits_of_the_order(length):
    g, y = rows_of(length, torch.float32, 5), torch.softmax(rows_of(length, torch.float32, 6), -1)
    terms = (g * y).cpu().numpy()
    total = row_order(length, "cuda", (), torch.float32).evaluate(terms)[:, None]
    expected = torch.from_numpy(y.cpu().numpy() * (g.cpu().numpy() - total).astype(np.float32))
    assert_bitwise_equal(softmax_backward_cuda(g, y, torch.float32).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits(with_entropy, temperature, dtype):
    logits, targets = rows_of(VOCABULARY, dtype, 7, 9), torch.arange(9, device=DEVICE) * 31
    g = normal((9,), torch.float32, 8).to(DEVICE)
    g_entropy = normal((9,), torch.float32, 9).to(DEVICE) if with_entropy else None
    leaf = logits.double().requires_grad_()
    exact = reference_token_logprobs(leaf, targets, temperature)
    loss = (exact[0] * g).sum() + (0.0 if g_entropy is None else (exact[1] * g_entropy).sum())
    (expected,) = torch.autograd.grad(loss, leaf)
    actual = token_logprobs_backward_cuda(g, g_entropy, logits, targets, temperature)
    assert (actual.double() - expected).norm() < (2e-6 if dtype is torch.float32 else 1e-2) * expected.norm()
    values = token_logprobs_cuda(logits, targets, temperature)
    for ours, value in zip(values, exact):
        assert (ours - value).norm() < 2e-6 * value.norm()
    divided = logits.float() / torch.full((), temperature, device=DEVICE) if temperature != 1.0 else logits
    given = targets, temperature, (), log_normalizer_cuda(divided, ())
    assert_bitwise_equal(token_logprobs_backward_cuda(g, g_entropy, logits, *given), actual)
    for ours, value in zip(token_logprobs_cuda(logits, *given), values):
        assert_bitwise_equal(ours, value)
    part = slice(2, 5)
    of_part = None if g_entropy is None else g_entropy[part]
    again = token_logprobs_backward_cuda(g[part], of_part, logits[part], targets[part], temperature)
    assert_bitwise_equal(again, actual[part])
    for ours, value in zip(token_logprobs_cuda(logits[part], targets[part], temperature), values):
        assert_bitwise_equal(ours, value[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [300, LONG])
def test_an_entropy_is_the_sum_of_its_order(vocabulary, dtype):
    """Of rows with impossible tokens, too."""
    logits, targets = rows_of(vocabulary, dtype, 10, 4), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    logits[1:3, 1::3] = -torch.inf
    normalizer, p = log_normalizer_cuda(logits, ()), torch.empty_like(logits, dtype=torch.float32)
    minus_one = torch.full((4,), -1.0, device=DEVICE)
    logit_gradients(logits, normalizer, targets - 1, minus_one, None, 1.0, p)  # no token is the target: probabilities
    terms = (p * log_softmax_cuda(logits, torch.float32, ()).clamp_min(-1e30)).cpu().numpy()
    expected = -torch.from_numpy(row_order(vocabulary, "cuda", (), dtype).evaluate(terms))
    assert_bitwise_equal(token_logprobs_cuda(logits, targets)[1].cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "radices"), [(300, ()), (300, (2, 3)), (LONG, ()), (2 * LONG, (2,))])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_logprob_has_the_bytes_of_log_softmax(temperature, vocabulary, radices, dtype):
    logits, targets = rows_of(vocabulary, dtype, 11, 3), torch.arange(3, device=DEVICE) * 41
    warm = logits if temperature == 1.0 else logits.float() / torch.full((), temperature, device=DEVICE)
    of_all = log_softmax_cuda(warm, torch.float32, radices)
    actual, _ = token_logprobs_cuda(logits, targets, temperature, radices)
    assert_bitwise_equal(actual, of_all.gather(1, targets[:, None]).squeeze(1))


@pytest.mark.parametrize("mark", [pytest.param(None, marks=NEEDS_GPU)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scored_tokens_have_the_bytes_of_the_operation(temperature, mark):
    logits, targets = rows_of(LONG, torch.bfloat16, 15, 9).requires_grad_(), torch.arange(9, device=DEVICE) * 31
    g = [normal((9,), torch.float32, seed).to(DEVICE) for seed in (16, 17)]
    runs = [run(logits, targets, temperature) for run in (scored_tokens, torch.ops.detcompile.token_logprobs)]
    gradients = [torch.autograd.grad(results, logits, g) for results in runs]
    for ours, expected in zip((*runs[0], *gradients[0]), (*runs[1], *gradients[1])):
        assert_bitwise_equal(ours, expected)


def test_pieces_of_rows_change_nothing(monkeypatch):
    logits, targets = rows_of(300, torch.float32, 12, 7), torch.arange(7, device=DEVICE) * 41
    g, g_entropy = (normal((7,), torch.float32, seed).to(DEVICE) for seed in (13, 14))
    given = g, g_entropy, logits, targets, 0.7
    whole = *token_logprobs_cuda(*given[2:]), token_logprobs_backward_cuda(*given)
    monkeypatch.setattr(logprobs, "ELEMENTS_AT_ONCE", 2 * 300)
    for actual, value in zip((*token_logprobs_cuda(*given[2:]), token_logprobs_backward_cuda(*given)), whole):
        assert_bitwise_equal(actual, value)
