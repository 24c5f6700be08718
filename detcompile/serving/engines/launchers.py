"""Launchers: how the front comes by an engine process, and the connection to one, wherever it runs."""

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
from detcompile.serving.engines.child import Child
from detcompile.serving.engines.handshake import NONCE_BYTES, SECRET_BYTES, keep_alive, new_nonce, proof_of
from detcompile.serving.engines.processes import BOUND, is_stopped

__all__ = ["Connection", "DialIn", "Launcher", "LocalProcess", "MODULE"]

MODULE = "detcompile.serving.engines.engine_process"
HANDSHAKE_SECONDS = 10.0
ENDING_SECONDS = 10.0
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Connection:
    """An engine process that waits for its spec.

    Args:
        reader: gives what it sends.
        writer: takes what it is sent.
        process: an engine of this machine; None for one that somebody else started.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    process: Child | None = None

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, or a rank of it; unknown of other machines."""
        return self.process is not None and is_stopped(self.process.pid)

    async def ending(self) -> str:
        """How it ended, once its end of the connection is closed."""
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
        """End it, and all that it has started; one of another machine ends itself where its connection is closed."""
        if self.process is None:
            self.writer.transport.abort()
        elif self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait for the end of a process that was killed, but not for long: one that waits for a device ends late."""
        self.writer.close()
        if self.process is not None:
            try:
                async with asyncio.timeout(ENDING_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                logger.warning("process %d was killed and has not ended: it waits for a device", self.process.pid)


class Launcher(Protocol):
    """Gives connections to engine processes, as many as are asked for.

    Attributes:
        local: whether they run on this machine, and see all of its GPUs.
    """

    local: bool

    async def open(self) -> Connection:
        """A connection to a process that has imported what it needs, or will soon; where this is cancelled, to none.

        Raises:
            DetcompileError: there is no process to be had.
        """

    async def close(self) -> None:
        """No more connections are asked for."""


class LocalProcess:
    """Starts processes of this machine, each at one end of a pair of sockets.

    Args:
        command: what to run; the number of its socket is appended.
    """

    local = True

    def __init__(self, command: Sequence[str] = (*BOUND, MODULE)) -> None:
        self._command = tuple(command)

    async def open(self) -> Connection:
        """A process that was started now. Nothing is waited for once there is one: it is never nobody's.

        Raises:
            WorkerError: it could not be started.
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
        """Nothing is left open."""


class DialIn:
    """Waits for engines that somebody else starts, and that connect to an address of the front.

    Whoever connects has to prove that it has the secret, which does not travel; what travels is not encrypted.

    Args:
        host: address to listen on. port: 0 takes a free one.
        secret: bytes that the engines have, too.

    Attributes:
        secret: bytes that the engines have, too.
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
        """Host and port that engines connect to; listening begins with the first call."""
        if self._server is None:
            self._server = await asyncio.start_server(self._greet, self._host, self._port)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def open(self) -> Connection:
        """The engine that has waited for longest, or the next one that connects."""
        await self.address()
        while True:
            found = await self._arrived.get()
            if not found.reader.at_eof():  # it may have ended while it waited
                return found

    async def close(self) -> None:
        """Listen no more, and let go of who waits."""
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
            keep_alive(writer.get_extra_info("socket"))  # it may be lost before the heartbeats that it gives once ready
            self._arrived.put_nowait(Connection(reader, writer))
        else:
            writer.close()
