"""compile() reports its stages, and when it stays silent."""

import contextlib
import io
import re
import sys
import time
from unittest import mock

import pytest
import torch

import detcompile
from detcompile import UnsupportedModel, progress
from detcompile.progress import listening, shown, stage
from tests.model_cases import MAX_CONTEXT, random_model, without_inductor


class Heard:
    def __init__(self) -> None:
        self.began: list[str] = []
        self.took: list[tuple[str, float]] = []

    def begins(self, text: str) -> None:
        self.began.append(text)

    def ended(self, text: str, seconds: float) -> None:
        self.took.append((text, seconds))


def test_stages_nest_and_report_details() -> None:
    heard = Heard()
    with listening(heard), stage("all") as under_way:
        with stage("a part"):
            pass
        under_way.becomes("all of 3")
    assert heard.began == ["all", "a part", "all of 3"]
    assert [text for text, _ in heard.took] == ["a part", "all of 3"]
    assert 0 <= heard.took[0][1] <= heard.took[1][1]


def test_failed_stage_reports_no_end() -> None:
    heard = Heard()
    with pytest.raises(ValueError, match="broken"), listening(heard), stage("one"):
        raise ValueError("broken")
    with stage("two"):
        pass
    assert (heard.began, heard.took) == (["one"], [])


def compiled(progress: bool | None, name: str = "llama") -> None:
    with without_inductor():
        detcompile.compile(
            random_model(name, torch.float32, num_hidden_layers=3), max_context=MAX_CONTEXT, progress=progress
        )


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    compiled(True)
    printed, lines = capsys.readouterr()
    seconds = r", \d+\.\d s"
    assert not printed
    assert re.search(rf"^detcompile: capture 1 of 3 layers over a batch{seconds}$", lines, re.MULTILINE)
    assert re.search(rf"^detcompile: compile region 1 of at most 3{seconds}$", lines, re.MULTILINE)
    assert re.search(
        rf"^detcompile: capture 1 of 3 layers, certify \d+ operations and compile{seconds}$", lines, re.MULTILINE
    )


def test_long_stage_is_named_before_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.02)
    with shown(True), stage("long"):
        time.sleep(0.2)
    with contextlib.suppress(ValueError), shown(True), stage("failed"):
        raise ValueError
    time.sleep(0.1)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "detcompile: long, still running after 0.02 s"
    assert second.startswith("detcompile: long, 0.2 s")


@pytest.mark.parametrize("progress", [False, None])
def test_disabled_progress_prints_nothing(
    progress: bool | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETCOMPILE_PROGRESS", "0" if progress is None else "1")
    compiled(progress)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_line_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with mock.patch.object(sys, "stderr", Terminal()) as terminal:
        with shown(True), stage("one"):
            pass
        written = terminal.getvalue()
    assert "detcompile: one" in written
    assert written.count("\n") == 1 and written.endswith("\x1b[1A\x1b[2K")  # up to that line, which is erased


def test_a_refusal_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedModel):
        detcompile.compile(random_model("falcon", torch.float32, alibi=True), max_context=MAX_CONTEXT, progress=True)
    assert "compile" not in capsys.readouterr().err
