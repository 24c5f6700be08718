"""embedding on the CPU copies bytes and rejects ids outside the table."""

import pytest
import torch

from detcompile.errors import InvalidInput
from detcompile.templates.tokens.embedding import embedding_cpu
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 0, 4)])
def test_rows_are_copied(dtype, id_dtype, shape):
    weight = normal((11, 19), dtype)
    weight[3, 4] = torch.nan
    ids = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(1)).to(id_dtype)
    for table in (weight, weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :19]):
        for isa in ISAS:
            assert_bitwise_equal(embedding_cpu(table, ids, isa), torch.nn.functional.embedding(ids, weight))


def test_many_rows_are_copied_over_threads():
    weight, ids = normal((50, 256), torch.float32), torch.arange(5000) % 50
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    out = embedding_cpu(weight, ids)
    torch.set_num_threads(threads)
    assert_bitwise_equal(out, weight[ids])


@pytest.mark.parametrize("bad", [11, -1, 2**40])
def test_an_id_outside_the_table_is_named(bad):
    ids = torch.tensor([[0, 10], [bad, 3]])
    with pytest.raises(InvalidInput, match=rf"id {bad} at index 2 .* \[0, 11\)"):
        embedding_cpu(torch.zeros(11, 4), ids)


def test_ids_of_another_kind_are_refused():
    with pytest.raises(InvalidInput, match=r"torch\.float32.*int32 or torch\.int64"):
        torch.ops.detcompile.embedding(torch.zeros(11, 4), torch.zeros(3))


def test_the_op_and_its_fake_agree():
    torch.library.opcheck(torch.ops.detcompile.embedding.default, (torch.zeros(11, 4), torch.tensor([[1, 2]])))
