"""In a warmup on one rank, collectives return zeros in the form of their results."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from detcompile.templates.collectives import gather, op
from detcompile.templates.device.cuda_graphs import warmup
from detcompile.templates.exact import ranks

RANKS, TOKENS = 2, 5
X, W = torch.ones(TOKENS, 8), torch.ones(6, 8)
IDS, SCALES = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(1, 6)  # of one expert

CALLS: dict[str, tuple[Callable[[str], Tensor], tuple[int, ...], torch.dtype]] = {
    "matmul_all_reduce": (
        lambda group: op.matmul_all_reduce(X, W, None, None, (8,), (RANKS,), group, torch.bfloat16),
        (TOKENS, 6),
        torch.bfloat16,
    ),
    "tree_all_reduce": (
        lambda group: op.tree_all_reduce(X[None], None, X[None], (RANKS,), group, torch.float16),
        (1, TOKENS, 8),
        torch.float16,
    ),
    "all_gather_columns": (lambda group: gather.all_gather_columns(X, group, 15), (TOKENS, 15), torch.float32),
    "sharded_embedding": (
        lambda group: gather.sharded_embedding(W, torch.tensor([[0, 7, 99]]), 0, group),
        (1, 3, 8),
        torch.float32,
    ),
    "exact_linear_all_reduce": (
        lambda group: ranks.linear_all_reduce(X, W.to(torch.int8)[None], torch.ones(6), None, 2, group),
        (TOKENS, 6),
        torch.float32,
    ),
    "exact_expert_linear_all_reduce": (
        lambda group: ranks.expert_linear_all_reduce(X, IDS, W.to(torch.int8)[None, None], SCALES, None, 2, group),
        (TOKENS, 1, 6),
        torch.float32,
    ),
}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Rank 0 of two; the other never comes."""

    def met(*_: object, **__: object) -> None:
        raise AssertionError("a collective was begun")

    for owner, name in ((dist, "all_gather"), (op, "_reduce_then_gather"), (gather.c10d, "all_reduce")):
        monkeypatch.setattr(owner, name, met)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_rehearses_alone_meets_nobody(name: str, group: str) -> None:
    call, shape, dtype = CALLS[name]
    with pytest.raises(AssertionError, match="a collective was begun"):
        call(group)
    with warmup(alone=True):
        actual = call(group)
    assert actual.shape == shape and actual.dtype == dtype and not actual.any()
    with warmup(), pytest.raises(AssertionError, match="a collective was begun"):
        call(group)  # a capture's warm-up, which all ranks run
