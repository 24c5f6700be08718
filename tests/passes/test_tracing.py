"""Code that torch cannot trace is rejected with its kind and its line in the model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.codecache import PyCodeCache

from detcompile import StorageError, UnsupportedModel
from detcompile.passes.tracing import compiler_message, trace_once, with_fresh_code
from tests.model_cases import certified, random_model


class Behind(nn.Module):
    """A function of what a module gives."""

    def __init__(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.module(x))


def branches_on_values(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def branches_on_tokens(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 7 else x


def leaves_python(x: Tensor) -> Tensor:
    return x * float(torch.jit.script(nn.Identity())(x).sum())


@pytest.mark.parametrize("function", [branches_on_values, branches_on_tokens, leaves_python])
def test_the_line_of_the_model_is_named(function: Callable[[Tensor], Tensor]) -> None:
    model = random_model("llama", torch.float32, num_hidden_layers=1)
    model.model.layers[0].mlp = Behind(model.model.layers[0].mlp, function)
    with pytest.raises(UnsupportedModel, match=rf"is not one graph .* at test_tracing.py:\d+ in {function.__name__}\n"):
        certified(model)


def test_a_count_as_a_number_of_python_is_named() -> None:
    model = random_model("llama", torch.float32, num_hidden_layers=1)
    model.model.layers[0].mlp = Behind(model.model.layers[0].mlp, lambda x: x * math.log(x.shape[1] + 1))
    with pytest.raises(UnsupportedModel, match=r"is not one graph .* such as math.log\(x.shape\[1\]\)"):
        certified(model)


def test_what_a_compiler_says_is_named() -> None:
    """It has no line of the model: the message is the compiler's, not that some backend raised an error."""

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no room\nfor it")

    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(torch.sin, backend=compiler)(torch.ones(2))
    assert compiler_message(raised.value) == "no room"


def test_code_of_freed_modules_shares_no_name() -> None:
    names = {with_fresh_code(torch.nn.Identity()).__func__.__code__.co_name for _ in range(20)}
    assert len(names) == 20


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(b"", StorageError), (b"def call(", StorageError), (b"def call(): ...\n", UnsupportedModel)],
    ids=["empty", "half", "whole"],
)
def test_damaged_code_in_torchs_cache_is_no_fault_of_the_model(
    damage: bytes, expected: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    name, path = PyCodeCache.write("def call(): ...\n")
    Path(path).write_bytes(damage)

    def broken(gm: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError(f"module 'torch._inductor.runtime.compile_tasks.{name}' has no attribute 'call'")

    module: Any = Behind(nn.Identity(), torch.neg)
    module.model = module.module
    with pytest.raises(expected, match=name):
        trace_once(module, broken, [torch.ones(3)])  # type: ignore[arg-type]
