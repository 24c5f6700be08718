"""Stages of a long call: where it stands and what each took, on standard error, or told to who listens."""

import contextlib
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol, TextIO

from rich.console import Console
from rich.status import Status

from detcompile import config

__all__ = ["Listener", "Stage", "aside", "is_terminal", "listener", "listening", "shown", "stage"]


class Listener(Protocol):
    """What is told of stages, which may lie within each other."""

    def begins(self, text: str) -> None:
        """A stage begins, or goes on as another text says."""

    def ended(self, text: str, seconds: float) -> None:
        """A stage has ended, without an exception."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Stage:
    """A stage that is under way."""

    def __init__(self, text: str) -> None:
        self.text = text

    def becomes(self, text: str) -> None:
        """Say more of it, now that more is known."""
        self.text = text
        told = _listener.get()
        if told is not None:
            told.begins(text)


@contextlib.contextmanager
def stage(text: str) -> Iterator[Stage]:
    """Tell who listens that a stage begins, and how long it took."""
    told, start = _listener.get(), time.perf_counter()
    under_way = Stage(text)
    if told is not None:
        told.begins(text)
    yield under_way
    if told is not None:
        told.ended(under_way.text, time.perf_counter() - start)


def listener() -> Listener | None:
    """The listener that is told of stages now; None if there is none."""
    return _listener.get()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Leave the terminal's line to what shows a progress of its own."""
    told = _listener.get()
    if not isinstance(told, _Spinner):
        yield
        return
    told.status.stop()
    try:
        yield
    finally:
        told.status.start()


@contextlib.contextmanager
def listening(told: Listener | None) -> Iterator[None]:
    """Tell this listener of the stages within, and no other; None for nobody."""
    before = _listener.set(told)
    try:
        yield
    finally:
        _listener.reset(before)


@contextlib.contextmanager
def shown(progress: bool | None) -> Iterator[None]:
    """Show the stages within on standard error.

    Args:
        progress: False for silence; None leaves it to who listens already, and to the environment.
    """
    wanted = config.progress_shown() if progress is None else progress
    if progress is not False and _listener.get() is not None:
        yield
    elif not wanted or sys.stderr is None:  # print() would take standard output then
        with listening(None):
            yield
    elif is_terminal(sys.stderr):
        console = Console(stderr=True)
        with console.status("") as status, listening(_Spinner(status)):
            yield
    else:
        with listening(_Lines()):
            yield


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody sits before a stream of sys; a process that was started without one has None there."""
    return stream is not None and not stream.closed and stream.isatty()


class _Spinner:
    """Of a terminal: what is under way, in one line that goes when the call ends."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def begins(self, text: str) -> None:
        self.status.update(f"detcompile: {text}")

    def ended(self, text: str, seconds: float) -> None:
        pass


class _Lines:
    """Elsewhere: a line for what has ended."""

    def begins(self, text: str) -> None:
        pass

    def ended(self, text: str, seconds: float) -> None:
        print(f"detcompile: {text}, {seconds:.1f} s", file=sys.stderr, flush=True)
