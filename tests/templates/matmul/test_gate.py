"""silu_mul: the bytes of the operations it stands for, whatever the rows beside and the strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.matmul.candidates import candidates, reference_schedule
from detcompile.templates.matmul.gate import reference_gated_matmul, reference_silu_mul
from detcompile.templates.matmul.gpu import gated_problem, run_gated
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.templates.cases import DTYPES, KINDS, assert_as_accurate, sample

silu_mul, gated_matmul = torch.ops.detcompile.silu_mul, torch.ops.detcompile.gated_matmul


def gate_and_up(kind: str, rows: int, features: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Two halves of the columns of one tensor, as a joined product leaves them."""
    both = sample(kind, (rows, 2 * features), dtype).to(device)
    return both[:, :features], both[:, features:]


@given(rows=st.integers(1, 40), features=st.integers(1, 700), row=st.integers(0, 39))
def test_a_row_ignores_its_neighbors(rows: int, features: int, row: int) -> None:
    gate, up = gate_and_up("heavy", rows, features, torch.bfloat16, "cpu")
    row %= rows
    assert_bitwise_equal(silu_mul(gate, up)[row : row + 1], silu_mul(gate[row : row + 1].clone(), up[row : row + 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_accurate_as_torch(dtype: torch.dtype, kind: str, device: str) -> None:
    gate, up = gate_and_up(kind, 60, 1500, dtype, device)
    expected = reference_silu_mul(gate, up)
    assert_as_accurate(silu_mul(gate, up), torch.nn.functional.silu(gate) * up, expected, f"{dtype} {kind}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_alone_and_together_have_the_same_bytes(dtype: torch.dtype, device: str) -> None:
    """Both tiles of the GPU's kernel, infinities and NaN among the values."""
    gate, up = gate_and_up("heavy", 700, 1537, dtype, device)
    gate[3, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    whole = silu_mul(gate, up)
    assert whole.is_contiguous()
    for row in (0, 3, 699):
        assert_bitwise_equal(silu_mul(gate[row : row + 1], up[row : row + 1].clone()), whole[row : row + 1], f"{row}")
    assert_bitwise_equal(silu_mul(gate.view(7, 100, 1537), up.view(7, 100, 1537)).flatten(0, 1), whole, "three dims")
    g = gate.float()
    quotient = (g / (1 + g.neg().exp())).to(dtype)
    where = whole.isfinite() & (quotient.abs() > 0)
    assert where.sum() > whole.numel() // 2
    relative = (whole.float() / (quotient * up).float() - 1)[where & (up != 0)].abs()
    assert relative.nanmean() < torch.finfo(dtype).eps


def test_no_rows_are_no_rows(device: str) -> None:
    empty = torch.empty(0, 8, device=device)
    assert silu_mul(empty, empty).shape == (0, 8)


def test_shapes_and_dtypes_must_agree() -> None:
    with pytest.raises(InvalidInput, match=r"up is .* must be torch\.float32 \[\.\.\., F\]"):
        silu_mul(torch.zeros(2, 8), torch.zeros(1, 8))
    with pytest.raises(InvalidInput, match=r"up is .* must be torch\.float32 \[\.\.\., F\]"):
        silu_mul(torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_product_has_the_bytes_of_its_parts(dtype: torch.dtype, device: str) -> None:
    x, w = sample("heavy", (37, 320), dtype).to(device), sample("heavy", (2 * 136, 320), dtype).to(device)
    w = w / 16
    both = torch.ops.detcompile.matmul(x, w, None, None, [])
    actual = gated_matmul(x, w)
    assert_bitwise_equal(actual, silu_mul(both[:, :136], both[:, 136:]))
    assert_bitwise_equal(gated_matmul(x[5:6], w), actual[5:6], "a row alone")
    if dtype is not torch.float32:  # whose products are compared by themselves, over many draws
        gate, up = torch.nn.functional.linear(x, w).chunk(2, dim=1)
        torchs = torch.nn.functional.silu(gate) * up
        assert_as_accurate(actual, torchs, reference_gated_matmul(x, w), f"{dtype}")


def test_a_gated_product_without_rows_has_none(device: str) -> None:
    assert gated_matmul(torch.empty(0, 32, device=device), torch.empty(48, 32, device=device)).shape == (0, 24)


def test_a_gated_product_needs_weights_in_pairs() -> None:
    with pytest.raises(InvalidInput, match=r"must be \[2 F, K\]"):
        gated_matmul(torch.zeros(2, 8), torch.zeros(3, 8))


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("features", [136, 512, 100])
@pytest.mark.parametrize("tokens", [5, 29, 1500])
def test_every_schedule_of_a_gated_product_has_the_same_bytes(tokens: int, features: int) -> None:
    """Among them those of one launch; tiles end inside the features, and infinities and NaN are among the values."""
    x = sample("heavy", (tokens, 1024), torch.bfloat16).cuda() / 8
    w = sample("heavy", (2 * features, 1024), torch.bfloat16).cuda() / 8
    w[3], w[features + 5, 7], w[9, 0] = 0, torch.inf, torch.nan
    problem = gated_problem(x, w)
    expected = run_gated(reference_schedule(problem), x, w)
    schedules = candidates(problem)
    gated = any(getattr(schedule, "gated", False) for schedule in schedules)
    assert gated == (tokens <= 64 or torch.cuda.get_device_capability()[0] == 9)
    for schedule in schedules:
        assert_bitwise_equal(run_gated(schedule, x, w), expected, str(schedule))


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_approximations_of_16_bits_round_as_the_exact_values_do(dtype: torch.dtype) -> None:
    """Every number that float32 holds as a normal one: within a unit of float64's rounding, and nearly always it."""
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    gate = gate[gate.isfinite() & (gate > -80) & (gate.float().abs() >= 2 * torch.finfo(torch.float32).tiny)]
    actual = silu_mul(gate[None], torch.ones_like(gate)[None])[0]
    exact = torch.nn.functional.silu(gate.double())
    rounded = exact.to(dtype)
    steps = (actual.view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).sum() < 64
