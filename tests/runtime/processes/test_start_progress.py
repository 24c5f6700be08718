"""The progress bar of starting ranks sums what they have read, and stays hidden in short starts."""

import functools
import io
import time

import torch
from rich.console import Console
from torch import nn

from detcompile.progress import listening, stage
from detcompile.runtime.processes.start_progress import StageNotes, StartProgress, reading
from detcompile.weights import named_weights, weight_digests


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def await_drawn(console: Console, *texts: str) -> bool:
    """Whether all of them are drawn within a while."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if all(text in drawn(console) for text in texts):
            return True
        time.sleep(0.05)
    return False


def test_bytes_of_all_ranks_are_added_up() -> None:
    console = terminal()
    with StartProgress(2, console, quiet_seconds=0.0) as progress:
        progress.on_note(0, "loading")
        assert progress.bytes_read == (0, None)
        progress.on_note(0, reading(3_000_000, 5_000_000))
        assert progress.bytes_read == (3_000_000, None)
        progress.on_note(1, reading(1_000_000, 5_000_000))
        progress.on_note(0, reading(4_000_000, 5_000_000))
        assert progress.bytes_read == (5_000_000, 10_000_000)
        assert await_drawn(console, "reading weights", "5.0/10.0 MB")
        progress.on_note(1, "compiling")
        assert await_drawn(console, "rank 1 of 2: compiling")


def test_a_quick_start_draws_nothing() -> None:
    console = terminal()
    with StartProgress(2, console, quiet_seconds=600.0) as progress:
        progress.on_note(0, reading(1, 2))
    assert not drawn(console)


def test_reporting_progress_does_not_change_digests() -> None:
    model = nn.Sequential(*(nn.Linear(7, 5) for _ in range(3)), nn.Embedding(400_000, 70))
    assert sum(t.nbytes for t in model.parameters()) > 1 << 20  # a block
    calls: list[tuple[int, int]] = []
    with_ticks = weight_digests(named_weights(model), lambda done, total: calls.append((done, total)))
    assert with_ticks == weight_digests(named_weights(model))
    total = sum(t.nbytes for t in model.parameters())
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert {of for _, of in calls} == {total} and calls[-1][0] == total and 2 < len(calls) <= 1001
    calls.clear()
    many = nn.ParameterList(nn.Parameter(torch.zeros(9)) for _ in range(5000))
    weight_digests(named_weights(many), lambda *how: calls.append(how))
    assert 500 <= len(calls) <= 1001


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begins(self, text: str) -> None:
        pass

    def ended(self, text: str, seconds: float) -> None:
        self.lines.append(f"{text}: {seconds:.3f}")


def test_stages_of_a_rank_are_told_to_who_listens_to_the_parent() -> None:
    heard, console = Heard(), terminal()
    with listening(heard), StartProgress(2, console, quiet_seconds=0.0) as progress:
        notes = StageNotes(functools.partial(progress.on_note, 1))
        with listening(notes), stage("compile a region"):
            assert await_drawn(console, "rank 1 of 2: compile a region")
    assert [line.rpartition(" ")[0] for line in heard.lines] == ["rank 1 of 2: compile a region:"]
