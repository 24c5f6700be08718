"""batched_matmul: each matrix is matmul's product, in its order, whatever matrices are beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.matmul.op import batched_matmul_cpu, matmul_cpu
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, KINDS, assert_as_accurate, sample

ours = torch.ops.detcompile
M, N, K = 7, 11, 150


def problem(batch: tuple[int, ...], dtype: torch.dtype, kind: str = "heavy", seed: int = 0) -> tuple[Tensor, Tensor]:
    return sample(kind, (*batch, M, K), dtype, seed), sample(kind, (*batch, N, K), dtype, seed + 7)


@given(batch=st.integers(1, 9), seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_matrix_ignores_other_matrices_and_row_its_neighbors(batch: int, seed: int, dtype: torch.dtype) -> None:
    x, w = problem((batch,), dtype, seed=seed)
    item, rows = slice(seed % batch, seed % batch + 1), slice(seed % M, seed % M + 2)
    whole = batched_matmul_cpu(x, w)
    assert_bitwise_equal(whole[item], batched_matmul_cpu(x[item], w[item]))
    assert_bitwise_equal(whole[:, rows], batched_matmul_cpu(x[:, rows], w))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_matrix_has_the_bytes_of_its_matmul(dtype: torch.dtype, isa: str) -> None:
    x, w = problem((2, 3), dtype)
    actual = batched_matmul_cpu(x, w, torch.float32, isa=isa)
    for i in range(2):
        for j in range(3):
            product = matmul_cpu(x[i, j], w[i, j], None, None, (), torch.float32, isa=isa)
            assert_bitwise_equal(actual[i, j], product, f"matrix {i}, {j}")
    turned = w.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_bitwise_equal(batched_matmul_cpu(x, turned, torch.float32, isa=isa), actual, "as [..., K, N]")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_accurate_as_torch(dtype: torch.dtype, kind: str) -> None:
    # Of a few hundred terms torch's error depends on the CPU: MKL adds them in one chain on some, in several on others.
    x, w = sample(kind, (20, M, 4096), dtype, 0), sample(kind, (20, N, 4096), dtype, 7)
    theirs = x @ w.transpose(1, 2)
    assert_as_accurate(batched_matmul_cpu(x, w), theirs, x.double() @ w.double().transpose(1, 2), f"{dtype} {kind}")


def test_empty_batches_are_empty_and_mismatched_sizes_are_rejected() -> None:
    x, w = problem((3,), torch.float32)
    assert batched_matmul_cpu(x[:0], w[:0]).shape == (0, M, N)
    assert batched_matmul_cpu(x[:, :0], w).shape == (3, 0, N)
    for wrong in (w[:2], w[..., 1:], w.half(), w[0], w[..., None]):
        with pytest.raises(InvalidInput, match=r"must be torch\.float32 \[\.\.\., N, K\]"):
            torch.ops.detcompile.batched_matmul(x, wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_each_matrix_has_the_bytes_of_its_matmul(dtype: torch.dtype) -> None:
    x, w = (value.cuda() for value in problem((2, 3), dtype))
    actual = ours.batched_matmul(x, w, torch.float32)
    for i in range(2):
        for j in range(3):
            product = ours.matmul(x[i, j], w[i, j], None, None, [], torch.float32)
            assert_bitwise_equal(actual[i, j].cpu(), product.cpu(), f"matrix {i}, {j}")
    alone = ours.batched_matmul(x[1:, 2:, 3:4], w[1:, 2:], torch.float32)
    assert_bitwise_equal(actual[1:, 2:, 3:4].cpu(), alone.cpu(), "a row alone")
    exact = x.double() @ w.double().transpose(-1, -2)
    assert (actual.double() - exact).norm() < 1e-5 * exact.norm()
    assert ours.batched_matmul(x[:0], w[:0]).shape == (0, 3, M, N)
