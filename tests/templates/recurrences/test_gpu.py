"""Recurrences on the GPU: float64's value, the order that is stated, and bits that no step or neighbor can change."""

import numpy as np
import pytest
import torch
from torch import Tensor

from detcompile.orders.numerics import state_order
from detcompile.templates.recurrences.causal_conv import causal_conv_cuda, reference_causal_conv
from detcompile.templates.recurrences.linear import decay_kind, reference_linear_recurrence
from detcompile.templates.recurrences.linear_gpu import linear_recurrence_cuda
from detcompile.templates.recurrences.running_max import reference_running_max, running_max_cuda
from detcompile.templates.recurrences.states import dense_steps
from detcompile.templates.recurrences.wkv import reference_wkv, wkv_cuda
from tests.bits import assert_bitwise_equal
from tests.templates.cases import normal
from tests.templates.recurrences.cases import KINDS, Operands, averaged, falling, in_steps, operands, step_of
from tests.templates.triton_interpreter import DEVICE, INTERPRETED, NEEDS_TRITON

pytestmark = NEEDS_TRITON

PLAN = [[(1, 4), (0, 1)], [(0, 1)], [(2, 5), (0, 3), (1, 1)], [(0, 4), (1, 4), (2, 4)]]  # (row, tokens) of each step
T, SLOTS = 9, [3, 0, 2]
SHAPES = [(1, 2, 5, 20)] if INTERPRETED else [(1, 2, 5, 20), (2, 8, 128, 128), (1, 1, 16, 1000), (4, 4, 64, 64)]
# The interpreter cuts bfloat16 off where the GPU rounds.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]


def recur(given: Operands, parts: list[tuple[int, int, int]], state: Tensor, step: tuple[Tensor, ...]) -> Tensor:
    columns = zip(*(given.rows(*part) for part in parts), strict=True)
    packed = [None if column[0] is None else torch.cat(column).to(DEVICE) for column in columns]
    rates = None if given.rates is None else given.rates.to(DEVICE)
    kind = decay_kind(packed[3], rates)
    return linear_recurrence_cuda(kind, *packed, rates, state, *(part.to(DEVICE) for part in step)).cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_recurrence_ignores_steps_neighbors_and_slots(shape: tuple[int, ...], kind: str) -> None:
    _, H, K, V = shape
    given = operands(kind, 3, T, *shape)
    state = torch.full((4, H, K, V), torch.nan, device=DEVICE)
    actual = in_steps(lambda parts, step: recur(given, parts, state, step), PLAN, SLOTS)
    expected = reference_linear_recurrence(*given)
    for row in range(3):
        alone = recur(given, [(row, 0, T)], state.clone(), step_of([(T, 0)], [1]))
        assert_bitwise_equal(actual[row], alone, f"row {row}")
        assert float((alone - expected[row]).norm() / expected[row].norm()) < 1e-6


