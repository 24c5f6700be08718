"""Recurrences on the CPU: their value, and bits that no step, neighbor, slot or instruction set can change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.recurrences.causal_conv import causal_conv_cpu, reference_causal_conv
from detcompile.templates.recurrences.linear import linear_recurrence_cpu, reference_linear_recurrence
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, normal, sample
from tests.templates.recurrences.cases import KINDS, in_steps, operands, random_plan, step_of

ops = torch.ops.detcompile
T = 23  # tokens of each row


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence_has_its_value(kind: str, device: str) -> None:
    given = operands(kind, 2, 70, 2, 4, 24, 70)
    expected = reference_linear_recurrence(*given)
    actual = ops.dense_linear_recurrence(*(None if value is None else value.to(device) for value in given)).cpu()
    assert float((actual - expected).norm() / expected.norm()) < 3e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 4])
def test_the_convolution_has_its_value(dtype: torch.dtype, taps: int, device: str) -> None:
    x, weight, bias = (sample("heavy", shape, dtype).to(device) for shape in ((2, 40, 300), (300, taps), (300,)))
    expected = reference_causal_conv(x, weight, bias)
    actual = ops.dense_causal_conv(x, weight, bias)
    error = float((actual.double() - expected).norm() / expected.norm())
    assert actual.dtype == dtype and error < torch.finfo(dtype).eps


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(sorted(KINDS)))
def test_the_recurrence_ignores_steps_neighbors_and_slots(seed: int, kind: str) -> None:
    plan, slots = random_plan(seed, T)
    given = operands(kind, 3, T, 1, 2, 5, 20)
    whole = ops.dense_linear_recurrence(*given)
    state = torch.full((5, 2, 5, 20), torch.nan)  # a stale state is not read

    def run(parts: list[tuple[int, int, int]], step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        columns = zip(*(given.rows(*part) for part in parts), strict=True)
        packed = (None if column[0] is None else torch.cat(column) for column in columns)
        return ops.linear_recurrence(*packed, given.rates, state, *step)

    for row, actual in in_steps(run, plan, slots).items():
        assert_bitwise_equal(actual, whole[row], f"row {row}")


@given(seed=st.integers(0, 10**6), taps=st.sampled_from([1, 2, 4, 30]))
def test_the_convolution_ignores_steps_neighbors_and_slots(seed: int, taps: int) -> None:
    plan, slots = random_plan(seed, T)
    x, weight, bias = (normal(shape, torch.bfloat16) for shape in ((3, T, 40), (40, taps), (40,)))
    whole = ops.dense_causal_conv(x, weight, bias)
    state = torch.full((5, taps - 1, 40), torch.nan, dtype=torch.bfloat16)

    def run(parts: list[tuple[int, int, int]], step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        packed = torch.cat([x[row, start:stop] for row, start, stop in parts])
        return ops.causal_conv(packed, weight, bias, state, *step)

    for row, actual in in_steps(run, plan, slots).items():
        assert_bitwise_equal(actual, whole[row], f"row {row}")


def test_every_instruction_set_gives_the_same_bits() -> None:
    given = operands("per value, delta", 1, 9, 2, 4, 17, 37)
    x, weight = normal((9, 37), torch.float16), normal((37, 4), torch.float16)
    results = []
    for isa in ISAS:
        state, columns = torch.zeros(1, 4, 17, 37), torch.zeros(1, 3, 37, dtype=torch.float16)
        step = step_of([(9, 0)], [0])
        packed = (None if value is None else value[0] for value in given[:5])
        out = linear_recurrence_cpu(*packed, given.rates, state, *step, isa=isa)  # type: ignore[arg-type]
        results.append((out, state, causal_conv_cpu(x, weight, None, columns, *step, isa=isa), columns))
    for isa, actual in zip(ISAS, results, strict=True):
        for ours, first in zip(actual, results[0], strict=True):
            assert_bitwise_equal(ours, first, isa)


def test_threads_do_not_show() -> None:
    given = operands("per key, delta", 2, 40, 4, 4, 16, 130)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(ops.dense_linear_recurrence(*given))
    torch.set_num_threads(before)
    assert_bitwise_equal(results[1], results[0])


def test_padding_gets_zeros_and_no_slot_writes_nothing() -> None:
    x, weight = normal((5, 8), torch.float32), normal((8, 3), torch.float32)
    state = torch.full((2, 2, 8), 7.0)
    out = ops.causal_conv(x, weight, None, state, *step_of([(3, 4)], [-1]))
    assert_bitwise_equal(out[:3], ops.dense_causal_conv(x[None, :3], weight, None)[0], "as if it began here")
    assert not out[3:].any() and bool((state == 7.0).all())


def test_metadata_that_points_elsewhere_is_refused() -> None:
    x, weight, state = torch.zeros(5, 8), torch.zeros(8, 3), torch.zeros(2, 2, 8)
    for step, calls in [
        (step_of([(6, 0)], [0]), "cu_seqlens must start at 0 and ascend"),
        (step_of([(3, -1)], [0]), r"seq_lens\[0\] is less"),
        (step_of([(3, 0)], [2]), r"state_slots\[0\] is neither"),
        (step_of([(3, 0)], [0, 1]), r"cu_seqlens .* must be contiguous torch.int32"),
    ]:
        with pytest.raises(InvalidInput, match=calls):
            ops.causal_conv(x, weight, None, state, *step)
    with pytest.raises(InvalidInput, match=r"state .* must be contiguous torch\.float32 \[Slots, W-1, C\]"):
        ops.causal_conv(x, weight, None, state.half(), *step_of([(5, 0)], [0]))
    given = [None if value is None else value[0] for value in operands("per head", 1, 5, 1, 2, 4, 8)[:5]]
    for name, place, value in [("decay", 3, torch.zeros(5, 3)), ("q", 0, given[0].half())]:
        wrong = [value if i == place else operand for i, operand in enumerate(given)]
        if name == "q":
            wrong[1] = given[1]
        with pytest.raises(InvalidInput, match=f"linear_recurrence: {name}"):
            ops.linear_recurrence(*wrong, None, torch.zeros(1, 2, 4, 8), *step_of([(5, 0)], [0]))
