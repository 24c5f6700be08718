"""CommandLoop: what all engine processes are. One thread computes, another one reads commands, a third one sends
heartbeats; the process ends when the front does."""

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from detcompile.serving.engines.protocol import LENGTH, Broken, Heartbeat, Statistics, decode_command, frame

__all__ = ["CommandLoop", "HEARTBEAT_SECONDS", "Wire"]

HEARTBEAT_SECONDS = 0.25


class Wire:
    """The engine's end of the socket. ``send`` may be called from any thread.

    Args:
        end_code: exit code of this process where the front is gone.
    """

    def __init__(self, connection: socket.socket, end_code: int = 0) -> None:
        self.end_code = end_code
        self._reader = connection.makefile("rb")
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, report: Any) -> None:
        """Send a report; a front that is gone ends this process."""
        data = frame(report)
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError:
            os._exit(self.end_code)

    def receive(self) -> Any:
        """The next command; None once the front is gone."""
        head = self._reader.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        body = self._reader.read(size)
        return decode_command(body) if len(body) == size else None


class CommandLoop(ABC):
    """Serves one front.

    Args:
        wire: connects to it.

    Attributes:
        statistics: what heartbeats tell.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.statistics = Statistics()
        self._work = threading.Event()

    def serve(self) -> None:
        """Compute while there is anything to do; returns never, as the end of the front ends the process.

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
        """Take a command, in the thread that reads them."""

    @abstractmethod
    def step(self) -> bool:
        """Do a part of what there is to do; returns whether there was any."""

    def heartbeat(self) -> Heartbeat:
        """What the next heartbeat tells."""
        return Heartbeat(self.statistics)

    def _read(self) -> None:
        code = self.wire.end_code
        try:
            while (command := self.wire.receive()) is not None:
                self.take(command)
                self._work.set()
        except Exception as error:  # no frame of this protocol: without this thread nothing would be served
            self.wire.send(Broken(type(error).__name__, f"the front sent what is no command: {error!r}"))
            code = 1
        os._exit(code)  # the front is gone, and with it whoever waits for an answer

    def _beat(self) -> None:
        while True:
            self.wire.send(self.heartbeat())
            time.sleep(HEARTBEAT_SECONDS)
