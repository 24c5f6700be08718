"""expert_matmul: each row is its expert's product, in matmul's order, whatever rows and experts are beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders.float32 import add_tree
from detcompile.templates.experts.op import expert_matmul_cpu, reference_expert_matmul
from detcompile.templates.matmul.op import matmul_cpu
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, KINDS, assert_as_accurate, sample

ours = torch.ops.detcompile
E, N, K = 5, 37, 150


def problem(rows: int, dtype: torch.dtype, kind: str = "heavy", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, K], ids [M], w [E, N, K], bias [E, N]; some experts have many rows, some may have none."""
    ids = torch.randint(0, E, (rows,), generator=torch.Generator().manual_seed(seed)).square() % E
    return sample(kind, (rows, K), dtype, seed), ids, sample(kind, (E, N, K), dtype, 7), sample(kind, (E, N), dtype, 8)


@given(rows=st.integers(1, 60), row=st.integers(0, 59), seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_a_row_ignores_its_neighbors(rows: int, row: int, seed: int, dtype: torch.dtype) -> None:
    x, ids, w, bias = problem(rows, dtype, seed=seed)
    item = slice(row % rows, row % rows + 1)
    assert_bitwise_equal(expert_matmul_cpu(x, ids, w, bias)[item], expert_matmul_cpu(x[item], ids[item], w, bias))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_bytes_of_its_experts_matmul(dtype: torch.dtype, isa: str) -> None:
    x, ids, w, bias = problem(40, dtype)
    actual = expert_matmul_cpu(x, ids, w, bias, isa=isa)
    for m, expert in enumerate(ids.tolist()):
        product = matmul_cpu(x[m : m + 1], w[expert], bias[expert], None, (), isa=isa)
        assert_bitwise_equal(actual[m : m + 1], product, f"row {m}")
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(expert_matmul_cpu(x, ids, turned, bias, isa=isa), actual, "weights as [E, K, N]")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_over_k_is_matmuls_and_its_subtrees_make_it(dtype: torch.dtype) -> None:
    x, ids, w, bias = problem(20, dtype)
    actual = expert_matmul_cpu(x, ids, w, bias, (3, 2))
    for m, expert in enumerate(ids.tolist()):
        product = matmul_cpu(x[m : m + 1], w[expert], bias[expert], None, (3, 2))
        assert_bitwise_equal(actual[m : m + 1], product, f"row {m}")
    shares = [slice(rank * K // 3, (rank + 1) * K // 3) for rank in range(3)]
    partials = [ours.expert_matmul_partial(x[:, share], ids, w[:, :, share], [2], 3) for share in shares]
    total = torch.from_numpy(add_tree([partial.numpy() for partial in partials], (3,)))
    assert_bitwise_equal((total + bias[ids].float()).to(dtype), actual, "three ranks")


def test_the_choices_of_a_token_share_its_row() -> None:
    x, ids, w, bias = problem(12, torch.bfloat16)
    pairs = torch.stack([ids, ids.flip(0)], 1)
    actual = expert_matmul_cpu(x, pairs, w, bias)
    assert_bitwise_equal(actual[:, 0], expert_matmul_cpu(x, ids, w, bias))
    assert_bitwise_equal(expert_matmul_cpu(x[:, None].expand(-1, 2, -1), pairs, w, bias), actual, "a row for each")
    exact = reference_expert_matmul(x, pairs, w, bias)
    assert exact.shape == actual.shape and (actual.double() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_accurate_as_torch(dtype: torch.dtype, kind: str) -> None:
    x, ids, w, _ = problem(200, dtype, kind)
    theirs = x.new_zeros(len(x), N)
    for expert in range(E):
        theirs[ids == expert] = torch.nn.functional.linear(x[ids == expert], w[expert])
    assert_as_accurate(
        expert_matmul_cpu(x, ids, w, None), theirs, reference_expert_matmul(x, ids, w), f"{dtype} {kind}"
    )


def test_no_expert_gives_zeros_and_no_rows_give_none() -> None:
    x, ids, w, bias = problem(9, torch.float32)
    ids[3] = E
    actual = expert_matmul_cpu(x, ids, w, bias)
    assert not actual[3].any() and bool(actual[2].any())
    assert expert_matmul_cpu(x[:0], ids[:0], w, bias).shape == (0, N)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, ids, w, bias: (x, ids + E + 1, w, bias), "for 5 experts"),
        (lambda x, ids, w, bias: (x, ids - E, w, bias), "for 5 experts"),
        (lambda x, ids, w, bias: (x, ids[1:], w, bias), "Flatten the tokens"),
        (lambda x, ids, w, bias: (x.bfloat16(), ids, w, bias), "w is torch.float32 .* be torch.bfloat16"),
        (lambda x, ids, w, bias: (x, ids.int(), w, bias), "must be torch.int64"),
        (lambda x, ids, w, bias: (x, ids, w, bias[:, 1:]), r"must be .* \[E, N\] with E = 5"),
    ],
)
def test_what_does_not_fit_is_refused(change, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        torch.ops.detcompile.expert_matmul(*change(*problem(4, torch.float32)))


def test_unequal_leaves_are_refused() -> None:
    with pytest.raises(NumericsError, match="K=150 does not split into 4 equal leaves"):
        expert_matmul_cpu(*problem(4, torch.float32), (2, 2))
