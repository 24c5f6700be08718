"""Gradients of norms and softmaxes on the CPU: the Row order's bits, whatever the neighbors; float64's values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import row_order
from detcompile.templates.rows.norms import reference_layer_norm, reference_rms_norm
from detcompile.templates.training import row_gradients
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, normal, sample

LENGTHS = [1, 15, 64, 65, 513, 1025]
OURS = torch.ops.detcompile


def weight_of(x: Tensor) -> Tensor:
    return normal(x.shape[-1:], x.dtype, 101) + 1


# name -> (g, x, instruction set) -> results; x is a softmax where one is taken
GRADIENTS = {
    "rms_norm": lambda g, x, isa=None: row_gradients.rms_norm_backward_cpu(g, x, weight_of(x), 1e-6, True, isa),
    "rms_norm, weight first": lambda g, x, isa=None: row_gradients.rms_norm_backward_cpu(
        g, x, weight_of(x).float(), 1e-6, False, isa
    ),
    "rms_norm, no weight": lambda g, x, isa=None: row_gradients.rms_norm_backward_cpu(g, x, None, 1e-6, False, isa),
    "layer_norm": lambda g, x, isa=None: row_gradients.layer_norm_backward_cpu(g, x, weight_of(x), 1e-5, isa),
    "softmax": lambda g, x, isa=None: (row_gradients.softmax_backward_cpu(g, torch.softmax(x, -1), g.dtype, isa),),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRADIENTS)
@given(m=st.integers(1, 70), start=st.integers(0, 9), length=st.sampled_from(LENGTHS))
def test_a_row_ignores_its_neighbors(name, dtype, m, start, length):
    g, x = (sample("heavy", (80, length), dtype, seed) for seed in (1, 2))
    rows = slice(start, start + m)
    if name == "softmax":
        x = torch.softmax(x, -1)
        ours = row_gradients.softmax_backward_cpu
        assert_bitwise_equal(ours(g[rows], x[rows], dtype), ours(g, x, dtype)[rows])
        return
    for part, whole in zip(GRADIENTS[name](g[rows], x[rows]), GRADIENTS[name](g, x)):
        assert_bitwise_equal(part, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_instruction_sets_threads_and_strides_do_not_matter(name, dtype):
    threads = torch.get_num_threads()
    for length in (7, 65, 513):
        g, x = (sample("heavy", (33, length), dtype, seed) for seed in (3, 4))
        expected = GRADIENTS[name](g, x)
        torch.set_num_threads(2)
        for isa in ISAS:
            for actual, value in zip(GRADIENTS[name](g.t().contiguous().t(), x, isa), expected):
                assert_bitwise_equal(actual, value, isa)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("length", [17, 64, 1025])
def test_gradients_have_the_bits_of_the_order(length):
    g, x = (sample("heavy", (5, length), torch.float32, seed) for seed in (5, 6))
    order, R = row_order(length, "cpu"), np.float32(length)
    sums = lambda terms: order.evaluate(terms)[:, None]  # noqa: E731
    g_, w, h = g.numpy(), weight_of(x).numpy(), x.numpy()
    scale = (1 / np.sqrt(sums(h * h).astype(np.float64) / length + 1e-6)).astype(np.float32)
    n, gw = h * scale, g_ * w
    dx, rows = row_gradients.rms_norm_backward_cpu(g, x, weight_of(x), 1e-6, False)
    assert_bitwise_equal(dx, torch.from_numpy((gw - n * (sums(gw * n) / R)) * scale))
    assert_bitwise_equal(rows, torch.from_numpy(g_ * n))
    centered = h - sums(h) / R
    scale = (1 / np.sqrt(sums(centered * centered).astype(np.float64) / length + 1e-5)).astype(np.float32)
    n = centered * scale
    dx, rows = row_gradients.layer_norm_backward_cpu(g, x, weight_of(x), 1e-5)
    assert_bitwise_equal(dx, torch.from_numpy(((gw - sums(gw) / R) - n * (sums(gw * n) / R)) * scale))
    assert_bitwise_equal(rows, torch.from_numpy(g_ * n))
    y = torch.softmax(x, -1)
    dx = row_gradients.softmax_backward_cpu(g, y, torch.float32)
    assert_bitwise_equal(dx, torch.from_numpy(y.numpy() * (g_ - sums(g_ * y.numpy()))))


def references(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    return {
        "rms_norm": reference_rms_norm(x, w, 1e-6),
        "layer_norm": reference_layer_norm(x, w, None, 1e-5),
        "softmax": torch.softmax(x, -1),
    }


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_gradients_are_float64_autograds(name):
    g, x = (normal((9, 300), torch.float32, seed) for seed in (7, 8))
    leaves = [x.double().requires_grad_(), weight_of(x).double().requires_grad_()]
    exact = torch.autograd.grad(references(*leaves)[name], leaves, g.double(), allow_unused=True)
    actual = {
        "rms_norm": lambda: OURS.rms_norm_backward(g, x, weight_of(x), 1e-6, False),
        "layer_norm": lambda: OURS.layer_norm_backward(g, x, weight_of(x), 1e-5),
        "softmax": lambda: [OURS.softmax_backward(g, torch.softmax(x, -1), torch.float32)],
    }[name]()
    assert (actual[0] - exact[0]).norm() < 1e-6 * exact[0].norm()
    if name != "softmax":
        assert (OURS.token_sum(actual[1] / 64) * 64 - exact[1]).norm() < 1e-6 * exact[1].norm()


def test_the_operations_are_as_torch_wants_them():
    g, x = normal((3, 9), torch.float32, 1), normal((3, 9), torch.float32, 2)
    torch.library.opcheck(OURS.rms_norm_backward.default, (g, x, weight_of(x), 1e-6, True))
    torch.library.opcheck(OURS.layer_norm_backward.default, (g, x, None, 1e-6))
    torch.library.opcheck(OURS.softmax_backward.default, (g, x, torch.bfloat16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: OURS.rms_norm_backward(g[1:], x, None, 1e-6, True), r"x is .* must be torch\.float32"),
        (lambda g, x: OURS.layer_norm_backward(g, x.bfloat16(), None, 1e-6), r"x is .* must be torch\.float32"),
        (lambda g, x: OURS.layer_norm_backward(g, x, x[0, 1:], 1e-6), r"weight .* \[R\] with R = 4"),
        (lambda g, x: OURS.softmax_backward(g[:, :0], x[:, :0], torch.float32), r"\[\.\.\., R>0\]"),
        (lambda g, x: OURS.softmax_backward(g.double(), x.double(), torch.float32), "g is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(InvalidInput, match=message):
        call(torch.zeros(3, 4), torch.zeros(3, 4))
