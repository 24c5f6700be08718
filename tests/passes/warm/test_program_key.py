"""What code holds besides weights is a part of the key of a kept program, wherever it stands."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from detcompile.orders.numerics import Numerics
from detcompile.passes.preparation import prepare
from detcompile.passes.sharding.shard import pin_row_parallel
from detcompile.passes.warm.program_key import observe_run, program_key
from tests.model_cases import random_model

SCALE_OF_MODULE = 1.0


class _Scaled(LlamaMLP):
    """Reads its numbers in every way that code has them."""

    SCALE, TABLE, TENSOR, LATER = 1.0, [1.0] * 80, torch.ones(80), 1.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = super().forward(x * torch.tensor(scale)) * torch.tensor(self.SCALE)
        y = y * torch.tensor(self.TABLE) * self.TENSOR * torch.from_numpy(_held()) * self.scaled()
        return y * self.LATER * SCALE_OF_MODULE if x.shape[1] > 100 else y  # not in the run that the key is taken of

    @classmethod
    def scaled(cls, by: float = 1.0) -> Tensor:
        return torch.full((), by)


def _holding() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    array = np.ones(80, np.float32)

    def held() -> Any:
        return array

    def hold(value: Any) -> None:
        array[:] = value

    return held, hold


_held, _hold = _holding()
CHANGES: dict[str, Callable[[], Any]] = {
    "a number of the class": lambda: setattr(_Scaled, "SCALE", 50.0),
    "a list of the class": lambda: setattr(_Scaled, "TABLE", [2.0, *[1.0] * 79]),
    "a tensor of the class, in place": lambda: _Scaled.TENSOR[3:4].fill_(2.0),
    "a number for longer prompts": lambda: setattr(_Scaled, "LATER", 50.0),
    "a number of its module, for longer prompts": lambda: globals().update(SCALE_OF_MODULE=50.0),
    "a default": lambda: setattr(_Scaled.forward, "__defaults__", (50.0,)),
    "a default of a class method": lambda: setattr(_Scaled.scaled.__func__, "__defaults__", (50.0,)),
    "an array that a function holds": lambda: _hold(2.0),
    "a number of a class that it comes from": lambda: setattr(LlamaMLP, "SCALE_OF_ALL", 2.0),
}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    _Scaled.SCALE, _Scaled.TABLE, _Scaled.LATER = 1.0, [1.0] * 80, 1.0
    _Scaled.TENSOR.fill_(1.0)
    _Scaled.forward.__defaults__ = _Scaled.scaled.__func__.__defaults__ = (1.0,)  # type: ignore[attr-defined]
    _hold(1.0)
    globals().update(SCALE_OF_MODULE=1.0)
    if hasattr(LlamaMLP, "SCALE_OF_ALL"):
        del LlamaMLP.SCALE_OF_ALL


def key() -> str:
    model, numerics = random_model("llama", torch.float32), Numerics()
    for layer in model.model.layers:
        layer.mlp.__class__ = _Scaled
    return key_of(model, numerics)


def key_of(model: PreTrainedModel, numerics: Numerics) -> str:
    seen, _ = prepare(model, numerics, 256, shared=False)
    pin_row_parallel(model, numerics)
    found = program_key(model, numerics, 256, seen, observe_run(model))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def before() -> str:
    return key()


def test_another_load_has_the_same(before: str) -> None:
    assert key() == before


def test_another_compiler_is_another_key(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detcompile.passes.warm.program_key.compiler_if_any", lambda: "g++ 99")
    assert key() != before


@pytest.mark.parametrize("name", CHANGES)
def test_what_code_holds_is_a_part_of_it(name: str, before: str) -> None:
    CHANGES[name]()
    assert key() != before
