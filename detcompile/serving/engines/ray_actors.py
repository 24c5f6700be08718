"""Engines in actors of a Ray cluster. Ray only places them; they connect to the front end themselves."""

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

CONNECT_SECONDS = 10.0
SLOW_SECONDS = 30.0  # between warnings that the cluster has no resources yet
logger = logging.getLogger(__name__)


class Placed:
    """The actor: runs an engine in its process until the connection to the front end closes."""

    def run(self, module: str, host: str, port: int, secret: bytes) -> None:
        """Serve a front end.

        Args:
            module: module whose ``serve`` runs the engine.
            host: the front end's address.
            port: port on which the front end waits for this engine.
            secret: proves the engine's identity.

        Raises:
            OSError: the front end cannot be reached.
        """
        importlib.import_module(module).serve(connected(host, port, secret))


class RayActors:
    """Starts one actor per engine, in a placement group of one bundle, so that an engine's ranks share a node.

    Ray only starts the actors: steps, prompts and tokens do not pass through it, and it restarts nothing. Engines wait
    until the cluster has resources. Each engine's secret passes through Ray; prompts and tokens are sent unencrypted.

    Args:
        address: the cluster's address; None finds a local one or takes RAY_ADDRESS.
        gpus: GPUs per engine; 0 for a cluster without GPUs.
        cpus: CPUs per engine.
        module: module whose ``serve`` runs the engine.

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
        """Place an engine and wait until it connects.

        Raises:
            InvalidInput: there is no such cluster.
            WorkerError: the engine ended before it connected.
        """
        if self._joining is None:
            self._joining = asyncio.create_task(asyncio.to_thread(self._join))
        host = await asyncio.shield(self._joining)
        dial = DialIn(host, 0, secrets.token_bytes(2 * SECRET_BYTES))  # one per engine, which identifies it
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
            connection = arriving.result()
        finally:
            arriving.cancel()
            await dial.close()
        return _RayConnection(connection.reader, connection.writer, kill_actor=lambda: self._kill(actor))

    async def close(self) -> None:
        """Leave the cluster; its engines end."""
        if self._joining is not None:
            await asyncio.gather(self._joining, return_exceptions=True)
            for group in list(self._groups):
                await asyncio.to_thread(self._remove, group)
            for task in self._ended:
                task.cancel()
            await asyncio.to_thread(self._ray.shutdown)

    def _join(self) -> str:
        """Join the cluster; return this node's address as other nodes see it."""
        node, _, port = (self._address or "").rpartition(":")
        local = {"_node_ip_address": node} if _is_loopback(node) else {}  # all nodes are on this machine
        try:
            if node:  # fail fast: Ray would retry for minutes
                socket.create_connection((node.strip("[]"), int(port)), CONNECT_SECONDS).close()
            self._ray.init(address=self._address or "auto", log_to_driver=False, configure_logging=False, **local)
        except (OSError, RuntimeError, ValueError) as error:
            advice = "`ray start --head` starts one on this machine"
            raise InvalidInput(f"--backend ray: cannot join the cluster ({error}); {advice}") from error
        host: str = self._ray.util.get_node_ip_address()
        return host

    def _place(self, host: str, port: int, secret: bytes) -> tuple[Any, Any, Any]:
        """Return a placement group, its actor, and the reference of the actor's run.

        Ray creates them asynchronously.
        """
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
        """Remove an engine's placement group after its end.

        Raises:
            Exception: the engine failed; Ray's exception.
        """
        try:
            await asyncio.wrap_future(run.future())
        finally:
            await asyncio.to_thread(self._remove, group)

    async def _first(self, arriving: asyncio.Task[Any], ended: asyncio.Task[None]) -> None:
        while not (arriving.done() or ended.done()):
            await asyncio.wait([arriving, ended], timeout=SLOW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not (arriving.done() or ended.done()):
                logger.warning("an engine waits for resources of the Ray cluster: %s on one node", self._bundle)

    def _kill(self, actor: Any) -> None:
        """Kill an actor, even one that is stopped by a signal or unreachable."""
        task = asyncio.create_task(asyncio.to_thread(self._ray.kill, actor, no_restart=True))
        self._ended.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._ended.discard(task)
        if not task.cancelled():
            logger.debug("actor ended: %s", task.exception())

    def _remove(self, group: Any) -> None:
        if group in self._groups and self._ray.is_initialized():
            self._groups.discard(group)
            self._ray.util.remove_placement_group(group)


class _RayConnection(Connection):
    """A connection to an engine in an actor.

    Args:
        kill_actor: kills the actor.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kill_actor: Any) -> None:
        super().__init__(reader, writer)
        self._kill_actor = kill_actor

    def kill(self) -> None:
        """Close the connection and kill the actor."""
        super().kill()
        self._kill_actor()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
