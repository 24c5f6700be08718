"""StartProgress: what worker processes tell while they start, as one bar on standard error."""

import os
import re
import threading

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["StartProgress", "reading"]

QUIET_SECONDS = 2.0  # what takes longer shows that it goes on
READING = re.compile(r"reading (\d+) of (\d+) bytes")


def reading(done: int, total: int) -> str:
    """The note of a rank that has read so many bytes of the weights."""
    return f"reading {done} of {total} bytes"


class StartProgress:
    """A context in which ranks start: a bar of the bytes of weights that all of them have read, and what they do.

    Args:
        num_ranks: processes that start.
        console: console to draw on; default: standard error, if that is a terminal. It stays empty otherwise, and where
            nothing takes long.
        quiet_seconds: time before the bar is drawn.
    """

    def __init__(self, num_ranks: int, console: Console | None = None, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._num_ranks = num_ranks
        self._read: dict[int, tuple[int, int]] = {}  # by rank: bytes, and how many there are
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console or Console(stderr=True), transient=True)
        started = f"starting {num_ranks} worker process{'es' if num_ranks > 1 else ''}"
        self._task = self._bar.add_task(started, total=None)
        self._timer = threading.Timer(quiet_seconds, self._bar.start)
        self._timer.daemon = True
        self._drawn = console is not None or os.isatty(2)

    @property
    def bytes_read(self) -> tuple[int, int | None]:
        """Bytes of weights that all ranks have read, and how many there are; None before every rank has told."""
        done, totals = (sum(column) for column in zip(*self._read.values())) if self._read else (0, 0)
        return done, totals if len(self._read) == self._num_ranks else None

    def on_note(self, rank: int, text: str) -> None:
        """A rank's note: ``reading``, or words."""
        found = READING.fullmatch(text)
        if found is None:
            self._bar.update(self._task, description=f"rank {rank} of {self._num_ranks}: {text}")
            return
        self._read[rank] = int(found[1]), int(found[2])
        done, total = self.bytes_read
        self._bar.update(self._task, description="reading weights", completed=done, total=total)

    def __enter__(self) -> "StartProgress":
        if self._drawn:
            self._timer.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._timer.cancel()
        if self._drawn:
            self._timer.join()  # it may be about to draw
        self._bar.stop()
