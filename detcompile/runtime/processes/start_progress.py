"""StartProgress: the progress of starting worker processes, as one bar on standard error."""

import os
import re
import threading
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from detcompile.progress import listener

QUIET_SECONDS = 2.0  # no bar for starts shorter than this
READING = re.compile(r"reading (\d+) of (\d+) bytes")
ENDED = re.compile(r"in (\d+\.\d+) s: (.+)")


def reading(done: int, total: int) -> str:
    """Return a rank's note about the bytes of weights that it has read."""
    return f"reading {done} of {total} bytes"


class StageNotes:
    """A listener in a worker process that reports its stages to the parent as notes."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def begins(self, text: str) -> None:
        """Report the beginning of a stage."""
        self._note(text)

    def ended(self, text: str, seconds: float) -> None:
        """Report the end of a stage."""
        self._note(f"in {seconds:.6f} s: {text}")


class StartProgress:
    """Context manager for starting ranks: shows a bar of the bytes of weights read by all ranks.

    Args:
        num_ranks: processes that start.
        console: console to draw on; default: standard error, if it is a terminal. Nothing is drawn otherwise, or if
            the start is quick.
        quiet_seconds: time before the bar is drawn.
    """

    def __init__(self, num_ranks: int, console: Console | None = None, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._num_ranks = num_ranks
        self._listener = listener()
        self._read: dict[int, tuple[int, int]] = {}  # bytes read and total bytes, by rank
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console or Console(stderr=True), transient=True)
        started = f"starting {num_ranks} worker process{'es' if num_ranks > 1 else ''}"
        self._task = self._bar.add_task(started, total=None)
        self._timer = threading.Timer(quiet_seconds, self._bar.start)
        self._timer.daemon = True
        self._drawn = console is not None or os.isatty(2)

    @property
    def bytes_read(self) -> tuple[int, int | None]:
        """Bytes of weights read by all ranks, and their total; the total is None until every rank has reported."""
        done, totals = (sum(column) for column in zip(*self._read.values())) if self._read else (0, 0)
        return done, totals if len(self._read) == self._num_ranks else None

    def on_note(self, rank: int, text: str) -> None:
        """Handle a rank's note: from ``reading``, from StageNotes, or free text."""
        ended = ENDED.fullmatch(text)
        if ended is not None:
            if self._listener is not None:
                self._listener.ended(f"rank {rank} of {self._num_ranks}: {ended[2]}", float(ended[1]))
            return
        bytes_note = READING.fullmatch(text)
        if bytes_note is None:
            self._bar.update(self._task, description=f"rank {rank} of {self._num_ranks}: {text}")
            return
        self._read[rank] = int(bytes_note[1]), int(bytes_note[2])
        done, total = self.bytes_read
        self._bar.update(self._task, description="reading weights", completed=done, total=total)

    def __enter__(self) -> "StartProgress":
        if self._drawn:
            self._timer.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._timer.cancel()
        if self._drawn:
            self._timer.join()  # it may be about to start the bar
        self._bar.stop()
