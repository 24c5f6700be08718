"""Sums over tokens on the GPU: one value for every schedule and packing, of float32 the CPU's bytes."""

import math

import pytest
import torch
from torch import Tensor

from detcompile.orders.numerics import Numerics, token_row_order
from detcompile.templates.device.gate import Tuner
from detcompile.templates.training import token_sums_gpu as gpu
from detcompile.templates.training.token_schedules import TokenTiles, candidates, reference_schedule
from detcompile.templates.training.token_sums import (
    reference_token_matmul,
    token_matmul_cpu,
    token_scatter_cpu,
    token_sum_cpu,
)
from tests.bits import assert_bitwise_equal
from tests.templates.cases import sample
from tests.templates.training.cases import leaves_of, packings, split
from tests.templates.triton_interpreter import DEVICE, DOT_DTYPES, INTERPRETED, NEEDS_GPU, NEEDS_TRITON

pytestmark = NEEDS_TRITON
LENGTHS = [5, 1, 130, 64] if INTERPRETED else [5, 1, 130, 64, 2000, 1024, 700]
LEAF = 64 if INTERPRETED else 1024
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEDULES = [
    TokenTiles(32, 32, 32, 4, 1),
    TokenTiles(16, 64, 16, 4, 2),
    TokenTiles(64, 32, 64, 8, 3),
    TokenTiles(64, 64, 64, 4, 3, tma=True),
]


