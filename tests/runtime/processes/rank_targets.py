"""What the tests of WorkerGroup run in its processes. Light: a process imports this file and nothing of ours."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Rank", "UnreadableError"]


class UnreadableError(Exception):
    """Cannot be pickled back: its arguments are not what its constructor takes."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("unreadable")


class Rank:
    """Does what it is told.

    Args:
        start: "raise" and "sleep" do so instead of starting, on the last rank of ``num_ranks``.
    """

    def __init__(self, rank: int, num_ranks: int, start: str, note: Callable[[str], None]) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.seen: list[Any] = []
        note(f"rank {rank} starts")
        if rank == num_ranks - 1 and start == "raise":
            raise ValueError("no such thing")
        if rank == num_ranks - 1 and start == "sleep":
            time.sleep(3600)

    def echo(self, value: Any) -> Any:
        """What came."""
        return value

    def see(self, value: Any) -> None:
        """Remember it."""
        self.seen.append(value)

    def all_seen(self) -> tuple[int, list[Any]]:
        """What was remembered."""
        return self.rank, self.seen

    def raise_on(self, rank: int, error: BaseException) -> str:
        """Raise on one rank."""
        if rank == self.rank:
            raise error
        return "fine"

    def raise_unreadable(self) -> None:
        """An exception that only its text can tell of."""
        raise UnreadableError(1, 2)

    def unpicklable(self) -> Any:
        """Return what cannot be sent."""
        return lambda: None

    def sleep_on(self, rank: int, seconds: float) -> None:
        """Take long on one rank."""
        if rank == self.rank:
            time.sleep(seconds)

    def stop_on(self, rank: int) -> None:
        """Be stopped on one rank."""
        if rank == self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    def hold_on(self, rank: int, seconds: float) -> None:
        """Take long on one rank, in C that lets no other thread run Python."""
        if rank == self.rank:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def kill_on(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Die on one rank; the others raise as if they had lost a peer, at the same moment."""
        if rank == self.rank:
            os.kill(os.getpid(), number)
        raise ConnectionError("connection closed by peer")

    def exit_on(self, rank: int) -> None:
        """End without a word on one rank."""
        if rank == self.rank:
            os._exit(7)

    def start_child(self) -> int:
        """A process of its own; returns its id."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid

    def threads_and_group(self) -> tuple[bool, bool]:
        """Whether SIGINT is ignored, and whether the process leads a group of its own."""
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.getpgrp() == os.getpid()
