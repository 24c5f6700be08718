"""Streams of the embedded model have the same bytes when engines and servers are killed at random."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kill_drill import FRONT_EVERY, Drill, bodies
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import started


@pytest.fixture
def drill(folder: Path, tmp_path: Path) -> Iterator[Drill]:
    """Rounds against a server that drafts and allows any number of killed engines."""
    options = ["--max-restarts", "1000", "--speculation", "always", "--journal", str(tmp_path / "journal")]

    def start() -> tuple[str, subprocess.Popen[str]]:
        actual = started(folder, *options)
        return actual.url, actual.process

    actual = Drill(start, bodies(40, 48))
    yield actual
    if actual.process.poll() is None:
        actual.process.send_signal(signal.SIGTERM)
        assert actual.process.wait(60) == 0


@pytest.mark.parametrize("rounds", [pytest.param(5, marks=EXHAUSTIVE)])
def test_kills_lose_repeat_or_change_no_token(drill: Drill, rounds: int) -> None:
    assert rounds >= FRONT_EVERY
    expected = drill.undisturbed()
    assert drill.undisturbed() == expected
    for number in range(rounds):
        for index, (actual, whole) in enumerate(zip(drill.disturbed(), expected, strict=True)):
            assert actual == whole, f"stream {index} of round {number}"
