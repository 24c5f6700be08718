"""Garbage collection while requests run: what existed before is left alone, and only as long."""

import gc

import pytest
import torch

from detcompile.errors import EngineError
from detcompile.runtime.short_collections import ShortCollections
from tests.runtime.engine_cases import GREEDY, config_of, engine_of, prompt_of, tiny_model


def test_an_engine_shortens_collections_while_it_has_requests() -> None:
    engine = engine_of(tiny_model(torch.device("cpu")), config_of())
    engine.add_request(prompt_of(5), GREEDY)
    engine.step()
    assert gc.get_freeze_count() > 0
    while engine.has_unfinished_requests:
        engine.step()
    assert gc.get_freeze_count() == 0


def test_an_engine_that_fails_puts_everything_back(monkeypatch) -> None:
    engine = engine_of(tiny_model(torch.device("cpu")), config_of())
    engine.add_request(prompt_of(5), GREEDY)
    monkeypatch.setattr(engine, "_advance", lambda: 1 / 0)
    with pytest.raises(EngineError, match="a step failed"):
        engine.step()
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        collections = ShortCollections()
        collections.begin()
        collections.end()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
