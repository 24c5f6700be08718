"""While requests run, garbage collection leaves older objects alone."""

import gc

import pytest
import torch

from detcompile.errors import EngineError
from tests.runtime.engine_cases import GREEDY, config_of, engine_of, prompt_of, tiny_model


def test_an_engine_shortens_collections_while_it_has_requests() -> None:
    gc.freeze()  # as Python 3.12 starts with objects that are frozen
    engine = engine_of(tiny_model(torch.device("cpu")), config_of())
    engine.add_request(prompt_of(5), GREEDY)
    before = gc.get_freeze_count()
    engine.step()
    assert gc.get_freeze_count() > before
    while engine.has_unfinished_requests:
        engine.step()
    assert gc.get_freeze_count() == 0


def test_an_engine_that_fails_puts_everything_back(monkeypatch) -> None:
    engine = engine_of(tiny_model(torch.device("cpu")), config_of())
    engine.add_request(prompt_of(5), GREEDY)
    monkeypatch.setattr(engine._pipeline, "step", lambda: 1 / 0)
    with pytest.raises(EngineError, match="a step failed"):
        engine.step()
    assert gc.get_freeze_count() == 0
