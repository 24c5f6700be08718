"""Everything that code holds besides weights enters the key of a kept program."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from detcompile.gc_pause import without_collections
from detcompile.orders.numerics import Numerics
from detcompile.passes.layers.structure import shown_by, view_of
from detcompile.passes.preparation import prepare
from detcompile.passes.sharding.shard import pin_row_parallel
from detcompile.passes.tracing import run_on_two_tokens
from detcompile.passes.warm.descriptions import CalledCode
from detcompile.passes.warm.program_key import inductor_settings, observe_run, program_key
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
    actual = program_key(model, numerics, 256, seen, observe_run(model))
    assert actual is not None
    return actual.digest


@torch.library.custom_op("other_package::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _extents(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Doubled(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.other_package.doubled.default(super().forward(x))
        return result


def test_operators_of_torch_run_unobserved() -> None:
    """The lines are those of a run that observes every call; other packages' operators are observed."""
    model, runs = random_model("llama", torch.float32), []
    for layer in model.model.layers:
        layer.mlp.__class__ = _Doubled
    for quick in (False, True):
        called = CalledCode()
        with torch.no_grad(), without_collections(), called:
            shown_by(view_of(model), run_on_two_tokens, *[called.unobserved] * quick)
        runs.append(called)
    whole, actual = (called.lines for called in runs)
    assert actual == whole and any("_extents" in line for line in actual)
    mine, theirs = (sum("_subclasses" in code.co_filename for code in called._pinned) for called in reversed(runs))
    assert theirs > 50 and mine < theirs / 2  # code of fake tensors


@pytest.fixture(scope="module")
def before() -> str:
    return key()


def test_another_load_has_the_same(before: str) -> None:
    assert key() == before


def test_another_compiler_is_another_key(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detcompile.passes.warm.program_key.compiler_if_any", lambda: "g++ 99")
    assert key() != before


@pytest.mark.parametrize(
    "release", ["torch.__version__", "torch.version.git_version", "triton.__version__", "transformers.__version__"]
)
def test_another_release_is_another_key(release: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"detcompile.passes.warm.program_key.{release}", "5.99.0")
    assert key() != before


@pytest.mark.parametrize("name", CHANGES)
def test_what_code_holds_is_a_part_of_it(name: str, before: str) -> None:
    CHANGES[name]()
    assert key() != before


def test_no_folder_is_part_of_it(before: str) -> None:
    """Inductor sets xpu.cutlass_dir to the working directory, and other settings to folders of the machine."""
    elsewhere = {name: "/elsewhere" for name, value in inductor_config.get_config_copy().items() if "/" in str(value)}
    assert "xpu.cutlass_dir" in elsewhere or "xpu.cutlass_dir" not in inductor_config._config
    with inductor_config.patch(elsewhere):
        assert key() == before
    shown = json.dumps(inductor_settings())
    assert not any(str(folder) in shown for folder in (Path.cwd(), Path.home(), Path(torch.__file__).parent))


CODEGEN = {
    "cpp.simdlen": 256,
    "cpp.min_chunk_size": 1,
    "cpp.threads": 3,
    "epilogue_fusion": False,
    "max_fusion_size": 1,
    "split_reductions": False,
    "fallback_random": True,
    "_use_fp64_for_unbacked_floats": False,
}


@pytest.mark.parametrize("name", CODEGEN)
def test_settings_of_code_are_part_of_it(name: str) -> None:
    before = inductor_settings()
    with inductor_config.patch({name: CODEGEN[name]}):
        assert inductor_settings() != before
    assert inductor_settings() == before


IN_A_FOLDER = """
import detcompile, torch
from detcompile.passes import program_source
program_source.take_program = lambda key, *_: print("key", key) or exit()
detcompile.compile("tiny", device="cpu")
"""


@pytest.mark.exhaustive
def test_three_working_directories_have_one_key(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b", "c/d"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        command = [sys.executable, "-c", IN_A_FOLDER]
        output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
        keys |= {line for line in output.splitlines() if line.startswith("key ")}
    assert len(keys) == 1
