"""Tests that patch the package do not use kept programs, and costs of tests are counted."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from detcompile.passes import pipeline, program_source
from detcompile.passes.backend import Backend
from detcompile.passes.programs.aot import run_plainly
from detcompile.templates.device import gate
from tests import budget
from tests.budget import Budget
from tests.conftest import PATCHES


@pytest.mark.parametrize(
    ("patch", "name"),
    [
        (lambda: mock.patch.object(pipeline, "PASSES", ()), "detcompile.passes.pipeline.PASSES"),
        (lambda: mock.patch.object(program_source, "compile_fx_inner", run_plainly), "program_source.compile_fx_inner"),
        (lambda: mock.patch.object(Backend, "_certify", None), "detcompile.passes.backend.Backend._certify"),
        (lambda: mock.patch.object(gate.Gate, "reference", None), "detcompile.templates.device.gate.Gate.reference"),
        (lambda: mock.patch.dict(pipeline.ROUNDING, {"emulate_precision_casts": False}), "passes.pipeline.ROUNDING"),
    ],
)
def test_no_program_is_kept_while_the_package_is_patched(patch: Any, name: str) -> None:
    before = PATCHES.changed()
    with patch():
        assert any(name in changed for changed in set(PATCHES.changed()) - set(before))
        assert not program_source.programs_kept()
    assert PATCHES.changed() == before


def test_nothing_is_patched_by_default() -> None:
    assert PATCHES.changed() == [] and program_source.programs_kept()


def test_processes_and_seconds_are_counted_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LIMITS", {"programs": 0, "processes": 1})
    counted = Budget(checked=True)
    for _ in range(2):
        steps = counted.pytest_runtest_protocol(SimpleNamespace(nodeid="tests/a.py::test"))
        next(steps)
        subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
        with pytest.raises(StopIteration):
            steps.send(True)
    total = counted.total()
    assert total["tests"] == 2 and total["processes"] == 2 and total["CPU s"] > 0
    session: Any = SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)
    counted.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
