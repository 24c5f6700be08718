"""running_max on the CPU: its value, and bits that no step, neighbor, slot or instruction set can change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.recurrences.running_max import reference_running_max, running_max_cpu
from tests.bits import assert_bitwise_equal
from tests.templates.cases import ISAS
from tests.templates.recurrences.cases import falling, in_steps, random_plan, step_of

ops = torch.ops.detcompile
C = 37


def test_it_has_its_value(device: str) -> None:
    x, decay = falling(2, 70, 300)
    actual = ops.dense_running_max(x.to(device), decay.to(device)).cpu()
    expected = reference_running_max(x, decay)
    assert float((actual - expected).norm() / expected.norm()) < 3e-7


def test_nothing_came_before_the_first_token() -> None:
    x, decay = torch.full((1, 3, 1), -9.0), torch.full((1, 3, 1), -4.0)
    assert_bitwise_equal(ops.dense_running_max(x, decay).flatten(), torch.tensor([-4.0, -8.0, -9.0]))


@given(seed=st.integers(0, 10**6))
def test_steps_neighbors_and_slots_do_not_show(seed: int) -> None:
    tokens = 23
    plan, slots = random_plan(seed, tokens)
    x, decay = falling(3, tokens, C)
    whole = ops.dense_running_max(x, decay)
    state = torch.full((5, 1, C), torch.nan)  # a stale state is not read

    def run(parts: list[tuple[int, int, int]], step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        packed = (torch.cat([value[row, start:stop] for row, start, stop in parts]) for value in (x, decay))
        return ops.running_max(*packed, state, *step)

    for row, actual in in_steps(run, plan, slots).items():
        assert_bitwise_equal(actual, whole[row], f"row {row}")


def test_every_instruction_set_gives_the_same_bits() -> None:
    x, decay = falling(1, 9, C)
    results = []
    for isa in ISAS:
        state = torch.zeros(1, 1, C)
        results.append((running_max_cpu(x[0], decay[0], state, *step_of([(9, 0)], [0]), isa=isa), state))
    for isa, actual in zip(ISAS, results, strict=True):
        for ours, first in zip(actual, results[0], strict=True):
            assert_bitwise_equal(ours, first, isa)


def test_padding_gets_zeros_and_no_slot_writes_nothing() -> None:
    x, decay = falling(1, 5, C)
    state = torch.full((2, 1, C), 7.0)
    out = ops.running_max(x[0], decay[0], state, *step_of([(3, 4)], [-1]))
    assert_bitwise_equal(out[:3], ops.dense_running_max(x[:, :3], decay[:, :3])[0], "as if it began here")
    assert not out[3:].any() and bool((state == 7.0).all())


def test_what_does_not_fit_is_refused() -> None:
    x, decay = falling(1, 5, C)
    state, step = torch.zeros(1, 1, C), step_of([(5, 0)], [0])
    for operands in ((x[0], decay[0, :4]), (x[0], decay[0].half()), (x, decay)):
        with pytest.raises(InvalidInput, match=r"must be torch\.float32 \[T, C\]"):
            ops.running_max(*operands, state, *step)
    with pytest.raises(InvalidInput, match=r"state .* must be contiguous"):
        ops.running_max(x[0], decay[0], state[:, :, :3], *step)
    with pytest.raises(InvalidInput, match=r"state_slots\[0\] is neither"):
        ops.running_max(x[0], decay[0], state, *step_of([(5, 0)], [1]))


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_stays(isa: str) -> None:
    x, decay = falling(1, 4, C)
    x[0, 1, 3] = decay[0, 2, 5] = torch.nan
    actual = running_max_cpu(x[0], decay[0], torch.zeros(1, 1, C), *step_of([(4, 0)], [0]), isa=isa)
    where = torch.zeros(4, C, dtype=torch.bool)
    where[1:, 3] = where[2:, 5] = True
    assert torch.equal(actual.isnan(), where)
