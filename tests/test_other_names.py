"""Arguments with another name in vLLM, transformers or torch.compile are rejected with our name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import detcompile
from detcompile import EngineConfig, InvalidInput, SamplingParams, api
from detcompile.models import compiled as compiled_module
from detcompile.models.compiled import CompiledModel
from detcompile.runtime import engine as engine_module
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import VLLM_NAMES
from detcompile.runtime.requests.sampling_params import EQUIVALENTS
from tests.model_cases import compiled
from tests.runtime.engine_cases import config_of


def model() -> CompiledModel:
    return compiled("qwen3", torch.float32)


def generate(**given: Any) -> object:
    return model().engine(config_of()).generate([1], **given)


CALLS: dict[str, tuple[Callable[..., object], Mapping[str, str], Callable[..., object]]] = {
    "SamplingParams": (SamplingParams, EQUIVALENTS, SamplingParams),
    "EngineConfig": (EngineConfig, VLLM_NAMES, EngineConfig),
    "engine": (lambda **given: model().engine(**given), compiled_module.ENGINE_NAMES, CompiledModel.engine),
    "generate": (generate, engine_module.REQUEST_NAMES, Engine.generate),
    "compile": (lambda **given: detcompile.compile("tiny", **given), api.CALLED_HERE, detcompile.compile),
    "load_model": (lambda **given: detcompile.load_model("tiny", **given), api.CALLED_HERE, detcompile.load_model),
}


@pytest.mark.parametrize("name", CALLS)
def test_foreign_argument_names_get_advice(name: str) -> None:
    call, equivalents, function = CALLS[name]
    parameters = inspect.signature(function).parameters
    for other, advice in equivalents.items():
        assert other not in parameters or other == "tokenizer", other
        with pytest.raises(InvalidInput, match=f"has no argument '{other}'") as refusal:
            call(**{other: 1})
        assert advice in str(refusal.value)
    with pytest.raises(TypeError, match="an_unknown_name"):
        call(an_unknown_name=1)


def test_advice_names_arguments_that_exist() -> None:
    for equivalents, function in ((EQUIVALENTS, SamplingParams), (VLLM_NAMES, EngineConfig)):
        parameters = inspect.signature(function).parameters
        for advice in equivalents.values():
            word = advice.removeprefix("pass ").partition(" ")[0].partition("=")[0].strip(",")
            assert not advice.startswith("pass ") or " to " in advice or word in parameters, advice
