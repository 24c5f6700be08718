"""The certificate follows a rank's partial sums into the declared tree, and refuses every other collective by name.

The group has one process: what is proven is of the graph, and no other rank has a part in it.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from detcompile import Backend, InvalidInput, Numerics, UncertifiedOp
from detcompile.parallel import tensor_parallel
from detcompile.passes.backend import cause
from detcompile.passes.certificate import Certificate

ours = torch.ops.detcompile
TP2 = ([2, 2], 2, [2])  # below the ranks, ranks, above them


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[str]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


class Planted(nn.Module):
    """forward(x [T, 16]) through an expression of x and a weight [8, 16]."""

    def __init__(self, expression: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 16), requires_grad=False)
        self.expression = expression

    def forward(self, x: Tensor) -> Tensor:
        return self.expression(x, self.weight)


def certificate_of(expression: Callable[[Tensor, Tensor], Tensor]) -> Certificate:
    """Of the graph; it is not run: a tree over two ranks would find one."""
    torch._dynamo.reset()
    backend = Backend(Numerics(), certify_only=True)
    planted = torch.compile(Planted(expression), backend=backend, fullgraph=True, dynamic=None)
    x = torch.ones(3, 16)
    torch._dynamo.mark_dynamic(x, 0)
    try:
        planted(x)
    except Exception as error:
        if cause(error) is not None and not backend.certificates:
            raise cause(error) from None
    return backend.certificates[0]


def partial(x: Tensor, w: Tensor, below: list[int] = TP2[0], tp: int = TP2[1]) -> Tensor:
    return ours.matmul_partial(x, w, below, tp)


def summed(value: Tensor, above: list[int] = TP2[2]) -> Tensor:
    return ours.tree_all_reduce(value, None, None, above, dist.group.WORLD.group_name, torch.float32)


def test_a_partial_sum_in_its_tree_has_the_order_of_one_rank():
    certificate = certificate_of(lambda x, w: summed(partial(x, w)))
    kinds = {entry.op: (entry.kind, entry.order, entry.proof) for entry in certificate.entries}
    assert kinds["detcompile.matmul_partial.default"][:2] == ("collective", "Tree(32, 2x2x2, Blocked(4, block=128))")
    assert kinds["detcompile.tree_all_reduce.default"][2] == "row t of batch reads row t"


def test_columns_are_gathered_a_row_at_a_time():
    certificate = certificate_of(lambda x, w: ours.all_gather_columns(x, dist.group.WORLD.group_name, 16) + 1)
    assert "collective" in certificate.counts


def test_a_group_of_another_size_is_refused():
    with pytest.raises(InvalidInput, match=r"tp=2, but torch\.distributed runs 1 processes: pass tp_group"):
        tensor_parallel(2)
    with pytest.raises(InvalidInput, match="tp=2, but the given group has 1 processes"):
        tensor_parallel(2, dist.group.WORLD)
    alone = tensor_parallel(1)
    alone.require_equal({"weights": "any"})
    assert (alone.rank, alone.share(5)) == (0, slice(0, 5))


def plain_all_reduce(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


REFUSED = {
    "a partial sum that is read": (lambda x, w: partial(x, w) * 2, "a rank's partial sum is read by aten.mul"),
    "a partial sum that is returned": (lambda x, w: partial(x, w), "a rank's partial sum is read by output"),
    "a partial sum read beside its tree": (lambda x, w: summed(partial(x, w)) + partial(x, w), "is read by"),
    "another tree above": (lambda x, w: summed(partial(x, w), [4]), "2 ranks added in the tree \\(4,\\), declared"),
    "another tree below": (lambda x, w: summed(partial(x, w, [4])), "a subtree \\(4,\\) on each of 2 ranks"),
    "ranks that were not declared": (lambda x, w: summed(partial(x, w, [2], 3), [3]), "on each of 3 ranks"),
    "no product at all": (lambda x, w: summed(x + 1), "no partial sums of a matrix product"),
    "a sum of torch.distributed": (plain_all_reduce, "all_reduce.*a collective of torch.distributed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_declared_tree_is_refused_by_name(what: str):
    expression, reason = REFUSED[what]
    with pytest.raises(UncertifiedOp, match=reason):
        certificate_of(expression)
