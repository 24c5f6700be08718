"""Target of WorkerGroup's processes in tests. It is light: it imports nothing of the package."""

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
    """Cannot be unpickled: its arguments do not fit its constructor."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("unreadable")


class Rank:
    """A target with one method for each behavior under test.

    Args:
        start: "raise" or "sleep" instead of starting, on the last rank of ``num_ranks``.
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
        """Return the value."""
        return value

    def see(self, value: Any) -> None:
        """Remember the value."""
        self.seen.append(value)

    def all_seen(self) -> tuple[int, list[Any]]:
        """Return the remembered values."""
        return self.rank, self.seen

    def raise_on(self, rank: int, error: BaseException) -> str:
        """Raise on one rank."""
        if rank == self.rank:
            raise error
        return "fine"

    def raise_unreadable(self) -> None:
        """Raise an exception that cannot be unpickled."""
        raise UnreadableError(1, 2)

    def unpicklable(self) -> Any:
        """Return a value that cannot be sent."""
        return lambda: None

    def sleep_on(self, rank: int, seconds: float) -> None:
        """Sleep on one rank."""
        if rank == self.rank:
            time.sleep(seconds)

    def stop_on(self, rank: int) -> None:
        """Stop one rank with a signal."""
        if rank == self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    def hold_on(self, rank: int, seconds: float) -> None:
        """Sleep on one rank in C code that holds the GIL."""
        if rank == self.rank:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def kill_on(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Kill one rank; the others raise at the same moment as if they had lost a peer."""
        if rank == self.rank:
            os.kill(os.getpid(), number)
        raise ConnectionError("connection closed by peer")

    def exit_on(self, rank: int) -> None:
        """Exit on one rank without a message."""
        if rank == self.rank:
            os._exit(7)

    def start_child(self) -> int:
        """Start a child process; return its id."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid

    def threads_and_group(self) -> tuple[bool, bool]:
        """Return whether SIGINT is ignored, and whether the process leads its process group."""
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN, os.getpgrp() == os.getpid()
