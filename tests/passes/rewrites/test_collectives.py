"""Exact sums over ranks run in one order on every rank."""

import torch
from torch import Tensor, fx

from detcompile.passes.rewrites.collectives import order_collectives

exact_all_reduce = torch.ops.detcompile.exact_linear_all_reduce.default


def three_sums(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    attended = exact_all_reduce(x, w, w_scale, None, 1, "a group")
    beside = exact_all_reduce(x, w, w_scale, None, 1, "a group")
    return exact_all_reduce(attended + beside, w, w_scale, None, 1, "a group")


def test_independent_sums_follow_each_other() -> None:
    gm = order_collectives(fx.symbolic_trace(three_sums))
    first, second, third = gm.graph.find_nodes(op="call_function", target=exact_all_reduce)
    assert [node.args[6:] for node in (first, second, third)] == [(), (first,), ()]
    gm.graph.lint()
