"""The server process: the socket, uvicorn, signals, and a graceful shutdown."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from detcompile.errors import InvalidInput
from detcompile.serving.connections import bounded_protocol
from detcompile.serving.engines.protocol import EngineSpec
from detcompile.serving.service import Service

logger = logging.getLogger(__name__)
ENGINE_LOST = 70  # exit code, os.EX_SOFTWARE: tells a supervisor to restart the server
LAST_ANSWERS_SECONDS = 5  # for connections to close after their requests
STALL_SECONDS = 60.0
KEEP_ALIVE_SECONDS = 75  # longer than clients' and proxies', so that they close first
COLLECTED_OBJECTS = 50_000  # new objects before the youngest generation is collected
LOST_SECONDS = 10.0  # of answering 503 after the engine is lost, so that clients see it, before the server exits


def is_loopback(host: str) -> bool:
    """Return True if an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket before the model compiles, so that a bad address fails early. ``::`` accepts IPv4 clients, too.

    Raises:
        InvalidInput: the address is in use or does not belong to this machine.
    """
    try:
        families = {info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        if socket.AF_INET in families:
            return socket.create_server((host, port))
        takes_both = ipaddress.ip_address(host).is_unspecified if ":" in host else False
        dual = takes_both and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=dual)
    except (OSError, OverflowError, UnicodeError) as error:
        raise InvalidInput(f"cannot listen on {host}, port {port}: {error}. Give another --host or --port") from error


class _Server(uvicorn.Server):
    """uvicorn, with graceful draining.

    Args:
        on_signal: handles signals instead of uvicorn.
    """

    def __init__(self, config: uvicorn.Config, on_signal: "Drain") -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or Ctrl-C."""
        self._on_signal.signaled(self)


class Drain:
    """Shutdown: the first signal lets open requests finish, the second ends them.

    Args:
        seconds: time for open requests to finish.
    """

    def __init__(self, service: Service, seconds: float) -> None:
        self._service = service
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def signaled(self, server: uvicorn.Server) -> None:
        """Handle a signal. Runs in the main thread, between two bytecodes."""
        if self._service.draining:
            server.should_exit = server.force_exit = True
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._begin, server)

    def _begin(self, server: uvicorn.Server) -> None:
        self._task = self._loop.create_task(self._drain(server))

    async def _drain(self, server: uvicorn.Server) -> None:
        end = self._loop.time() + self._seconds
        while self._service.open and self._loop.time() < end:
            await asyncio.sleep(0.05)
        try:
            self._service.release(list(self._service.open.values()))
        finally:
            server.should_exit = True


async def serve(
    service: Service,
    app: ASGIApp,
    spec: EngineSpec,
    sock: socket.socket,
    drain: float,
    stall: float = STALL_SECONDS,
    read_keys: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal or until the engine is lost; return the exit code: 0, or ENGINE_LOST.

    Routes answer while the engine starts; /ready reports when it serves.

    Args:
        drain: seconds for open requests to finish after a signal.
        stall: seconds that a connection may make no progress.
        read_keys: reloads the API keys on SIGHUP.

    Raises:
        DetcompileError: the engine cannot serve this model.
    """
    config = uvicorn.Config(
        app,
        log_config=None,  # its messages go to the root logger's handlers
        http=bounded_protocol(stall),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
        lifespan="off",
        ws="none",
    )
    server, address = _Server(config, Drain(service, drain)), _address(sock)  # before the server closes the socket
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    starting = asyncio.create_task(service.start(spec))
    try:
        async with _reload_on_sighup(service, read_keys):
            await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                hello = starting.result()
                gc.collect()  # exclude imported objects from later collections, and collect less often
                gc.freeze()
                gc.set_threshold(COLLECTED_OBJECTS, 10, 10)
                logger.info("serving %s on %s; fingerprint %s", service.name, address, hello.fingerprint)
                watching = asyncio.create_task(_exit_when_lost(service, server))
                await serving
                watching.cancel()
        lost = service.fleet.failure is not None
    finally:
        server.should_exit = True
        with contextlib.suppress(ProcessLookupError):
            await service.stop()
        starting.cancel()
        await asyncio.gather(serving, starting, return_exceptions=True)
    return ENGINE_LOST if lost else os.EX_OK


@contextlib.asynccontextmanager
async def _reload_on_sighup(service: Service, read_keys: Callable[[], None]) -> AsyncIterator[None]:
    """Within this context, SIGHUP reloads the API keys and restarts the engines one by one."""
    loop, rolls = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    rolling = asyncio.Lock()

    async def roll() -> None:
        async with rolling:
            complete = await service.fleet.roll()
        logger.info("all engines were restarted" if complete else "a restarted engine did not become ready")

    def reload() -> None:
        try:
            read_keys()
        except InvalidInput as error:
            logger.warning("%s; the previous API keys stay valid", error)
        rolls.add(task := loop.create_task(roll()))
        task.add_done_callback(rolls.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in rolls:
            task.cancel()
        await asyncio.gather(*rolls, return_exceptions=True)


async def _exit_when_lost(service: Service, server: uvicorn.Server) -> None:
    while service.fleet.failure is None:
        await asyncio.sleep(0.2)
    logger.error(
        "the engine is lost: %s; requests get 503, and the server exits in %g s", service.fleet.failure, LOST_SECONDS
    )
    await asyncio.sleep(LOST_SECONDS)
    server.should_exit = True


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
