"""The comparison that every invariance test relies on sees each kind of difference."""

import pytest
import torch

from tests.bits import assert_bitwise_equal


def test_equal_bytes_pass_for_any_strides():
    x = torch.randn(3, 5).to(torch.bfloat16)
    assert_bitwise_equal(x, x.t().contiguous().t())
    assert_bitwise_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert_bitwise_equal(torch.empty(0, 4), torch.empty(0, 4))
    assert_bitwise_equal(torch.tensor(True), torch.tensor(True))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), r"1 of 1 .* first at \(0,\): 0.0 .*0x80000000"),
        (torch.ones(2, 3), torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 2.0]]), r"2 of 6 .* first at \(1, 1\)"),
        (torch.tensor(1.0), torch.tensor(2.0), r"first at \(\)"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(2), torch.ones(1, 2), "shape"),
        (torch.ones(1), torch.nextafter(torch.ones(1), torch.zeros(1)), "0x3f7fffff"),
    ],
)
def test_any_difference_fails_and_says_where(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal(actual, expected)
