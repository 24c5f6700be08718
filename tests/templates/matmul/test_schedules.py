"""Which GEMM schedules come first, where times on an H200 decided it; their names; what other GPUs get.

The times are in docs/log/kernels.md and docs/log/model.md.
"""

from dataclasses import replace

import pytest

from detcompile.templates.matmul.candidates import candidates, reference_schedule
from detcompile.templates.matmul.schedules import BatchedLeaves, GemmProblem, HopperTiles, PointerTiles

EIGHT_LEAVES = (2, 2, 2)


def problem(n: int, k: int, tokens: int, radices: tuple[int, ...] = (), **changes: object) -> GemmProblem:
    order = GemmProblem(
        dtype="bfloat16", n=n, k=k, radices=radices, order=f"{k} {radices}", w_nk=True, aligned=True, hopper=True,
        epilogue=("bfloat16", None, None), bucket=tokens,
    )  # fmt: skip
    return replace(order, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "first"),
    [
        (problem(6144, 4096, 8), "ring-8x64x256"),  # weights that arrive before x does
        (problem(4096, 12288, 8), "ring-8x32x256"),  # a tile for each multiprocessor
        (problem(24576, 4096, 8, gated=True), "ring-gated-8x32x256"),
        (problem(6144, 4080, 8), "hopper-swapped-16x64x256"),  # no whole blocks
        (problem(6144, 4096, 16), "hopper-swapped-16x64x256"),  # weights that a warp of its own fetches ahead
        (problem(24576, 4096, 16, gated=True), "hopper-swapped-16x64x256"),
        (problem(4096, 1024, 8), "pointers-swapped-16x64x128"),  # too few for that
        (problem(6144, 1024, 8, gated=True), "pointers-swapped-gated-16x64x128"),
        (problem(1024, 2048, 8, EIGHT_LEAVES), "batched-leaves-ahead-8x16x128"),
        (problem(1024, 2048, 16, EIGHT_LEAVES), "batched-leaves-ahead-16x16x128"),
        (problem(4096, 12288, 8, EIGHT_LEAVES), "batched-leaves-8x16x128"),
        (problem(4096, 4096, 8, (2,)), "hopper-swapped-16x64x256"),  # a rank of four of eight leaves
        (problem(4096, 4096, 8, (4,)), "hopper-swapped-16x64x256"),
        (problem(4096, 4096, 32, EIGHT_LEAVES), "hopper-swapped-32x64x256"),
        (problem(6144, 4096, 32), "tma-swapped-32x64x256"),
        (problem(24576, 4096, 32), "pointers-swapped-32x128x64"),
        (problem(24576, 4096, 8, gated=True, hopper=False), "pointers-swapped-16x64x128"),
        (problem(24576, 4096, 32, gated=True), "pointers-swapped-gated-32x128x64"),
        (problem(24576, 4096, 64, gated=True), "pointers-swapped-64x64x64"),
        (problem(4096, 12288, 64), "hopper-64x32x128"),  # others leave multiprocessors without a tile
        (problem(4096, 12288, 2048, EIGHT_LEAVES), "hopper-128x128x64"),
        (problem(24576, 4096, 2048), "hopper-128x256x64"),
        (problem(24576, 4096, 2048, gated=True), "hopper-gated-128x256x64"),
    ],
    ids=str,
)
def test_the_first_schedule_is_the_one_that_was_fastest(of: GemmProblem, first: str) -> None:
    assert str(candidates(of)[0]).startswith(f"{first}-")


@pytest.mark.parametrize("tokens", [1 << i for i in range(3, 13)])
@pytest.mark.parametrize(
    ("radices", "gated"),
    [((), True), *((radices, False) for radices in ((), (2,), (4,), (3, 2), EIGHT_LEAVES, (2,) * 5))],
    ids=str,
)
def test_names_are_distinct_and_every_gpu_has_schedules(tokens: int, radices: tuple[int, ...], gated: bool) -> None:
    of = problem(6144, 3072, tokens, radices, gated=gated)
    every = *candidates(of), reference_schedule(of)
    assert len({str(schedule) for schedule in every}) == len(set(every)) >= 4
    elsewhere = candidates(replace(of, hopper=False))
    assert elsewhere and not any(isinstance(schedule, HopperTiles) for schedule in elsewhere)
    unaligned = candidates(replace(of, hopper=False, aligned=False))
    assert unaligned and all(isinstance(schedule, PointerTiles | BatchedLeaves) for schedule in unaligned)
    columns = candidates(replace(of, hopper=False, w_nk=False))
    batched = [schedule for schedule in columns if isinstance(schedule, BatchedLeaves)]
    assert not any(schedule.ahead for schedule in batched), "rows of weights that do not lie side by side"
