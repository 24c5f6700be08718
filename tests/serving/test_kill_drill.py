"""Streams of the embedded model whose engine is killed or stopped at random come to the bytes of undisturbed ones."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kill_drill import Drill, bodies
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import Server, started


@pytest.fixture
def mortal(folder: Path) -> Iterator[Server]:
    """A server whose engines may be killed as often as one likes."""
    found = started(folder, "--max-restarts", "1000")
    yield found
    if found.process.poll() is None:
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(60) == 0


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=EXHAUSTIVE)])
def test_no_token_is_lost_doubled_or_another(mortal: Server, rounds: int) -> None:
    drill = Drill(mortal.url, mortal.process.pid, bodies(40, 48))
    expected = drill.undisturbed()
    assert drill.undisturbed() == expected
    for number in range(rounds):
        for index, (found, whole) in enumerate(zip(drill.disturbed(), expected, strict=True)):
            assert found == whole, f"stream {index} of round {number}"
