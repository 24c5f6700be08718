"""DialledRank: a rank's process that someone else has started, as seen from this end of its connection."""

import math
import socket
import time
from typing import Any

from detcompile.runtime.processes.process import BEAT, Channel

__all__ = ["DialledRank"]


class DialledRank:
    """A process that serves commands from its ``channel`` and ends by itself once that is closed.

    Args:
        connection: leads to the process, which runs ``process.serve`` with ``dialled``.
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
        """How the process ended, as far as its connection shows; None while it is open."""
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
        """Do nothing: whoever started the process waits for it."""


class _Beaten(Channel):
    """A channel that drops beats."""

    def pull(self) -> list[Any]:
        return [message for message in super().pull() if message[1] != BEAT]
