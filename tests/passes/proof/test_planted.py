"""Mutations of real graphs: operations that mix rows are rejected by name, the others certified.

Where a mutation goes is drawn from a seed of its name, in several models, behind the passes and before them.
"""

import random
from collections.abc import Callable

import pytest
from torch import fx

from detcompile.passes.pipeline import rewrite
from tests.passes.proof.planted_rows import ANYWHERE, NEUTRAL, REWRITTEN, UNPINNED
from tests.passes.proof.planted_steps import OF_GROUPS, OF_RANKS, REWIRED
from tests.passes.proof.planting import MODELS, Planter, candidates, capture, copied, offenders_of
from tests.torch_versions import skip_before_torch_2_13

MOST_MODELS = 3  # of MODELS, for each mutation
BEHIND = ANYWHERE | UNPINNED | REWRITTEN

UNTRACED = dict.fromkeys(
    ("count_as_power", "random_numbers", "dropout"), "cannot plant it: its trace guards on one row"
)


def some_models(name: str) -> list[str]:
    return random.Random(name).sample(list(MODELS), MOST_MODELS)


def planted(name: str, plant: Callable[[Planter], fx.Node], model: str, before: bool) -> tuple[str, ...]:
    """What the certificate refuses of a model's graph with the mutation in it."""
    captured = capture(model)
    gm = copied(captured.before if before else captured.after)
    planter = Planter(gm, random.Random(f"{name} {model} {before}").choice(candidates(gm)), name)
    planter.finish(plant(planter))
    return offenders_of(rewrite(gm) if before else gm, captured)


def assert_named(refused: tuple[str, ...], name: str, model: str) -> None:
    """The mutation is refused, by the place of its own operations, and nothing else is."""
    assert refused, f"certified in {model}"
    assert all(f" at planted.py:1 in {name}: " in offender for offender in refused), (model, refused)


@pytest.mark.parametrize("model", MODELS)
def test_the_graph_itself_is_certified(model: str) -> None:
    captured = capture(model)
    assert offenders_of(copied(captured.after), captured) == ()
    assert len(candidates(captured.after)) > 50


@pytest.mark.parametrize("name", BEHIND)
def test_what_lets_rows_meet_is_refused_by_name(name: str) -> None:
    skip_before_torch_2_13(name, UNTRACED)
    for model in some_models(name):
        assert_named(planted(name, BEHIND[name], model, before=False), name, model)


@pytest.mark.parametrize("name", ANYWHERE)
def test_no_pass_hides_what_lets_rows_meet(name: str) -> None:
    skip_before_torch_2_13(name, UNTRACED)
    model = some_models(name)[0]
    assert_named(planted(name, ANYWHERE[name], model, before=True), name, model)


@pytest.mark.parametrize("name", UNPINNED)
def test_what_the_passes_pin_is_certified(name: str) -> None:
    model = some_models(name)[0]
    assert planted(name, UNPINNED[name], model, before=True) == (), model


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_keeps_rows_apart_is_certified(name: str) -> None:
    for model in some_models(name):
        assert planted(name, NEUTRAL[name], model, before=False) == (), model
    assert planted(name, NEUTRAL[name], model, before=True) == (), model


def rewired(rewire: Callable[[fx.GraphModule], None], model: str) -> str:
    captured = capture(model)
    gm = copied(captured.after)
    rewire(gm)
    return " ".join(offenders_of(gm, captured))


@pytest.mark.parametrize("name", REWIRED)
def test_a_step_read_otherwise_is_refused(name: str) -> None:
    rewire, message = REWIRED[name]
    for model in some_models(name):
        assert message in rewired(rewire, model), model


@pytest.mark.parametrize(
    ("model", "name"), [("gemma2", name) for name in OF_GROUPS] + [("llama of two ranks", name) for name in OF_RANKS]
)
def test_groups_and_ranks_are_kept_apart(model: str, name: str) -> None:
    rewire, message = (OF_GROUPS | OF_RANKS)[name]
    assert message in rewired(rewire, model)


def test_there_are_enough_mutations() -> None:
    assert len(BEHIND) + len(REWIRED) + len(OF_GROUPS) + len(OF_RANKS) > 120
