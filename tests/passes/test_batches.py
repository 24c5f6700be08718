"""One run of a model's Python certifies a batch of several rows; Dynamo traces what that run does not certify."""

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from transformers import PreTrainedModel
from transformers.utils.import_utils import is_torchdynamo_compiling

from detcompile import DetcompileError, Numerics, UncertifiedOp
from detcompile.passes import batches
from detcompile.passes.batches import certificate_of_batches, certify_batches
from detcompile.passes.preparation import prepare
from detcompile.passes.sharding.shard import pin_row_parallel
from detcompile.passes.tracing import find_repeats
from tests.exhaustive import exhaustive_unless
from tests.model_cases import ARCHITECTURES, STATEFUL, random_model
from tests.passes.proof import planted_modules, test_certificate, test_holes

CPU = torch.device("cpu")
H = 16


def certified_over(function: Callable[[Tensor], Any], rows: int = 10, features: int = H) -> None:
    """Certify ``function`` of embedded tokens [B, T, features]."""

    def run(weights: dict[str, Tensor], ids: Tensor, positions: Tensor) -> Any:
        return function(nn.functional.embedding(ids, weights["table"]))

    certificate_of_batches(run, {"table": torch.randn(rows, features)}, CPU, Numerics(), None)


VIOLATIONS = test_certificate.VIOLATIONS | {name: function for name, (function, _) in test_holes.HOLES.items()}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_what_lets_rows_meet_is_not_certified(name: str) -> None:
    with pytest.raises(DetcompileError):
        certified_over(VIOLATIONS[name])


OF_ROWS = ("number of rows", "token or batch count", "no rule", "over [batch]", "not pinned", "random numbers")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (reason, _, args) in planted_modules.REFUSED.items()
        if reason in OF_ROWS and hasattr(planted_modules, name) and len(args) == 1 and isinstance(args[0], Tensor)
    ],
)
def test_a_planted_module_is_not_certified(name: str) -> None:
    """Anything in a module that mixes rows. The packed trace rejects state that it keeps between calls."""
    _, module, _ = planted_modules.REFUSED[name]
    with pytest.raises((DetcompileError, RuntimeError)):
        certified_over(module, features=planted_modules.D)


HARMLESS = test_certificate.HARMLESS | test_holes.HARMLESS


@pytest.mark.parametrize("name", HARMLESS)
def test_what_keeps_rows_apart_is_certified(name: str) -> None:
    certified_over(HARMLESS[name])


ASKS = {
    "torch": torch.compiler.is_compiling,
    "torch, of Dynamo": is_dynamo_compiling,
    "transformers": is_torchdynamo_compiling,
}


@pytest.mark.parametrize("name", ASKS)
def test_code_that_only_a_compiler_runs_is_seen(name: str) -> None:
    asks = ASKS[name]
    before = asks()
    with pytest.raises(UncertifiedOp, match=r"aten\.mean"):
        certified_over(lambda x: x - x.mean(0, keepdim=True) if asks() else x)
    assert asks() is before


def test_threads_leave_torchs_answers_as_they_were() -> None:
    threads = [threading.Thread(target=certified_over, args=(lambda x: x * 2,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch.compiler.is_compiling() and not is_dynamo_compiling()


def prepared(name: str) -> tuple[PreTrainedModel, Any]:
    model = random_model(name, torch.float32)
    seen, _ = prepare(model, Numerics(), 2048)
    pin_row_parallel(model, Numerics())
    return model, seen


QUICK = ("qwen3", "gpt2", "falcon", "bloom", "mamba2")  # norms of heads, biases, writes in place, autograd, a state


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in QUICK, [*ARCHITECTURES, *STATEFUL]))
def test_models_are_certified_without_dynamo(name: str) -> None:
    model, seen = prepared(name)
    repeats = None if seen.states else find_repeats(model)
    with mock.patch.object(batches, "trace_once", side_effect=AssertionError("traced by Dynamo")):
        certify_batches(model, Numerics(), seen.expected, repeats)


class _Counting(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) if int(x.shape[0]) > 0 else x


def test_dynamo_decides_where_the_code_asks_for_an_extent() -> None:
    """int() of an extent fixes it in a plain run, where Dynamo keeps it a symbol."""
    model, seen = prepared("qwen3")
    for layer in model.model.layers:
        layer.mlp = _Counting(layer.mlp)
    with mock.patch.object(batches, "trace_once") as traced:
        certify_batches(model, Numerics(), seen.expected, find_repeats(model))
    traced.assert_called_once()
