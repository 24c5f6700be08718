"""RankProcess starts, watches and ends a rank's process with all its children; DialedRank is one started elsewhere."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detcompile.runtime.processes import process as worker_process
from detcompile.runtime.processes.process import BEAT, Channel

ENDING_SECONDS = 1.0  # grace period between asking a process to end and killing it


class RankProcess:
    """A process that serves commands from its ``channel``.

    Args:
        files: descriptors that the process inherits under the same numbers.
    """

    def __init__(self, files: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        given = {
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "socket": theirs.fileno(),
            # Linux sends the signal when the thread that started the process ends.
            "die_with_thread": threading.current_thread() is threading.main_thread(),
        }
        with theirs, contextlib.ExitStack() as undone:
            undone.callback(self.channel.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker_process.__file__)), json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is reserved for the caller's results
                pass_fds=(theirs.fileno(), *files),
                process_group=0,  # Ctrl-C in the terminal reaches only the parent
            )
            undone.pop_all()

    @property
    def id(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ending(self) -> Any | None:
        """Exit status of the process, or None. It is not reaped here, so its process and group ids stay reserved."""
        return os.waitid(os.P_PID, self.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process, which then does nothing until another signal continues it.

        Read from Linux: a process that compiles, or waits for a busy core, may be silent but is not stopped.
        """
        try:
            stat = Path(f"/proc/{self.id}/stat").read_text(errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[:1] == ["T"]

    def is_silent(self, since: float) -> bool:
        """Return False: ``is_stopped`` detects a stopped process."""
        return False

    def death(self) -> str:
        """Describe how a process with a closed connection ended; wait a moment for its exit status."""
        deadline = time.monotonic() + ENDING_SECONDS
        while (ended := self.ending) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if ended is None:
            return "it closed its connection"
        if ended.si_code == os.CLD_EXITED:
            return f"its process ended with exit code {ended.si_status}"
        advice = ": was the machine out of memory?" if ended.si_status == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(ended.si_status).name}{advice}"

    def kill(self) -> None:
        """Kill the process and its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.id, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for a killed process and release its id."""
        self._process.wait()


class DialedRank:
    """A process that serves commands from its ``channel`` and ends by itself once that is closed.

    Args:
        connection: leads to the process, which runs ``process.serve`` with ``dialed``.
        id: the process's id on its machine.

    Attributes:
        silence_seconds: time without a beat after which a running command counts as lost.
    """

    is_stopped = False  # unknown on another machine: beats replace it

    def __init__(self, connection: socket.socket, id: int) -> None:
        self.id = id
        self.silence_seconds = math.inf
        self._where = connection.getpeername()[0].removeprefix("::ffff:")
        self.channel = _Beaten(connection)

    @property
    def ending(self) -> Any | None:
        """The text "closed" once the connection is closed; None while it is open."""
        return None if self.channel.fileno() >= 0 else "closed"

    def is_silent(self, since: float) -> bool:
        """Return True if a process that has been busy since ``since`` has sent no beat for too long."""
        return time.monotonic() - max(since, self.channel.moved) > self.silence_seconds

    def death(self) -> str:
        """Describe how a process with a closed connection ended."""
        return f"the connection to its process {self.id} at {self._where} was closed: that machine's log may say why"

    def kill(self) -> None:
        """Do nothing: the process ends with its connection."""

    def reap(self) -> None:
        """Do nothing: the program that started the process waits for it."""


class _Beaten(Channel):
    """A channel that drops beats."""

    def pull(self) -> list[Any]:
        return [message for message in super().pull() if message[1] != BEAT]


def end_processes(processes: list[RankProcess | DialedRank], owner: int) -> None:
    """Let the processes end; kill those that do not, with all their children.

    Args:
        processes: a list that may still grow after this call is registered.
        owner: id of the process that started them; in a fork of it this call does nothing.
    """
    if os.getpid() != owner:
        return
    for process in processes:
        process.channel.close()  # they end when they notice
    for process in processes:
        if process.is_stopped:  # it cannot notice
            process.kill()
    deadline = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < deadline and any(process.ending is None for process in processes):
        time.sleep(0.002)
    for process in processes:
        process.kill()
        process.reap()
