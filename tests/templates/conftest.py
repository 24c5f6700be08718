"""Settings that all template tests share."""

from collections.abc import Iterator
from typing import Any

import pytest

from detcompile.templates.device.gate import Gate
from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import INTERPRETED


@pytest.fixture(scope="session")
def offline_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineCompiler]:
    compiler = OfflineCompiler(tmp_path_factory.mktemp("triton"))
    yield compiler
    compiler.close()


@pytest.fixture
def gated() -> None:
    """Run the gate in the interpreter too."""


if INTERPRETED:

    @pytest.fixture(autouse=True)
    def first_candidates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make launches take the first candidate, whose bits the tests compare: gates would take half of their time."""

        def choose(gate: Gate[Any, Any], problem: Any, device: Any) -> Any:
            return next(iter(gate.candidates(problem)), gate.reference(problem))

        if "gated" not in request.fixturenames:
            monkeypatch.setattr(Gate, "_choose", choose)
