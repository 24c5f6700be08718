"""Row-parallel sums over ranks: a model's own all_reduce in the declared tree, and errors against float64.

Each number of ranks runs once, with everything in it, without Inductor.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.tp_error import Errors, errors_of_logits, errors_of_products
from detcompile import Backend, Numerics
from detcompile.parallel import tensor_parallel
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.model_cases import without_inductor
from tests.parallel.ranks import run_ranks

SIZES = (2, 4)
HIDDEN, INNER = 24, 80


class Megatron(nn.Module):
    """An MLP as its ranks would write it: forward(x [B, T, HIDDEN]) adds up what they have, twice, beside x."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        up, down, out = (
            torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
            for shape in ((INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN, HIDDEN))
        )
        ranks = tensor_parallel(tp)
        self.own = ranks.share(HIDDEN)
        inner = ranks.share(INNER)
        self.up, self.down, self.out = (
            nn.Parameter(w.contiguous(), requires_grad=False) for w in (up[inner], down[:, inner], out[:, self.own])
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(functional.relu(functional.linear(x, self.up)), self.down)
        dist.all_reduce(y)
        x = x + y
        y = functional.linear(x.flatten(0, 1)[:, self.own], self.out)
        dist.all_reduce(y)
        return y.view(x.shape) + x


def own_sums(tp: int) -> tuple[Tensor, dict[str, int], tuple[str, ...]]:
    """Return the model's output, and the classes and orders of its certificate."""
    backend = Backend(Numerics(), certify_only=True)
    run = torch.compile(Megatron(tp), backend=backend, fullgraph=True)
    x = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(6))
    torch._dynamo.mark_dynamic(x, [0, 1])
    out = run(x)
    (certificate,) = backend.certificates
    return out, certificate.counts, certificate.orders


def on_a_rank(rank: int, tp: int) -> tuple[tuple[Tensor, dict[str, int], tuple[str, ...]], dict[str, Errors]]:
    with torch.no_grad():
        sums = own_sums(tp)
    if tp == 1:
        return sums, {}
    with without_inductor():
        return sums, errors_of_products(tp) | {"logits": errors_of_logits(tp, num_layers=1)}


@functools.cache
def ranks(tp: int) -> list[tuple[tuple[Tensor, dict[str, int], tuple[str, ...]], dict[str, Errors]]]:
    return run_ranks(tp, on_a_rank, tp)


@pytest.mark.parametrize("tp", exhaustive_unless(lambda tp: tp == 2, SIZES))
def test_a_models_own_all_reduce_gives_the_bits_of_one_rank(tp: int) -> None:
    ((whole, counts, orders), _) = ranks(1)[0]
    assert "collective" not in counts
    assert orders == (
        "Blocked(24, block=128)",
        "Tree(24, 2x2x2, Blocked(3, block=128))",
        "Tree(80, 2x2x2, Blocked(10, block=128))",
    )
    for rank, ((out, counts, rank_orders), _) in enumerate(ranks(tp)):
        assert_bitwise_equal(out, whole, f"rank {rank} of {tp}")
        assert (counts["collective"], rank_orders) == (2, orders)


@pytest.mark.parametrize("tp", exhaustive_unless(lambda tp: tp == 2, SIZES))
def test_errors_stay_within_plain_tensor_parallelism(tp: int) -> None:
    """For products and a whole model, within the five percent allowed for other templates, too."""
    for rank, (_, errors) in enumerate(ranks(tp)):
        for case, (ours, plain) in errors.items():
            assert 0 < ours <= 1.05 * plain, f"{case}, rank {rank} of {tp}: {ours:.3e}, plain torch {plain:.3e}"