def rows_of(width: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (sample("heavy", (sum(LENGTHS), width), torch.float32, seed) / 2048).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=str)
def test_no_schedule_moves_a_bit(schedule, dtype):
    g, x, leaves = rows_of(40, dtype, 1), rows_of(72, dtype, 2), leaves_of(LENGTHS, LEAF).to(DEVICE)
    expected = gpu.run_token_matmul(SCHEDULES[0], g, x, leaves)
    assert_bitwise_equal(gpu.run_token_matmul(schedule, g, x, leaves), expected)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_a_product_is_the_cpus_or_as_accurate(dtype):
    g, x, leaves = rows_of(33, dtype, 3), rows_of(50, dtype, 4), leaves_of(LENGTHS, LEAF)
    actual = gpu.token_matmul_cuda(g, x, leaves.to(DEVICE)).cpu()
    if dtype is torch.float32:
        assert_bitwise_equal(actual, token_matmul_cpu(g.cpu(), x.cpu(), leaves))
        return
    reference = reference_token_matmul(g, x, leaves).cpu()
    theirs = torch.mm(g.t(), x).double().cpu()  # what torch hands to the parameter: cuBLAS, rounded to the dtype
    assert (actual - reference).norm() <= 1.05 * (theirs - reference).norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_rows_are_the_cpus(dtype):
    g = rows_of(70, dtype, 5)
    ids = torch.randint(0, 9, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    ids[4] = 9  # the only row of its id
    assert_bitwise_equal(gpu.token_sum_cuda(g).cpu(), token_sum_cpu(g.cpu()))
    assert_bitwise_equal(gpu.token_scatter_cuda(g, ids.to(DEVICE), 11).cpu(), token_scatter_cpu(g.cpu(), ids, 11))
    if INTERPRETED:  # it takes a while
        expected = torch.from_numpy(token_row_order(Numerics()).evaluate(g.float().cpu().numpy()))
        assert_bitwise_equal(gpu.token_sum_cuda(g).cpu(), expected)


def test_token_sum_adds_many_parts_exactly(monkeypatch):
    monkeypatch.setattr(gpu, "_ROWS_A_PROGRAM", 16)
    g = (sample("heavy", (16 * 140 + 3, 21), torch.float32, 7) / 2048).to(DEVICE)
    assert_bitwise_equal(gpu.token_sum_cuda(g).cpu(), token_sum_cpu(g.cpu()))
    g[::300] = 20.0  # 8 of them are beyond the limit together
    assert gpu.token_sum_cuda(g).isposinf().all()


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_packing_does_not_change_bits(dtype):
    g, x = rows_of(40, dtype, 6), rows_of(33, dtype, 7)

    def gradients(sequences):
        mine = [torch.cat([split(rows, LENGTHS)[s] for s in sequences]) for rows in (g, x)]
        leaves = leaves_of([LENGTHS[s] for s in sequences], LEAF).to(DEVICE)
        return gpu.token_matmul_cuda(*mine, leaves), gpu.token_sum_cuda(mine[0])

    expected = gradients(range(len(LENGTHS)))
    for name, packing in packings(len(LENGTHS)).items():
        parts = [gradients(sequences) for sequences in packing]
        for ours, together in zip(zip(*parts), expected):
            assert_bitwise_equal(sum(ours[1:], ours[0]), together, name)


def test_rows_outside_of_all_leaves_are_not_read_and_heads_are_rows():
    g, x = rows_of(9, torch.float32, 8)[:24], rows_of(11, torch.float32, 9)[:24]
    leaves = torch.tensor([1, 3, 5], dtype=torch.int32, device=DEVICE)
    expected = gpu.token_matmul_cuda(g[4:20], x[4:20], (leaves - 1) * 4)
    g[:4], g[20:] = math.nan, math.nan
    assert_bitwise_equal(gpu.token_matmul_cuda(g, x, leaves, 4), expected)


def test_strides_and_no_rows():
    g, x, leaves = rows_of(21, torch.float32, 1), rows_of(16, torch.float32, 2), leaves_of(LENGTHS, LEAF).to(DEVICE)
    expected = gpu.token_matmul_cuda(g, x, leaves)
    assert_bitwise_equal(gpu.token_matmul_cuda(g.t().contiguous().t(), x, leaves), expected)
    wide = torch.nn.functional.pad(g, (3, 2), value=math.nan)
    assert_bitwise_equal(gpu.token_matmul_cuda(wide[:, 3:24], x, leaves), expected)
    nothing = gpu.token_matmul_cuda(g[:0], x[:0], leaves[:1])
    assert_bitwise_equal(nothing, torch.zeros(21, 16, dtype=torch.float64, device=DEVICE))
    assert_bitwise_equal(gpu.token_sum_cuda(g[:0]), torch.zeros(21, dtype=torch.float64, device=DEVICE))


def test_elements_beyond_exactness_are_infinite_and_others_exact():
    terms = torch.tensor([[64.0, 64.0, 1.0, 1.0, 200.0, 1.0], [-64.0, -65.0, torch.nan, torch.inf, torch.nan, -1.0]])
    expected = torch.tensor([0.0, torch.inf, torch.nan, torch.nan, torch.nan, 0.0], dtype=torch.float64)
    terms = terms.to(DEVICE)
    torch.testing.assert_close(gpu.token_sum_cuda(terms).cpu(), expected, rtol=0, atol=0, equal_nan=True)
    table = gpu.token_scatter_cuda(terms, torch.tensor([1, 1], device=DEVICE), 3).cpu()
    torch.testing.assert_close(table[1], expected, rtol=0, atol=0, equal_nan=True)
    assert not table[::2].any()
    apart = torch.tensor([[64.0, 64.0, 1.0, 1.0, math.inf, 1.0], [-64.0, -65.0, math.nan, math.nan, math.nan, -1.0]])
    table = gpu.token_scatter_cuda(terms, torch.tensor([2, 0], device=DEVICE), 3).cpu()
    torch.testing.assert_close(table[[2, 0]], apart.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("grid", [-44, -40])
def test_rows_of_a_product_beyond_exactness_are_infinite_and_others_exact(grid):
    most = 2.0 ** (45 + grid)  # of a leaf
    columns = [(most, -most), (2 * most, 0.0), (1.0, math.nan), (math.inf, 1.0), (math.nan, 8 * most), (-1.0, 1.5)]
    expected = torch.tensor([0.0, math.inf, math.nan, math.nan, math.nan, 0.5], dtype=torch.float64)
    g, leaves = torch.tensor(columns, device=DEVICE).t(), torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    actual = gpu.token_matmul_cuda(g, torch.ones(2, 1, device=DEVICE), leaves, 1, grid).flatten()
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_many_leaves_carry():
    """Their lower parts do not fit into 32 bits together; and the sum of all magnitudes is the limit at most."""
    count = 600 if INTERPRETED else 3000
    g = torch.full((count, 5), 2.0**-22 - 2.0**-44)
    g[:, 1], g[:, 2], g[1::2, 3] = -g[:, 1], 100.0 / count, -1.0 / 512
    x, leaves = torch.ones(count, 3), torch.arange(count + 1, dtype=torch.int32)
    actual = gpu.token_matmul_cuda(g.to(DEVICE), x.to(DEVICE), leaves.to(DEVICE))
    assert_bitwise_equal(actual.cpu(), token_matmul_cpu(g, x, leaves))
    assert actual.isfinite().all()


@pytest.mark.parametrize("dtype", DOT_DTYPES[:1])
def test_the_gate_admits_the_candidates_and_refuses_another_order(dtype, tmp_path):
    problem = gpu.token_problem(rows_of(48, dtype, 1), rows_of(64, dtype, 2))
    bits = gpu.probe_bits(problem, torch.device(DEVICE))
    tuner = Tuner("token_matmul", {}, tmp_path)
    fits = candidates(problem)[2:] if INTERPRETED else candidates(problem)
    assert tuner.admitted(str(problem), reference_schedule(problem), fits, bits) == tuple(fits)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=NEEDS_GPU)])
@pytest.mark.parametrize("width", [1030, 1032])  # whose rows descriptors take, and not
def test_real_sizes(width, mark):
    g, x = (torch.randn(3000, columns, device=DEVICE).bfloat16() * 0.02 for columns in (width, 4096))
    leaves = leaves_of([2, 1500, 1498], 1024).to(DEVICE)
    expected = gpu.run_token_matmul(SCHEDULES[0], g, x, leaves)
    for schedule in candidates(gpu.token_problem(g, x)):
        assert_bitwise_equal(gpu.run_token_matmul(schedule, g, x, leaves), expected, str(schedule))
