"""Progress of a long call: its stages and their durations, on standard error or sent to a listener."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol, TextIO

from rich.console import Console
from rich.status import Status

from detcompile import config


class Listener(Protocol):
    """Receives the stages of a call. Stages may be nested."""

    def begins(self, text: str) -> None:
        """Begin a stage, or change its text."""

    def ended(self, text: str, seconds: float) -> None:
        """End a stage that raised no exception."""


PATIENCE = 10.0  # seconds
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Stage:
    """A running stage."""

    def __init__(self, text: str) -> None:
        self.text = text

    def becomes(self, text: str) -> None:
        """Change the stage's text."""
        self.text = text
        current = _listener.get()
        if current is not None:
            current.begins(text)


@contextlib.contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Report the block to the listener as a stage, with its duration."""
    current, start = _listener.get(), time.perf_counter()
    running = Stage(text)
    if current is not None:
        current.begins(text)
    yield running
    if current is not None:
        current.ended(running.text, time.perf_counter() - start)


def listener() -> Listener | None:
    """Return the current listener, or None."""
    return _listener.get()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Pause the spinner while the block shows its own progress."""
    current = _listener.get()
    if not isinstance(current, _Spinner):
        yield
        return
    current.status.stop()
    try:
        yield
    finally:
        current.status.start()


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Send the stages inside the block to this listener only; None discards them."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


@contextlib.contextmanager
def shown(progress: bool | None) -> Iterator[None]:
    """Show the stages inside the block on standard error.

    Args:
        progress: False hides them; None keeps the current listener, or follows DETCOMPILE_PROGRESS.
    """
    wanted = config.progress_shown() if progress is None else progress
    if progress is not False and _listener.get() is not None:
        yield
    elif not wanted or sys.stderr is None:  # print(file=None) would write to standard output
        with listening(None):
            yield
    elif is_terminal(sys.stderr):
        console = Console(stderr=True)
        with console.status("") as status, listening(_Spinner(status)):
            yield
    else:
        lines = _Lines()
        try:
            with listening(lines):
                yield
        finally:
            lines.stop_timer()


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream of ``sys`` is a terminal. It is None if the process has no such stream."""
    return stream is not None and not stream.closed and stream.isatty()


class _Spinner:
    """Shows the running stage in one line of the terminal, removed when the call ends."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def begins(self, text: str) -> None:
        self.status.update(f"detcompile: {text}")

    def ended(self, text: str, seconds: float) -> None:
        pass


class _Lines:
    """Prints one line for each stage that has ended, and one for a stage that is still running after PATIENCE."""

    def __init__(self) -> None:
        self._timer = threading.Timer(0, print)

    def begins(self, text: str) -> None:
        self.stop_timer()
        line = f"detcompile: {text}, still running after {PATIENCE:g} s"
        self._timer = threading.Timer(PATIENCE, print, [line], {"file": sys.stderr, "flush": True})
        self._timer.daemon = True
        self._timer.start()

    def stop_timer(self) -> None:
        self._timer.cancel()

    def ended(self, text: str, seconds: float) -> None:
        self.stop_timer()
        print(f"detcompile: {text}, {seconds:.1f} s", file=sys.stderr, flush=True)
