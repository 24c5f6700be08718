"""A row's logits ignore batch, composition, position, padding, chunking, decode, KV blocks and CUDA graphs.

The axes share this file, so that one process compiles each model once for all of them.
"""

import pytest
import torch

from detcompile.commands.axes import AXES
from tests.conftest import NEEDS_CUDA
from tests.invariance.axis import MODELS, assert_axis_holds, assert_axis_sees_a_swap

ON_ANY_DEVICE = [axis for axis in AXES if axis != "cuda_graphs"]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
@pytest.mark.parametrize("axis", ON_ANY_DEVICE)
def test_axis_holds(axis: str, name: str, dtype: torch.dtype, device: str) -> None:
    assert_axis_holds(axis, name, dtype, device)


@pytest.mark.parametrize("axis", ON_ANY_DEVICE)
def test_an_order_that_follows_the_batch_is_seen(axis: str, device: str) -> None:
    assert_axis_sees_a_swap(axis, device)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_replayed_step_equals_a_plain_one(name: str, dtype: torch.dtype) -> None:
    assert_axis_holds("cuda_graphs", name, dtype, "cuda")


@pytest.mark.gpu
@NEEDS_CUDA
def test_graphs_of_an_order_that_follows_the_batch_are_seen() -> None:
    assert_axis_sees_a_swap("cuda_graphs", "cuda")
