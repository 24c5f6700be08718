"""DialledRank: one rank's process that somebody else has started, as the caller sees it at its end of a connection."""

import math
import socket
import time
from typing import Any

from detcompile.runtime.processes.process import BEAT, Channel

__all__ = ["DialledRank"]


class DialledRank:
    """A process that serves commands from its ``channel``, and ends by itself once that is closed.

    Args:
        connection: leads to the process, which runs ``process.serve`` as one that dialled.
        id: the process's id on its machine.

    Attributes:
        silence_seconds: time without a beat after which a command counts as never answered.
    """

    is_stopped = False  # asked of a machine, which may be another one: beats tell

    def __init__(self, connection: socket.socket, id: int) -> None:
        self.id = id
        self.silence_seconds = math.inf
        self._where = connection.getpeername()[0].removeprefix("::ffff:")
        self.channel = _Beaten(connection)

    @property
    def ending(self) -> Any | None:
        """How the process ended, as far as that is known: its connection tells."""
        return None if self.channel.fileno() >= 0 else "closed"

    def is_silent(self, since: float) -> bool:
        """Whether a process that has had something to do since then has not told that it runs."""
        return time.monotonic() - max(since, self.channel.moved) > self.silence_seconds

    def death(self) -> str:
        """How a process whose connection is closed has ended, in words."""
        return f"the connection to its process {self.id} at {self._where} was closed: that machine's log may say why"

    def kill(self) -> None:
        """Nothing: it ends with its connection."""

    def reap(self) -> None:
        """Nothing: it is waited for by whoever started it."""


class _Beaten(Channel):
    """A channel without the beats among its messages."""

    def pull(self) -> list[Any]:
        return [message for message in super().pull() if message[1] != BEAT]
