"""Launchers start engine processes, or wait for them, and return connections to them."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from detcompile.errors import WorkerError
from detcompile.serving.engines.handshake import NONCE_BYTES, SECRET_BYTES, keep_alive, new_nonce, proof_of
from detcompile.serving.engines.processes import BOUND, Child, is_stopped

MODULE = "detcompile.serving.engines.engine_process"
HANDSHAKE_SECONDS = 10.0
ENDING_SECONDS = 10.0
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Connection:
    """A connection to an engine process that waits for its spec.

    Args:
        reader: receives reports.
        writer: sends commands.
        process: the process if the front end started it on this machine; None otherwise.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    process: Child | None = None

    @property
    def stopped(self) -> bool:
        """Return True if a signal has stopped the process or a rank of it; always False on other machines."""
        return self.process is not None and is_stopped(self.process.pid)

    async def ending(self) -> str:
        """Return how the process ended, after its socket was closed."""
        if self.process is None:
            return "its connection was closed"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self.process.wait()
        code = self.process.returncode
        if code is None:
            return "it closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Kill the process and its children; a remote engine ends when its connection closes."""
        if self.process is None:
            self.writer.transport.abort()
        elif self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait for the end of a killed process, up to ENDING_SECONDS: one that waits for a device ends late."""
        self.writer.close()
        if self.process is not None:
            try:
                async with asyncio.timeout(ENDING_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                logger.warning("process %d was killed but has not ended: it waits for a device", self.process.pid)


class Launcher(Protocol):
    """Opens connections to engine processes.

    Attributes:
        local: the processes run on this machine and see all of its GPUs.
    """

    local: bool

    async def open(self) -> Connection:
        """Return a connection to a new process, which may still be importing. If canceled, no process is left.

        Raises:
            DetcompileError: no process could be launched.
        """

    async def close(self) -> None:
        """Release resources; ``open`` is not called again."""


class LocalProcess:
    """Starts processes on this machine, each connected by a socket pair.

    Args:
        command: program and arguments; the socket's file descriptor is appended.
    """

    local = True

    def __init__(self, command: Sequence[str] = (*BOUND, MODULE)) -> None:
        self._command = tuple(command)

    async def open(self) -> Connection:
        """Start a process. Nothing is awaited after the start, so that the process cannot be orphaned.

        Raises:
            WorkerError: the process could not be started.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = Child([*self._command, str(theirs.fileno())], passed=[theirs.fileno()])
            except OSError as error:
                writer.close()
                raise WorkerError(f"an engine process could not be started: {error}") from error
        return Connection(reader, writer, process)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


class DialIn:
    """Waits for engines that are started elsewhere and connect to an address of the front end.

    Engines prove that they have the secret, which is never sent. The connection is not encrypted.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        secret: the secret shared with the engines.

    Attributes:
        secret: the secret shared with the engines.
    """

    local = False

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        assert len(secret) >= SECRET_BYTES
        self.secret = secret
        self._host = host
        self._port = port
        self._arrived: asyncio.Queue[Connection] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._closed = False

    async def address(self) -> tuple[str, int]:
        """Return host and port for engines; the first call starts listening."""
        if self._server is None:
            self._server = await asyncio.start_server(self._greet, self._host, self._port)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def open(self) -> Connection:
        """Return the engine that has waited longest, or the next that connects."""
        await self.address()
        while True:
            connection = await self._arrived.get()
            if not connection.reader.at_eof():  # it did not end while it waited
                return connection

    async def close(self) -> None:
        """Stop listening and close waiting connections."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        while not self._arrived.empty():
            self._arrived.get_nowait().kill()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = new_nonce()
        writer.write(nonce)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                proof = await reader.readexactly(NONCE_BYTES)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            proof = b""
        if proof_of(self.secret, nonce, proof) and not self._closed:
            keep_alive(writer.get_extra_info("socket"))  # there are no heartbeats before it is ready
            self._arrived.put_nowait(Connection(reader, writer))
        else:
            writer.close()