@pytest.mark.parametrize("K", [1, 7, 32, 48, 128])
def test_keys_are_summed_in_the_stated_order(K: int) -> None:
    """One token into a state that holds the terms, so that its output is their sum."""
    V = 16
    state = normal((1, 1, K, V), torch.float32).to(DEVICE)
    order = state_order(K, "cuda")
    terms = np.moveaxis(state.cpu().numpy()[0, 0], 0, -1)
    ones, zeros = torch.ones(1, 1, K, device=DEVICE), torch.zeros(1, 1, K, device=DEVICE)
    nothing = torch.zeros(1, 1, V, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    step = (part.to(DEVICE) for part in step_of([(1, 1)], [0]))
    out = linear_recurrence_cuda(0, ones, zeros, *nothing, None, None, state, *step)
    assert_bitwise_equal(out[0, 0].cpu(), torch.from_numpy(order.evaluate(terms)))  # type: ignore[union-attr, call-arg]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 4])
def test_the_convolution_ignores_steps_neighbors_and_slots(dtype: torch.dtype, taps: int) -> None:
    C = 300
    x, weight, bias = (normal(shape, dtype).to(DEVICE) for shape in ((3, T, C), (C, taps), (C,)))
    state = torch.full((4, taps - 1, C), torch.nan, dtype=dtype, device=DEVICE)

    def run(parts: list[tuple[int, int, int]], step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        packed = torch.cat([x[row, start:stop] for row, start, stop in parts])
        return causal_conv_cuda(packed, weight, bias, state, *(part.to(DEVICE) for part in step))

    expected = reference_causal_conv(x, weight, bias)
    for row, actual in in_steps(run, PLAN, SLOTS).items():
        alone = causal_conv_cuda(x[row], weight, bias, state.clone(), *dense_steps(1, T, x.device))
        assert_bitwise_equal(actual, alone, f"row {row}")
        error = float((alone.double() - expected[row]).norm() / expected[row].norm())
        assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("C", [5] if INTERPRETED else [5, 768, 2560])
def test_wkv_ignores_steps_neighbors_and_slots(C: int) -> None:
    k, v, decay, bonus = (value.to(DEVICE) for value in averaged(3, T, C))
    state = torch.full((4, 3, C), torch.nan, device=DEVICE)

    def run(parts: list[tuple[int, int, int]], step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        keys, values = (torch.cat([x[row, start:stop] for row, start, stop in parts]) for x in (k, v))
        return wkv_cuda(keys, values, decay, bonus, state, *(part.to(DEVICE) for part in step))

    expected = reference_wkv(k, v, decay, bonus)
    for row, actual in in_steps(run, PLAN, SLOTS).items():
        alone = wkv_cuda(k[row], v[row], decay, bonus, state.clone(), *dense_steps(1, T, k.device))
        assert_bitwise_equal(actual, alone, f"row {row}")
        assert float((alone - expected[row]).norm() / expected[row].norm()) < 1e-6
    padded = run([(0, 0, 4)], step_of([(3, 0)], [-1]))
    assert_bitwise_equal(padded[:3], run([(0, 0, 3)], step_of([(3, 0)], [1])), "no slot")
    assert not padded[3:].any()


@pytest.mark.parametrize("C", [5] if INTERPRETED else [5, 8, 64])
def test_a_running_max_ignores_steps_neighbors_and_slots(C: int) -> None:
    x, decay = (value.to(DEVICE) for value in falling(3, T, C))
    state = torch.full((4, 1, C), torch.nan, device=DEVICE)

    def run(parts: list[tuple[int, int, int]], step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        packed = (torch.cat([value[row, start:stop] for row, start, stop in parts]) for value in (x, decay))
        return running_max_cuda(*packed, state, *(part.to(DEVICE) for part in step))

    expected = reference_running_max(x, decay)
    for row, actual in in_steps(run, PLAN, SLOTS).items():
        alone = running_max_cuda(x[row], decay[row], state.clone(), *dense_steps(1, T, x.device))
        assert_bitwise_equal(actual, alone, f"row {row}")
        assert float((alone - expected[row]).norm() / expected[row].norm()) < 1e-6
    padded = run([(0, 0, 4)], step_of([(3, 0)], [-1]))
    assert_bitwise_equal(padded[:3], run([(0, 0, 3)], step_of([(3, 0)], [1])), "no slot")
    assert not padded[3:].any()


def test_padding_gets_zeros_and_no_slot_writes_nothing() -> None:
    x, weight = normal((5, 8), torch.float32).to(DEVICE), normal((8, 3), torch.float32).to(DEVICE)
    state = torch.full((2, 2, 8), 7.0, device=DEVICE)
    step = [part.to(DEVICE) for part in step_of([(3, 4), (0, 0)], [-1, -1])]
    out = causal_conv_cuda(x, weight, None, state, *step)
    alone = causal_conv_cuda(x[:3], weight, None, state, *dense_steps(1, 3, x.device))
    assert_bitwise_equal(out[:3], alone, "as if it began here")
    assert not out[3:].any() and bool((state == 7.0).all())
