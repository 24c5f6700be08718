"""Axis: composition."""

import pytest
import torch

from tests.invariance.axis import MODELS, assert_axis_holds, assert_axis_sees_a_swap


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_row_ignores_who_its_neighbors_are(name: str, dtype: torch.dtype, device: str) -> None:
    assert_axis_holds("composition", name, dtype, device)


def test_an_order_that_follows_the_batch_is_seen(device: str) -> None:
    assert_axis_sees_a_swap("composition", device)
