"""wkv on the CPU: its value, also of keys whose exponentials overflow, and bits that nothing around a row changes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.recurrences.wkv import reference_wkv, wkv_cpu
from tests.bits import assert_bitwise_equal
from tests.templates.cases import ISAS
from tests.templates.recurrences.cases import averaged, in_steps, random_plan, step_of

ops = torch.ops.detcompile
C = 37


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_it_has_its_value(size: float, device: str) -> None:
    """e^200 is no float32: the exponents are kept apart."""
    operands = averaged(2, 70, 300)
    operands = (operands[0] * size, *operands[1:])
    expected = reference_wkv(*operands)
    actual = ops.dense_wkv(*(value.to(device) for value in operands)).cpu()
    assert bool(actual.isfinite().all())
    assert float((actual - expected).norm() / expected.norm()) < 3e-7 * size  # of exponents that large


def test_one_token_is_its_own_value() -> None:
    k, v, decay, bonus = averaged(3, 1, C)
    assert_bitwise_equal(ops.dense_wkv(k * 1e4, v, decay, bonus), v)


@given(seed=st.integers(0, 10**6))
def test_steps_neighbors_and_slots_do_not_show(seed: int) -> None:
    tokens = 23
    plan, slots = random_plan(seed, tokens)
    k, v, decay, bonus = averaged(3, tokens, C)
    whole = ops.dense_wkv(k, v, decay, bonus)
    state = torch.full((5, 3, C), torch.nan)  # a stale state is not read

    def run(parts: list[tuple[int, int, int]], step: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        keys, values = (torch.cat([x[row, start:stop] for row, start, stop in parts]) for x in (k, v))
        return ops.wkv(keys, values, decay, bonus, state, *step)

    for row, actual in in_steps(run, plan, slots).items():
        assert_bitwise_equal(actual, whole[row], f"row {row}")


def test_every_instruction_set_gives_the_same_bits() -> None:
    k, v, decay, bonus = averaged(1, 9, C)
    results = []
    for isa in ISAS:
        state = torch.zeros(1, 3, C)
        results.append((wkv_cpu(k[0], v[0], decay, bonus, state, *step_of([(9, 0)], [0]), isa=isa), state))
    for isa, actual in zip(ISAS, results, strict=True):
        for ours, first in zip(actual, results[0], strict=True):
            assert_bitwise_equal(ours, first, isa)


def test_threads_do_not_show() -> None:
    operands = averaged(2, 40, 300)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(ops.dense_wkv(*operands))
    torch.set_num_threads(before)
    assert_bitwise_equal(results[1], results[0])


def test_padding_gets_zeros_and_no_slot_writes_nothing() -> None:
    k, v, decay, bonus = averaged(1, 5, C)
    state = torch.full((2, 3, C), 7.0)
    out = ops.wkv(k[0], v[0], decay, bonus, state, *step_of([(3, 4)], [-1]))
    assert_bitwise_equal(out[:3], ops.dense_wkv(k[:, :3], v[:, :3], decay, bonus)[0], "as if it began here")
    assert not out[3:].any() and bool((state == 7.0).all())


def test_what_does_not_fit_is_refused() -> None:
    k, v, decay, bonus = averaged(1, 5, C)
    state, step = torch.zeros(1, 3, C), step_of([(5, 0)], [0])
    for operands, calls in [
        ((k[0], v[0, :4], decay, bonus), r"v .* must be torch\.float32 \[T, C\]"),
        ((k[0], v[0], decay[:3], bonus), r"decay .* must be torch\.float32 \[C\]"),
        ((k[0], v[0].half(), decay, bonus), "v is torch.float16"),
    ]:
        with pytest.raises(InvalidInput, match=calls):
            ops.wkv(*operands, state, *step)
    with pytest.raises(InvalidInput, match=r"state .* must be contiguous"):
        ops.wkv(k[0], v[0], decay, bonus, state[:, :2], *step)
    with pytest.raises(InvalidInput, match=r"state_slots\[0\] is neither"):
        ops.wkv(k[0], v[0], decay, bonus, state, *step_of([(5, 0)], [1]))
