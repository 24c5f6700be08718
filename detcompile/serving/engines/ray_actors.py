"""RayActors: engines in actors of a Ray cluster, which Ray only places. They connect to the front themselves."""

import asyncio
import importlib
import ipaddress
import logging
import secrets
import socket
from typing import Any

from detcompile.errors import InvalidInput, WorkerError
from detcompile.serving.engines.handshake import SECRET_BYTES, connected
from detcompile.serving.engines.launchers import MODULE, Connection, DialIn

__all__ = ["Placed", "RayActors"]

CONNECT_SECONDS = 10.0
SLOW_SECONDS = 30.0  # after which it is said that the cluster has no room yet
logger = logging.getLogger(__name__)


class Placed:
    """What runs in an actor: an engine, in the actor's own process, which ends with the connection to its front."""

    def run(self, module: str, host: str, port: int, secret: bytes) -> None:
        """Serve a front.

        Args:
            module: name of the engine's module, whose ``serve`` takes the connection.
            host: the front's address.
            port: the port on which the front waits for this engine.
            secret: proves to the front that it is this one.

        Raises:
            OSError: the front cannot be reached.
        """
        importlib.import_module(module).serve(connected(host, port, secret))


class RayActors:
    """Starts an actor for each engine, in a placement group of one bundle: an engine's ranks share a node.

    Ray carries nothing but the start: no step, prompt or token passes through it, and it starts nothing again. What the
    cluster has no room for waits. The secret of each engine passes through Ray; prompts and tokens travel unencrypted.

    Args:
        address: the cluster's; None finds the one of this machine, or that of RAY_ADDRESS.
        gpus: GPUs of an engine; 0 on a cluster without.
        cpus: CPUs of an engine.
        module: name of the module whose ``serve`` is the engine.

    Raises:
        InvalidInput: Ray is not installed.
    """

    local = False

    def __init__(self, address: str | None = None, *, gpus: int = 0, cpus: int = 1, module: str = MODULE) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            advice = "pip install '.[ray]' in a checkout of detcompile"
            raise InvalidInput(f"--backend ray: Ray is not installed: {advice}") from error
        self._address = address
        self._bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._module = module
        self._joining: asyncio.Task[str] | None = None
        self._ended: set[asyncio.Task[None]] = set()
        self._groups: set[Any] = set()

    async def open(self) -> Connection:
        """An engine that has connected, from wherever Ray has put it.

        Raises:
            InvalidInput: there is no such cluster.
            WorkerError: the engine ended before it connected.
        """
        if self._joining is None:
            self._joining = asyncio.create_task(asyncio.to_thread(self._join))
        host = await asyncio.shield(self._joining)
        dial = DialIn(host, 0, secrets.token_bytes(2 * SECRET_BYTES))  # one for each, so that it is known who is who
        _, port = await dial.address()
        group, actor, run = await asyncio.to_thread(self._place, host, port, dial.secret)
        self._groups.add(group)
        ended = asyncio.create_task(self._remove_ended(group, run))
        self._ended.add(ended)
        ended.add_done_callback(self._forget)
        arriving = asyncio.create_task(dial.open())
        try:
            await self._first(arriving, ended)
            if not arriving.done():
                error = ended.exception()
                raise WorkerError(f"an engine in a Ray actor ended before it served: {error or 'it was stopped'}")
            found = arriving.result()
        finally:
            arriving.cancel()
            await dial.close()
        return _RayConnection(found.reader, found.writer, kill_actor=lambda: self._kill(actor))

    async def close(self) -> None:
        """Leave the cluster; what was placed there ends."""
        if self._joining is not None:
            await asyncio.gather(self._joining, return_exceptions=True)
            for group in list(self._groups):
                await asyncio.to_thread(self._remove, group)
            for task in self._ended:
                task.cancel()
            await asyncio.to_thread(self._ray.shutdown)

    def _join(self) -> str:
        """Join the cluster; returns the address at which its nodes reach this one."""
        node, _, port = (self._address or "").rpartition(":")
        own = {"_node_ip_address": node} if _is_loopback(node) else {}  # all nodes are on this machine
        try:
            if node:  # which Ray would try for minutes
                socket.create_connection((node.strip("[]"), int(port)), CONNECT_SECONDS).close()
            self._ray.init(address=self._address or "auto", log_to_driver=False, configure_logging=False, **own)
        except (OSError, RuntimeError, ValueError) as error:
            wanted = "`ray start --head` begins a cluster of this machine"
            raise InvalidInput(f"--backend ray: there is no such cluster ({error}); {wanted}") from error
        host: str = self._ray.util.get_node_ip_address()
        return host

    def _place(self, host: str, port: int, secret: bytes) -> tuple[Any, Any, Any]:
        """A group, its actor, and the reference to the end of what runs in it; nothing of it need exist yet."""
        groups: Any = importlib.import_module("ray.util.placement_group")
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        group = groups.placement_group([self._bundle], strategy="STRICT_PACK")
        placed = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        kind = self._ray.remote(Placed).options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=placed,
            max_restarts=0,
            max_task_retries=0,
        )
        actor = kind.remote()
        return group, actor, actor.run.remote(self._module, host, port, secret)

    async def _remove_ended(self, group: Any, run: Any) -> None:
        """Give back what an engine had, once it has ended.

        Raises:
            Exception: how it ended, as Ray says it.
        """
        try:
            await asyncio.wrap_future(run.future())
        finally:
            await asyncio.to_thread(self._remove, group)

    async def _first(self, arriving: asyncio.Task[Any], ended: asyncio.Task[None]) -> None:
        while not (arriving.done() or ended.done()):
            await asyncio.wait([arriving, ended], timeout=SLOW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not (arriving.done() or ended.done()):
                logger.warning("an engine waits for room in the Ray cluster: it needs %s on one node", self._bundle)

    def _kill(self, actor: Any) -> None:
        """End an actor, also one that is stopped by a signal or unreachable."""
        task = asyncio.create_task(asyncio.to_thread(self._ray.kill, actor, no_restart=True))
        self._ended.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._ended.discard(task)
        if not task.cancelled():
            logger.debug("of an actor: %s", task.exception())

    def _remove(self, group: Any) -> None:
        if group in self._groups and self._ray.is_initialized():
            self._groups.discard(group)
            self._ray.util.remove_placement_group(group)


class _RayConnection(Connection):
    """A connection to an engine in an actor.

    Args:
        kill_actor: ends the actor.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kill_actor: Any) -> None:
        super().__init__(reader, writer)
        self._kill_actor = kill_actor

    def kill(self) -> None:
        """End the connection, and the actor."""
        super().kill()
        self._kill_actor()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
