"""Axis: CUDA graphs on and off."""

import pytest
import torch

from tests.conftest import NEEDS_CUDA
from tests.invariance.axis import MODELS, assert_axis_holds, assert_axis_sees_a_swap

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_replayed_step_equals_a_plain_one(name: str, dtype: torch.dtype) -> None:
    assert_axis_holds("cuda_graphs", name, dtype, "cuda")


def test_an_order_that_follows_the_batch_is_seen() -> None:
    assert_axis_sees_a_swap("cuda_graphs", "cuda")
