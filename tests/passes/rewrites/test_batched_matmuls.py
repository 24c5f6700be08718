"""Products of a few weights, and of a row's small matrices, are pinned; longer sums are not."""

import pytest
import torch

from detcompile import Backend, Numerics
from tests.bits import assert_bitwise_equal
from tests.passes.proof.test_holes import dense

W = torch.randn(3, 16, 8)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Each row's features as two matrices, multiplied."""
    matrices = x.unflatten(-1, (4, 4))
    return matrices @ matrices.transpose(-1, -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_product_is_a_sum_over_features(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 16).to(dtype)
    torch._dynamo.mark_dynamic(x, [0, 1])
    run = torch.compile(mixed, backend=Backend(Numerics(), certify_only=True), fullgraph=True)
    exact, terms = mixed(x.double()), mixed(x.double().abs())
    assert bool(((run(x).double() - exact).abs() <= 4 * torch.finfo(dtype).eps * terms).all())
    assert_bitwise_equal(run(x)[1:3, 2:4], run(x[1:3, 2:4].clone()))


def test_a_long_product_of_a_rows_own_matrices_is_certified() -> None:
    def long_sums(x: torch.Tensor) -> torch.Tensor:
        pair = torch.stack([x, x + 1], -2)
        return pair @ pair.transpose(-1, -2)

    assert dense(long_sums) == ()


def test_products_with_weights_are_certified_and_those_with_rows_are_not() -> None:
    assert dense(lambda x: torch.einsum("btf,gf->btg", x, W[0].t())) == ()
    assert dense(lambda x: torch.einsum("btf,hfg->bthg", x, W)) == ()
    assert dense(lambda x: torch.bmm(x.flatten(0, 1).expand(3, -1, -1), W)) == ()
    assert "bmm" in " ".join(dense(lambda x: x @ x.transpose(1, 2)))
    assert "bmm" in " ".join(dense(lambda x: torch.bmm(x.transpose(1, 2), x)))
