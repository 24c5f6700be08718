"""The loop of all engine processes: one thread computes, one reads commands, one sends heartbeats.

The process ends when the front end does.
"""

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from detcompile.serving.engines.protocol import LENGTH, Broken, Heartbeat, Statistics, decode_command, frame

HEARTBEAT_SECONDS = 0.25


class Wire:
    """The engine's end of the socket. ``send`` may be called from any thread.

    Args:
        end_code: exit code of this process if the front end is gone.
    """

    def __init__(self, connection: socket.socket, end_code: int = 0) -> None:
        self.end_code = end_code
        self._reader = connection.makefile("rb")
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, report: Any) -> None:
        """Send a report; exit the process if the front end is gone."""
        data = frame(report)
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError:
            os._exit(self.end_code)

    def receive(self) -> Any:
        """Return the next command; None if the front end is gone."""
        head = self._reader.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        body = self._reader.read(size)
        return decode_command(body) if len(body) == size else None


class CommandLoop(ABC):
    """Serves one front end.

    Args:
        wire: connection to the front end.

    Attributes:
        statistics: sent with each heartbeat.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.statistics = Statistics()
        self._work = threading.Event()

    def serve(self) -> None:
        """Compute while there is work. Never returns: the process ends with the front end.

        Raises:
            EngineError: the engine failed.
        """
        for run in (self._read, self._beat):
            threading.Thread(target=run, daemon=True).start()
        while True:
            self._work.clear()
            if not self.step():
                self._work.wait()

    @abstractmethod
    def take(self, command: Any) -> None:
        """Handle a command. Runs in the reading thread."""

    @abstractmethod
    def step(self) -> bool:
        """Do a unit of work; return False if there was none."""

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat."""
        return Heartbeat(self.statistics)

    def _read(self) -> None:
        code = self.wire.end_code
        try:
            while (command := self.wire.receive()) is not None:
                self.take(command)
                self._work.set()
        except Exception as error:  # an invalid frame; without this thread nothing is served
            self.wire.send(Broken(type(error).__name__, f"the front end sent an invalid command: {error!r}"))
            code = 1
        os._exit(code)  # nobody waits for answers any more

    def _beat(self) -> None:
        while True:
            self.wire.send(self.heartbeat())
            time.sleep(HEARTBEAT_SECONDS)
