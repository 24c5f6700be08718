"""The certificate follows a rank's partial sums into the declared tree, and refuses every other collective by name.

The group has one process: what is proven is of the graph, and no other rank has a part in it.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional

from detcompile import Backend, DetcompileError, InvalidInput, Numerics, UncertifiedOp
from detcompile.parallel import tensor_parallel
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.tracing import cause

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


def product(x: Tensor, w: Tensor, below: list[int] = TP2[0], above: list[int] = TP2[2], bias=None) -> Tensor:
    return ours.matmul_all_reduce(x, w, bias, None, below, above, dist.group.WORLD.group_name, torch.float32)


def summed(value: Tensor, above: list[int] = TP2[2]) -> Tensor:
    return ours.tree_all_reduce(value, None, None, above, dist.group.WORLD.group_name, torch.float32)


def test_a_row_parallel_product_has_the_order_of_one_rank():
    certificate = certificate_of(lambda x, w: product(x, w))
    kinds = {entry.op: (entry.kind, entry.order, entry.proof) for entry in certificate.entries}
    actual = kinds["detcompile.matmul_all_reduce.default"]
    assert actual[:2] == ("collective", "Tree(32, 2x2x2, Blocked(4, block=128))")
    assert actual[2].startswith("row t of batch reads row t")


def of_experts(x: Tensor, w: Tensor, below: list[int] = TP2[0], tp: int = TP2[1]) -> Tensor:
    """A rank's partial sums of each row's best three of four experts, [T, 3, 8]."""
    return ours.expert_matmul_partial(x, x[:, :4].topk(3, -1).indices, w.expand(4, 8, 16), below, tp)


def test_experts_partial_sums_meet_in_the_same_tree():
    certificate = certificate_of(lambda x, w: summed(of_experts(x, w)))
    kinds = {entry.op: (entry.kind, entry.order) for entry in certificate.entries}
    tree = ("collective", "Tree(32, 2x2x2, Blocked(4, block=128))")
    assert kinds["detcompile.expert_matmul_partial.default"] == tree


def of_quantized(x: Tensor, w: Tensor, below: list[int] = TP2[0], tp: int = TP2[1]) -> Tensor:
    """A rank's partial sums of x [T, 16] and 8 features in int8, [T, 8]."""
    packed = torch.ones(8, 16, dtype=torch.int8)
    return ours.dequant_matmul_partial(x, packed, torch.ones(1, 8), None, None, 16, 1, below, tp)


def test_partial_sums_of_quantized_weights_meet_in_the_tree():
    certificate = certificate_of(lambda x, w: summed(of_quantized(x, w)))
    kinds = {entry.op: (entry.kind, entry.order) for entry in certificate.entries}
    tree = ("collective", "Tree(32, 2x2x2, Blocked(4, block=128))")
    assert kinds["detcompile.dequant_matmul_partial.default"] == tree


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


def in_place(value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(value, op)
    return value


def read_twice(x: Tensor, w: Tensor) -> Tensor:
    item = functional.linear(x, w)
    return funcol.all_reduce(item, "sum", dist.group.WORLD) + item


OWN_SUMS = {
    "in place": lambda x, w: in_place(functional.linear(x, w)) + 1,
    "functional": lambda x, w: funcol.all_reduce(functional.linear(x, w), "sum", dist.group.WORLD) + 1,
    "of a weight that is not transposed": lambda x, w: in_place(x[:, :8] @ w[:, :8]),
    "of a row of each batch": lambda x, w: in_place(functional.linear(x.view(-1, 2, 8), w[:, :8])) * 2,
}


@pytest.mark.parametrize("what", OWN_SUMS)
def test_a_models_own_sum_over_one_rank_takes_the_whole_tree(what: str):
    certificate = certificate_of(OWN_SUMS[what])
    (product,) = [entry for entry in certificate.entries if entry.op == "detcompile.matmul.default"]
    assert product.order.startswith("Tree(")
    assert "c10d" not in str(certificate)


@pytest.mark.parametrize(
    ("K", "dtype", "message"),
    [(12, torch.float32, "K=12 does not split into 8 equal leaves"), (16, torch.float64, "matmul of torch.float64")],
)
def test_a_models_own_sum_that_has_no_tree_is_named(K: int, dtype: torch.dtype, message: str):
    def converted(x: Tensor, w: Tensor) -> Tensor:
        return in_place(functional.linear(x[:, :K].to(dtype), w[:, :K].to(dtype)))

    place = r"the product at test_collective_rules\.py:\d+ in \w+, which all_reduce adds up"
    with pytest.raises(DetcompileError, match=f"{place}: {message}"):
        certificate_of(converted)


OWN = "all_reduce.*a collective of torch.distributed"
REFUSED = {
    "another tree above": (lambda x, w: product(x, w, [2, 2], [1, 2]), "2 ranks added in the tree \\(1, 2\\), decl"),
    "another tree below": (lambda x, w: product(x, w, [4]), "a subtree \\(4,\\) on each of 2 ranks"),
    "ranks that were not declared": (lambda x, w: product(x, w, [2], [3]), "on each of 3 ranks"),
    "a bias of rows": (lambda x, w: product(x, w, bias=x[:, 0]), "the bias"),
    "a weight of rows": (lambda x, w: product(x, x), "the second matrix"),
    "a partial sum that is read": (lambda x, w: of_experts(x, w) * 2, "a rank's partial sum is read by aten.mul"),
    "a partial sum that is returned": (lambda x, w: of_experts(x, w), "a rank's partial sum is read by output"),
    "a partial sum read beside its tree": (
        lambda x, w: summed(of_experts(x, w)) + of_experts(x, w),
        "is read by",
    ),
    "experts' partial sums added up first": (lambda x, w: summed(of_experts(x, w).sum(1)), "is read by aten.permute"),
    "experts' partial sums, weighted": (lambda x, w: summed(of_experts(x, w) * x[:, :3, None]), "is read by aten.mul"),
    "experts' other tree above": (
        lambda x, w: summed(of_experts(x, w), [4]),
        "2 ranks added in the tree \\(4,\\), declared",
    ),
    "experts' other tree below": (lambda x, w: summed(of_experts(x, w, [4])), "a subtree \\(4,\\) on each of 2 ranks"),
    "a quantized partial sum that is read": (
        lambda x, w: of_quantized(x, w) * 2,
        "a rank's partial sum is read by aten.mul",
    ),
    "a quantized product's other tree below": (
        lambda x, w: summed(of_quantized(x, w, [4])),
        "a subtree \\(4,\\) on each of 2 ranks",
    ),
    "no product at all": (lambda x, w: summed(x + 1), "are not partial sums of a matrix product"),
    "a sum of no product": (lambda x, w: in_place(x * 2), OWN),
    "a product with a bias": (lambda x, w: in_place(functional.linear(x, w, w[:, 0])), OWN),
    "a product that is rounded twice": (lambda x, w: in_place(functional.linear(x, w).bfloat16().float()), OWN),
    "a product that is read before": (read_twice, OWN),
    "two products": (lambda x, w: in_place(functional.linear(x, w) + functional.linear(x + 1, w)), OWN),
    "the largest of the ranks": (lambda x, w: in_place(functional.linear(x, w), dist.ReduceOp.MAX), OWN),
    "rows of the ranks": (lambda x, w: funcol.all_gather_tensor(x, 0, dist.group.WORLD), "a collective of torch.dist"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_undeclared_tree_is_rejected_by_name(what: str):
    expression, reason = REFUSED[what]
    with pytest.raises(UncertifiedOp, match=reason):
        certificate_of(expression)
