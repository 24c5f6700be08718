"""The server process: a socket, the engine process, and an orderly end."""

import asyncio
import contextlib
import gc
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from detcompile.errors import InvalidInput
from detcompile.serving.connections import bounded_protocol
from detcompile.serving.engines.protocol import EngineSpec
from detcompile.serving.service import Service

__all__ = ["ENGINE_LOST", "is_loopback", "listen", "serve"]

ENGINE_LOST = 70  # exit code, os.EX_SOFTWARE: whoever watches should start another
LAST_ANSWERS_SECONDS = 5  # for connections to end once their requests have
STALL_SECONDS = 60.0
KEEP_ALIVE_SECONDS = 75  # between requests; longer than clients and proxies, so that they close first
COLLECTED_OBJECTS = 50_000  # more of them than before, for a collection of the youngest
LOST_SECONDS = 10.0  # of answering 503 without an engine, so that those who ask learn it, before the server ends


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address, before the model takes its time to compile. ``::`` takes IPv4 clients, too.

    Raises:
        InvalidInput: the address is in use, or not of this machine.
    """
    try:
        families = {info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        if socket.AF_INET in families:
            return socket.create_server((host, port))
        takes_both = ipaddress.ip_address(host).is_unspecified if ":" in host else False
        dual = takes_both and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=dual)
    except OSError as error:
        raise InvalidInput(f"cannot listen on {host}, port {port}: {error}. Give another --host or --port") from error


class _Server(uvicorn.Server):
    """uvicorn, which drains before it stops.

    Args:
        on_signal: called in place of uvicorn's own handling.
    """

    def __init__(self, config: uvicorn.Config, on_signal: "Drain") -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or Ctrl-C."""
        self._on_signal.signalled(self)


class Drain:
    """The end of a server: the first signal lets what is open finish, the second one ends it.

    Args:
        seconds: how long the open requests may take.
    """

    def __init__(self, service: Service, seconds: float) -> None:
        self._service = service
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def signalled(self, server: uvicorn.Server) -> None:
        """A signal has come. Runs in the main thread, between two of its instructions."""
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
    """Serve until a signal, or until the engine is lost; returns the exit code: 0, or ENGINE_LOST then.

    The routes answer while the engine starts: /ready says when it serves.

    Args:
        drain: seconds that open requests have to finish after a signal.
        stall: seconds that a connection may stand still.
        read_keys: reads the API keys again, at SIGHUP.

    Raises:
        DetcompileError: the engine cannot serve this model.
    """
    config = uvicorn.Config(
        app,
        http=bounded_protocol(stall),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
        lifespan="off",
        ws="none",
    )
    server, address = _Server(config, Drain(service, drain)), _address(sock)  # it closes the socket at a signal
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    starting = asyncio.create_task(service.start(spec))
    try:
        async with _rolled_on_hangup(service, read_keys):
            await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                hello = starting.result()
                _shorten_collections()
                _say(f"serving {service.name} on {address}; fingerprint {hello.fingerprint}")
                watching = asyncio.create_task(_end_when_lost(service, server))
                await serving
                watching.cancel()
        lost = service.fleet.failure is not None
    finally:
        server.should_exit = True
        await _ended(service.stop())
        starting.cancel()
        await asyncio.gather(serving, starting, return_exceptions=True)
    return ENGINE_LOST if lost else os.EX_OK


def _shorten_collections() -> None:
    """Garbage is looked for among what requests make, and not in all that was imported; and more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_OBJECTS, 10, 10)


@contextlib.asynccontextmanager
async def _rolled_on_hangup(service: Service, read_keys: Callable[[], None]) -> AsyncIterator[None]:
    """As long as this lasts, SIGHUP has the keys read again, and the engines that serve started anew, one by one."""
    loop, rolls = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    rolling = asyncio.Lock()

    async def roll() -> None:
        async with rolling:
            whole = await service.fleet.roll()
        _say("the engines were started anew" if whole else "an engine that was started anew does not serve")

    def hung_up() -> None:
        try:
            read_keys()
        except InvalidInput as error:
            _say(f"{error}; the keys of before are known still")
        rolls.add(task := loop.create_task(roll()))
        task.add_done_callback(rolls.discard)

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in rolls:
            task.cancel()
        await asyncio.gather(*rolls, return_exceptions=True)


async def _end_when_lost(service: Service, server: uvicorn.Server) -> None:
    while service.fleet.failure is None:
        await asyncio.sleep(0.2)
    _say(f"the engine is lost: {service.fleet.failure}; requests get 503, and the server ends in {LOST_SECONDS:g} s")
    await asyncio.sleep(LOST_SECONDS)
    server.should_exit = True


async def _ended(ending: Awaitable[None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        await ending


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
