"""Random programs that the certificate accepts give a row the same bits in every batch."""

from collections import Counter
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.certificate_draws import draw
from detcompile.passes.proof import provenance

SEEDS = 100_000_000


@settings(max_examples=40)
@given(st.integers(0, SEEDS))
def test_certified_programs_are_batch_invariant(seed: int) -> None:
    verdict = draw(seed)
    assert verdict.kind != "failed", verdict


def test_draws_include_certified_and_refused_programs() -> None:
    counts = Counter(draw(seed).kind for seed in range(40))
    assert counts["certified"] > 10 and counts["refused"] > 5


def test_draw_is_repeatable_and_compiles() -> None:
    seed = next(seed for seed in range(100) if draw(seed).kind == "certified" and len(draw(seed).names) > 3)
    assert draw(seed) == draw(seed, compiled=True)


def test_weakened_certificate_is_detected() -> None:
    with mock.patch.object(provenance, "is_feature", return_value=True):
        assert any(draw(seed).kind == "failed" for seed in range(80, 300))
