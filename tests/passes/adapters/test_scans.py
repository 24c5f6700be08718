"""Our scans and mixers give the model's logits before anything is compiled."""

import inspect
from unittest import mock

import pytest
import torch

from detcompile.contrib import MODELS, table_of
from detcompile.errors import UnsupportedModel
from detcompile.passes.adapters.scans import SCANS, pin_recurrences
from detcompile.passes.modules.recurrences import Recurrences
from tests.model_cases import random_model
from tools.model_configs import VOCAB_SIZE, tiny_model

# One architecture at least for every scan and every layer of our own.
NAMES = ["kimi_linear", "lfm2", "mamba", "mamba2", "minimax", "qwen3_next", "recurrent_gemma", "rwkv", "zamba"]
NAMES += ["xlstm", "zaya"]


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_the_models_own(name: str) -> None:
    ids = torch.randint(3, VOCAB_SIZE, (2, 70), generator=torch.Generator().manual_seed(1))
    model = tiny_model(name, "eager")
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        recurrences = pin_recurrences(model)
        assert recurrences is not None
        with mock.patch.object(recurrences, "_next", side_effect=recurrences._next) as states:
            actual = model(input_ids=ids, use_cache=False).logits
    assert states.called
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


def test_every_scan_and_layer_of_ours_is_met() -> None:
    kinds = {type(module) for name in NAMES for module in tiny_model(name).modules()}
    met = {f"{kind.__module__.removeprefix('transformers.models.')}.{kind.__name__}" for kind in kinds}
    assert {name for folder in MODELS for name in table_of(folder, "MIXERS")} <= met
    codes = [inspect.unwrap(kind.forward).__code__ for kind in kinds]
    assert SCANS.keys() <= {name for code in codes for name in code.co_names}


def test_a_model_without_them_is_left_alone() -> None:
    assert pin_recurrences(random_model("llama", torch.float32)) is None


def test_gates_whose_exponentials_overflow_are_refused() -> None:
    model = tiny_model("xlstm")
    model.config.gate_soft_cap = 100.0
    pin_recurrences(model)
    with pytest.raises(UnsupportedModel, match="could overflow"), torch.no_grad():
        model(input_ids=torch.full((1, 4), 5), use_cache=False)


@pytest.mark.parametrize("argument", ["initial_states", "seq_idx", "return_final_states"])
def test_states_from_outside_are_refused(argument: str) -> None:
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(UnsupportedModel, match=argument):
        SCANS["mamba2_chunk_scan"](
            Recurrences(), x, x[..., 0], x[0, 0, :, 0], x, x, chunk_size=2, **{argument: torch.ones(1)}
        )
