"""Checks of the collectives on one rank: every rank makes the same draws and takes its share of them."""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from detcompile import InvalidInput, Numerics
from detcompile.parallel import tensor_parallel
from detcompile.templates.collectives.gather import all_gather_columns, sharded_embedding
from detcompile.templates.collectives.op import partial_product, tree_all_reduce
from tests.bits import assert_bitwise_equal

__all__ = ["check_all"]

ours = torch.ops.detcompile
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHAINS = ((1, 2, 4, 8), (1, 4), (1, 4, 8), (1, 2, 4), (1, 2), (1, 2, 6), (1, 3, 6), (1, 3))


class Case(NamedTuple):
    """One row-parallel product, with its epilogue."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    residual: Tensor | None
    out_dtype: torch.dtype


def check_all(rank: int, tp: int, device: str) -> int:
    """Run every check on this rank; return how many draws were compared."""
    for seed in range(24):
        _check_row_parallel(tp, seed, device)
    for dtype in DTYPES:
        _check_gathers(tp, dtype, device)
    _check_special_values(tp, device)
    _check_refusals(tp, device)
    return 24


def _draw(rng: random.Random, leaves: int, device: str) -> Case:
    """Draw sums of both signs and many magnitudes, so that a changed order changes bits."""
    M, N, leaf_k = rng.choice((1, 2, 7, 33)), rng.choice((1, 5, 40, 67)), rng.choice((1, 3, 16, 130))
    dtype, out_dtype = rng.choice(DTYPES), rng.choice(DTYPES)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def values(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        normal, spread = (torch.randn(*shape, generator=generator) for _ in range(2))
        return (normal * torch.exp(spread)).to(device, dtype)

    bias = values(N, dtype=rng.choice(DTYPES)) if rng.random() < 0.5 else None
    residual = values(M, N, dtype=rng.choice(DTYPES)) if rng.random() < 0.5 else None
    return Case(values(M, leaves * leaf_k), values(N, leaves * leaf_k), bias, residual, out_dtype)


def _check_row_parallel(tp: int, seed: int, device: str) -> None:
    """Check that the ranks' partials, added over the ranks in either way, have the bits of one rank's whole tree."""
    rng = random.Random(f"{tp} {seed}")
    numerics = Numerics(tp_sizes=rng.choice([chain for chain in CHAINS if tp in chain]))
    above, below = numerics.split_radices(tp)
    case = _draw(rng, numerics.leaves, device)
    ranks = tensor_parallel(tp)
    item = ranks.share(case.x.shape[1])
    whole = ours.matmul(case.x, case.w, case.bias, case.residual, numerics.radices, case.out_dtype)
    partial = partial_product(case.x[:, item], case.w[:, item], below)
    for two_shot in (False, True):
        out = tree_all_reduce(partial, case.bias, case.residual, above, ranks.group, case.out_dtype, two_shot)
        assert_bitwise_equal(out, whole, f"{numerics}, seed {seed}, two_shot={two_shot}")
    given = (case.bias, case.residual, below, above, ranks.group, case.out_dtype)
    together = ours.matmul_all_reduce(case.x[:, item], case.w[:, item], *given)
    assert_bitwise_equal(together, whole, f"{numerics}, seed {seed}")


def _check_gathers(tp: int, dtype: torch.dtype, device: str) -> None:
    """Check that columns and embedding rows arrive with unchanged bytes."""
    ranks = tensor_parallel(tp)
    generator = torch.Generator().manual_seed(1)
    for rows, width in itertools.product((1, 5), (tp, 10 * tp - 1, 33)):
        words = torch.randint(-(1 << 15), 1 << 15, (rows, width, 2), generator=generator, dtype=torch.int16)
        table = words.view(torch.float32)[..., 0] if dtype is torch.float32 else words[..., 0].view(dtype)
        table = table.contiguous().to(device)
        for features in (table, table.t().contiguous()):
            item = -(-features.shape[1] // tp)
            columns = features[:, ranks.rank * item : (ranks.rank + 1) * item]
            columns = torch.nn.functional.pad(columns, (0, item - columns.shape[1]))
            gathered = ours.all_gather_columns(columns, ranks.group, features.shape[1])
            assert_bitwise_equal(gathered, features, f"columns {features.shape}")
            gathered = all_gather_columns(columns, ranks.group, features.shape[1], peers=False)
            assert_bitwise_equal(gathered, features, f"columns {features.shape} by the library")
        ids = torch.randint(0, width, (3, 7), generator=generator).to(device)
        whole = table.t().contiguous()
        item = -(-width // tp)
        share = whole[ranks.rank * item : (ranks.rank + 1) * item]
        share = torch.nn.functional.pad(share, (0, 0, 0, item - len(share)))
        given = (share, ids, ranks.rank * item, ranks.group)
        assert_bitwise_equal(ours.sharded_embedding(*given), whole[ids], f"embedding {whole.shape}")
        assert_bitwise_equal(sharded_embedding(*given, peers=False), whole[ids], f"embedding {whole.shape}, library")


def _check_special_values(tp: int, device: str) -> None:
    """Check that infinities, NaN, negative zero and overflow of partials give the result of one rank."""
    ranks = tensor_parallel(tp)
    numerics = Numerics(tp_sizes=(1, tp))
    values = [float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 3e38, 1e-45, 1.0]
    rows = torch.tensor(list(itertools.islice(itertools.product(values, repeat=tp), 512)), device=device)
    one = torch.ones(1, tp, device=device)
    for dtype in DTYPES:
        x, w = rows.to(dtype), one.to(dtype)
        whole = ours.matmul(x, w, None, None, numerics.radices, None)
        item = ranks.share(tp)
        given = (x[:, item], w[:, item], None, None, [], numerics.radices, ranks.group, dtype)
        out = ours.matmul_all_reduce(*given)
        if device == "cpu":  # the payload of a sum of several NaNs is undefined
            out, whole = (torch.where(y.isnan(), torch.nan, y) for y in (out, whole))
        assert_bitwise_equal(out, whole, f"special values, {dtype}")


def _check_refusals(tp: int, device: str) -> None:
    """Check the refusal of calls that would leave bytes unwritten or give another rank's rows."""
    ranks = tensor_parallel(tp)
    table = torch.zeros(4, 2, device=device)
    with pytest.raises(InvalidInput, match=f"the ranks have {2 * tp} columns together, not {2 * tp + 1}"):
        ours.all_gather_columns(table, ranks.group, 2 * tp + 1)
    with pytest.raises(InvalidInput, match=f"rank {ranks.rank} with 4 rows begins at row {4 * ranks.rank}, not"):
        ours.sharded_embedding(table, torch.zeros(1, dtype=torch.int64, device=device), 4 * ranks.rank + 1, ranks.group)
