"""Row sums, moments, norms, softmaxes on the CPU: the Row order's bits, whatever the neighbors; accuracy; refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders import Row
from detcompile.orders.float32 import fma_float32
from detcompile.orders.numerics import row_order
from detcompile.templates.rows import norms, softmax
from detcompile.templates.rows import sums as rows
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, KINDS, assert_as_accurate, normal, sample

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 511, 512, 513, 1025, 4097]
RADICES = [(), (2, 2, 2), (3, 2)]

# name -> (x, instruction set) -> tensor, each over x [M, R]
OPS = {
    "row_sum": lambda x, isa=None: rows.row_sum_cpu(x, None, isa),
    "row_sum float32": lambda x, isa=None: rows.row_sum_cpu(x, torch.float32, isa),
    "row_var_mean": lambda x, isa=None: torch.stack(rows.row_var_mean_cpu(x, 0.0, isa), -1),
    "rms_norm": lambda x, isa=None: norms.rms_norm_cpu(x, _weight(x), 1e-6, True, isa),
    "rms_norm, weight first": lambda x, isa=None: norms.rms_norm_cpu(x, _weight(x).float(), 1e-6, False, isa),
    "layer_norm": lambda x, isa=None: norms.layer_norm_cpu(x, _weight(x), _bias(x), 1e-5, isa),
    "softmax": lambda x, isa=None: softmax.softmax_cpu(x, None, (), isa),
    "softmax, leaves": lambda x, isa=None: softmax.softmax_cpu(x, torch.float32, (2, 2), isa),
    "log_softmax": lambda x, isa=None: softmax.log_softmax_cpu(x, None, (3,), isa),
    "logsumexp": lambda x, isa=None: softmax.logsumexp_cpu(x, (2,), isa),
}


def _weight(x):
    return normal(x.shape[-1:], x.dtype, 101)


def _bias(x):
    return normal(x.shape[-1:], x.dtype, 102)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
@given(m=st.integers(1, 70), start=st.integers(0, 9), length=st.sampled_from(LENGTHS))
def test_a_row_ignores_its_neighbors(name, dtype, m, start, length):
    x = sample("heavy", (80, length), dtype, length)
    assert_bitwise_equal(OPS[name](x[start : start + m]), OPS[name](x)[start : start + m])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_instruction_sets_threads_and_strides_do_not_matter(name, dtype):
    threads = torch.get_num_threads()
    for length in (7, 65, 513, 4097):
        x = sample("heavy", (33, length), dtype, length)
        expected = OPS[name](x)
        for isa in ISAS:
            assert_bitwise_equal(OPS[name](x, isa), expected, isa)
        torch.set_num_threads(2)
        assert_bitwise_equal(OPS[name](x), expected)
        torch.set_num_threads(threads)
        wide = torch.full((33, length + 5), torch.nan, dtype=dtype)
        wide[:, 3 : length + 3] = x
        assert_bitwise_equal(OPS[name](wide[:, 3 : length + 3]), expected)
        assert_bitwise_equal(OPS[name](x.t().contiguous().t()), expected)
        assert_bitwise_equal(OPS[name](x.view(3, 11, length)).flatten(), expected.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [*LENGTHS, 30_011])
def test_row_sum_has_the_bits_of_the_order(dtype, kind, length):
    x = sample(kind, (5, length), dtype, length)
    expected = row_order(length, "cpu").evaluate(x.float().numpy())
    assert_bitwise_equal(rows.row_sum_cpu(x, torch.float32), torch.from_numpy(expected))


@pytest.mark.parametrize("length", [17, 64, 1025, 4097])
def test_moments_and_norms_have_the_bits_of_the_order(length):
    x, order = sample("heavy", (5, length), torch.float32, length), row_order(length, "cpu")
    values, R = x.numpy(), np.float32(length)
    mean = order.evaluate(values) / R
    centered = values - mean[:, None]
    var, ours_mean = rows.row_var_mean_cpu(x, 1.0)
    squares = order.evaluate(centered * centered)
    assert_bitwise_equal(ours_mean, torch.from_numpy(mean))
    assert_bitwise_equal(var, torch.from_numpy(squares / np.float32(length - 1)))
    scale = (1 / np.sqrt(order.evaluate(values * values).astype(np.float64) / length + 1e-6)).astype(np.float32)
    assert_bitwise_equal(norms.rms_norm_cpu(x, None, 1e-6, True), torch.from_numpy(values * scale[:, None]))
    scale = (1 / np.sqrt(squares.astype(np.float64) / length + 1e-5)).astype(np.float32)
    assert_bitwise_equal(norms.layer_norm_cpu(x, None, None, 1e-5), torch.from_numpy(centered * scale[:, None]))


def test_a_variance_of_fewer_elements_than_the_correction_is_torchs():
    x = torch.tensor([[1.0, 2.0]])
    assert_bitwise_equal(rows.row_var_mean_cpu(x, 3.0)[0], torch.tensor([torch.inf]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radices", RADICES)
@pytest.mark.parametrize("length", [1, 64, 1000, 4097, 30_011])
def test_softmax_has_the_bits_of_the_order(kind, radices, length):
    x = sample(kind, (3, length), torch.float32, length)
    terms = _exp(x.numpy() - x.numpy().max(-1, keepdims=True))
    total = row_order(length, "cpu", radices).evaluate(terms)
    assert_bitwise_equal(softmax.softmax_cpu(x, None, radices), torch.from_numpy(terms / total[:, None]))


def _exp(x):
    """elementary.h's exponential in numpy, for x <= 0."""
    x = np.maximum(np.float32(-104), x)
    n = (x * np.float32(np.log2(np.e)) + np.float32(1.5 * 2**23)) - np.float32(1.5 * 2**23)
    r = fma_float32(n, np.float32(-0.693359375), x)
    r = fma_float32(n, np.float32(2.12194440054690583e-4), r)
    p = np.float32(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        p = fma_float32(p, r, np.float32(1 / factorial))
    return np.ldexp(p.astype(np.float64), n.astype(np.int64)).astype(np.float32)


@pytest.mark.parametrize(
    "swapped", [Row(4097, 64), Row(4097, 512), Row(4097, 512, 2), Row(4097, 1024, 1, (2, 2))], ids=str
)
def test_another_order_has_other_bits(swapped):
    x = sample("heavy", (64, 4097), torch.float32)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(rows.row_sum_cpu(x), torch.from_numpy(swapped.evaluate(x.numpy())))


ACCURACY = {
    "row_sum": (lambda x: rows.row_sum_cpu(x), lambda x: x.sum(-1), lambda x: x.double().sum(-1)),
    "mean": (
        lambda x: rows.row_var_mean_cpu(x, 0.0)[1],
        lambda x: x.float().mean(-1),
        lambda x: x.double().mean(-1),
    ),
    # torch.var accumulates in float64 on the CPU; the comparator is the same two passes over its float32 mean
    "var": (
        lambda x: rows.row_var_mean_cpu(x, 0.0)[0],
        lambda x: (x.float() - x.float().mean(-1, keepdim=True)).square().mean(-1),
        lambda x: x.double().var(-1, correction=0),
    ),
    "rms_norm": (
        lambda x: norms.rms_norm_cpu(x, _weight(x), 1e-6, False),
        lambda x: F.rms_norm(x, x.shape[-1:], _weight(x), 1e-6),
        lambda x: norms.reference_rms_norm(x, _weight(x), 1e-6),
    ),
    "layer_norm": (
        lambda x: norms.layer_norm_cpu(x, _weight(x), _bias(x), 1e-5),
        lambda x: F.layer_norm(x, x.shape[-1:], _weight(x), _bias(x), 1e-5),
        lambda x: norms.reference_layer_norm(x, _weight(x), _bias(x), 1e-5),
    ),
    "softmax": (lambda x: softmax.softmax_cpu(x, None, ()), lambda x: x.softmax(-1), lambda x: x.double().softmax(-1)),
    "log_softmax": (
        lambda x: softmax.log_softmax_cpu(x, None, (2, 2, 2)),
        lambda x: x.log_softmax(-1),
        lambda x: x.double().log_softmax(-1),
    ),
    "logsumexp": (
        lambda x: softmax.logsumexp_cpu(x, ()),
        lambda x: x.float().logsumexp(-1),
        lambda x: x.double().logsumexp(-1),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACCURACY)
@pytest.mark.parametrize("length", [64, 2048])
def test_as_accurate_as_torch(name, kind, dtype, length):
    ours, theirs, reference = ACCURACY[name]
    x = sample(kind, (2048, length), dtype, length)
    assert_as_accurate(ours(x), theirs(x), reference(x), f"{name} {kind} {dtype} {length}")


def test_round_before_weight_rounds_twice():
    x, weight = normal((4, 65), torch.bfloat16, 1), normal((65,), torch.bfloat16, 2)
    n = norms.rms_norm_cpu(x, None, 1e-6, True)
    expected = (n.float() * weight.float()).bfloat16()
    assert_bitwise_equal(norms.rms_norm_cpu(x, weight, 1e-6, True), expected)
    assert not torch.equal(norms.rms_norm_cpu(x, weight, 1e-6, False), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_give_torch_results(dtype):
    inf = torch.inf
    x = torch.tensor(
        [[-inf, -inf, -inf], [-inf, 1.0, 2.0], [inf, 0.0, 1.0], [torch.nan, 0.0, 1.0], [-200.0, 0.0, -90.0]]
    )
    x = x.repeat_interleave(23, 1).to(dtype)
    for ours, theirs in (
        (softmax.softmax_cpu(x, torch.float32, ()), x.float().softmax(-1)),
        (softmax.log_softmax_cpu(x, torch.float32, ()), x.float().log_softmax(-1)),
        (softmax.logsumexp_cpu(x, ()), x.float().logsumexp(-1)),
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert (softmax.softmax_cpu(x[1:2], None, ())[0, :23] == 0).all()


@pytest.mark.parametrize("op", [softmax.softmax_cpu, softmax.log_softmax_cpu])
def test_none_stands_for_no_radices(op):
    """AOTInductor's proxy executor hands None where the graph has an empty list."""
    x = normal((3, 70), torch.float32, 1)
    assert_bitwise_equal(op(x, None, None), op(x, None, []))
    assert_bitwise_equal(softmax.logsumexp_cpu(x, None), softmax.logsumexp_cpu(x, []))


def test_no_rows_give_an_empty_result():
    x = torch.empty(0, 8)
    for op in OPS.values():
        assert op(x).shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ops_and_their_fakes_agree(dtype):
    ops, x, w = torch.ops.detcompile, normal((2, 3, 8), dtype), normal((8,), dtype)
    for op, arguments in (
        (ops.row_sum, (x, torch.float32)),
        (ops.row_var_mean, (x, 1.0)),
        (ops.rms_norm, (x, w, 1e-6, True)),
        (ops.layer_norm, (x, w, w, 1e-6)),
        (ops.softmax, (x, torch.float32, [2])),
        (ops.log_softmax, (x, None, [])),
        (ops.logsumexp, (x, [])),
    ):
        torch.library.opcheck(op.default, arguments)


def test_arguments_that_do_not_fit_are_refused():
    x = torch.zeros(2, 8)
    with pytest.raises(InvalidInput, match=r"weight .* \(7,\) .* \[R\] with R = 8"):
        torch.ops.detcompile.rms_norm(x, torch.zeros(7), 1e-6, True)
    with pytest.raises(InvalidInput, match=r"bias .* \(8, 1\) .* must be"):
        torch.ops.detcompile.layer_norm(x, None, torch.zeros(8, 1), 1e-6)
    with pytest.raises(InvalidInput, match=r"must be .* \[\.\.\., R>0\]"):
        torch.ops.detcompile.softmax(torch.zeros(2, 0), None, ())
    with pytest.raises(InvalidInput, match=r"x is torch\.int64"):
        torch.ops.detcompile.row_sum(torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(NumericsError, match="at least 1"):
        torch.ops.detcompile.logsumexp(x, (0, 2))
