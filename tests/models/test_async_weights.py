"""Weights that arrive while a model is compiled give the same bits as weights that were there before."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from detcompile import CompiledModel
from detcompile.api import compile_here
from detcompile.models.loading import find
from detcompile.orders.numerics import Numerics
from detcompile.passes import program_source
from detcompile.passes.programs import async_weights as module
from detcompile.passes.programs.async_weights import AsyncWeightLoad, can_load_async, wait_for_weights
from detcompile.passes.warm.kept_program import take_program
from tests.conftest import NEEDS_CUDA
from tests.exhaustive import exhaustive_unless
from tests.model_cases import random_model, without_inductor

TOKENS = torch.tensor([[3, 5, 7, 11]])


MODELS = {  # each has another first reader of its weights
    "llama": {"tie_word_embeddings": True},  # the join of products over one input
    "gpt_neox": {},  # nothing is joined
    "granite_swa": {},  # two groups of caches, which a run compares
}


@pytest.fixture(scope="module", params=exhaustive_unless(lambda name: name == "llama", list(MODELS)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(request.param, torch.float32, **MODELS[request.param]).save_pretrained(path)
    return path


pytestmark = pytest.mark.usefixtures("keep_patched_programs")


@pytest.fixture(autouse=True)
def small_weights_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)


def compiled(folder: Path, beside: bool, device: str = "cpu", numerics: Numerics = Numerics()) -> CompiledModel:
    with find(folder, device=device).under_way(beside=beside) as model:
        made = compile_here(model, 1, numerics)
    assert isinstance(made, CompiledModel)
    return made


def facts(model: CompiledModel) -> tuple[Any, ...]:
    device = model.executor.description.facts.device
    logits = model(TOKENS.to(device)).logits.cpu()
    return logits.numpy().tobytes(), model.fingerprint, model.certificate, logits.any().item()


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Any, ...]:
    """Of weights that were there before; its program is kept."""
    with mock.patch.dict("os.environ", {"DETCOMPILE_KEEP_PROGRAMS": "1"}):
        return facts(compiled(folder, beside=False))


class Gate:
    """Blocks the copy of every weight until a reader waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.num_copied, self.num_waits = threading.Event(), 0, 0
        copy, wait = AsyncWeightLoad._copy, AsyncWeightLoad.wait

        def held(weights: AsyncWeightLoad, target: torch.Tensor, source: torch.Tensor) -> None:
            assert self.opened.wait(120)
            copy(weights, target, source)
            self.num_copied += 1

        def opening(weights: AsyncWeightLoad) -> None:
            self.num_waits += 1
            self.opened.set()
            wait(weights)

        monkeypatch.setattr(AsyncWeightLoad, "_copy", held)
        monkeypatch.setattr(AsyncWeightLoad, "wait", opening)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@pytest.mark.parametrize("is_kept", [True, False])
def test_weights_that_come_last_give_the_same_bits(
    folder: Path, expected: tuple[Any, ...], gate: Gate, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    taken: list[bool] = []

    def noted(*given: Any) -> Any:
        actual = take_program(*given)
        taken.append(actual is not None)
        return actual

    monkeypatch.setattr(program_source, "take_program", noted)
    monkeypatch.setenv("DETCOMPILE_KEEP_PROGRAMS", "1" if is_kept else "0")
    assert facts(compiled(folder, beside=True)) == expected
    assert expected[-1] and gate.num_copied > 4 and gate.num_waits > 1
    assert taken == [True] * is_kept  # its key is the one of weights that were there


def test_digits_are_made_of_weights_that_have_come(folder: Path, gate: Gate) -> None:
    numerics = Numerics(arithmetic="exact16")
    with without_inductor():
        late = facts(compiled(folder, True, numerics=numerics))
        assert late == facts(compiled(folder, False, numerics=numerics)) and late[-1] and gate.num_copied > 4


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_the_copy_fails_with_comes_out(
    folder: Path, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    def failing(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(AsyncWeightLoad, "_copy", failing)
    monkeypatch.setenv("DETCOMPILE_KEEP_PROGRAMS", "1" if is_kept else "0")
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        compiled(folder, beside=True)
    wait_for_weights()  # nothing is left under way


def test_a_refused_model_ends_the_copy(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), find(folder, device="cpu").under_way(beside=True):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "detcompile copying weights"]


def test_tied_weights_stay_tied_and_travel_once(folder: Path, gate: Gate) -> None:
    with find(folder, device="cpu").under_way(beside=True) as model:
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert (head is table) == model.config.tie_word_embeddings and not table.any()
        large = [weight for weight in model.parameters() if weight.nbytes >= module.LEAST_BYTES]
        wait_for_weights()
        assert table.any() and gate.num_copied == len(large)


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_models_that_may_look_at_their_weights_wait(name: str) -> None:
    """Experts lie in stacks that are no linear's, and rows of learned positions are compared with their table."""
    assert not can_load_async(random_model(name, torch.float32))


@pytest.mark.gpu
@NEEDS_CUDA
def test_on_a_gpu(folder: Path) -> None:
    assert facts(compiled(folder, beside=True, device="cuda")) == facts(compiled(folder, beside=False, device="cuda"))
