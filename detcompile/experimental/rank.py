"""Experimental: a rank of an engine that torchrun starts, on one machine or several. Rank 0 is also the engine process.

Tested with two nodes on one machine, not yet across machines.

Run as ``torchrun ... -m detcompile.experimental.rank --dial HOST:PORT`` with the front end's secret in
DETCOMPILE_ENGINE_SECRET, which also authenticates the ranks to each other. If one rank ends, all exit with code 1, and
torchrun restarts them as often as its --max-restarts allows.
"""

import functools
import os
import select
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from detcompile.api import require_declared
from detcompile.config import Place, engine_secret, place_of_torchrun
from detcompile.errors import DetcompileError, InvalidInput, WorkerError
from detcompile.executors.ranks import Nodes
from detcompile.models.loading import find
from detcompile.models.remote import RemoteModel, compile_in_workers
from detcompile.models.spec import ARCHIVE_SUFFIX, ModelSpec
from detcompile.orders.numerics import Numerics
from detcompile.runtime.processes.process import serve as obey
from detcompile.runtime.processes.rank_process import DialedRank
from detcompile.serving.engines.engine_process import serve
from detcompile.serving.engines.handshake import SECRET_BYTES, connected, front_of, keep_alive, proven, read_exactly
from detcompile.serving.engines.processes import end_with_parent

KEY = "detcompile/rank 0"  # key of rank 0's address in the store
GREETING = struct.Struct(">II")  # sent after the proof: rank and process id
MEETING_SECONDS = 300.0  # for imports, after torchrun has connected all machines
HANDSHAKE_SECONDS = 10.0
SILENCE_SECONDS = 10.0  # without a heartbeat, which a rank sends every 0.25 s of a step
LAST_WORDS_SECONDS = 2.0  # for the engine to report which rank was lost


def main() -> None:
    """Run the rank that torchrun assigned until the engine ends."""
    end_with_parent()
    try:
        secret, place = engine_secret(), place_of_torchrun()
        if sys.argv[1:2] != ["--dial"] or len(sys.argv) != 3:
            raise InvalidInput("give --dial HOST:PORT, where `detcompile serve --dial-in HOST:PORT` listens")
        if len(secret) < SECRET_BYTES:
            raise InvalidInput(
                f"set DETCOMPILE_ENGINE_SECRET to the front end's secret, at least {SECRET_BYTES} bytes, on every node"
            )
        store, _rank, _size = next(dist.rendezvous("env://"))
        if place.rank:
            obey(_to_rank_0(store, place.rank, secret), dialed=True)
        nodes = _met(store, place, secret)
    except DetcompileError as error:
        sys.exit(f"rank: {error}")
    threading.Thread(target=_end_with, args=(nodes,), daemon=True).start()
    serve(front_of(sys.argv[1:], secret), functools.partial(_compiled, nodes), end_code=1)


def _compiled(nodes: Nodes, spec: ModelSpec, tp: int, pp: int) -> RemoteModel:
    """Compile a model across all ranks."""
    if tp * pp != nodes.num_ranks:
        raise InvalidInput(
            f"the front end needs {tp * pp} ranks (tp={tp}, pp={pp}), but torchrun has started"
            f" {nodes.num_ranks} for this engine: change --tp and --pp of `detcompile serve`, or torchrun's"
            " --nnodes and --nproc-per-node"
        )
    if spec.name.endswith(ARCHIVE_SUFFIX):
        raise InvalidInput(f"{spec.name}: ranks started by torchrun compile a checkpoint and cannot load an archive")
    numerics = Numerics(tp_sizes=spec.tp_sizes)
    require_declared(tp, numerics)
    source = find(spec.name, **spec.options)
    model = compile_in_workers(source, tp=tp, pp=pp, numerics=numerics, nodes=nodes)
    for dialed in nodes.dialed:  # not earlier: imports and drivers may block all of a rank's threads
        dialed.silence_seconds = SILENCE_SECONDS
    return model


def _met(store: dist.Store, place: Place, secret: bytes) -> Nodes:
    """Wait until all other ranks have connected."""
    host = _local_address(place)
    ranks: dict[int, DialedRank] = {}
    end = time.monotonic() + MEETING_SECONDS
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listener:
        store.set(KEY, f"{host} {listener.getsockname()[1]}")
        while missing := set(range(1, place.size)) - set(ranks):
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, address = listener.accept()
            except TimeoutError as error:
                raise WorkerError(f"ranks {sorted(missing)} have not connected within {MEETING_SECONDS:g} s") from error
            if (greeting := _greeting(connection, secret)) is None:
                connection.close()
                print(f"rank 0: {address[0]} connected without DETCOMPILE_ENGINE_SECRET", file=sys.stderr)
            else:
                ranks[greeting[0]] = DialedRank(connection, greeting[1])  # a rank's latest connection is live
    return Nodes(host, place.local_size, [ranks[rank] for rank in range(1, place.size)])


def _greeting(connection: socket.socket, secret: bytes) -> tuple[int, int] | None:
    """Return rank and process id of a peer; None without the secret or an answer."""
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        if not proven(connection, secret):
            return None
        rank, process_id = GREETING.unpack(read_exactly(connection, GREETING.size))
    except OSError:
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return rank, process_id


def _to_rank_0(store: dist.Store, rank: int, secret: bytes) -> socket.socket:
    """Connect to rank 0. Until it listens, the store may have its address from before a restart."""
    end = time.monotonic() + MEETING_SECONDS
    try:
        store.wait([KEY], timedelta(seconds=MEETING_SECONDS))
    except dist.DistError as error:
        raise WorkerError(f"rank 0 has not started within {MEETING_SECONDS:g} s: {error}") from error
    while True:
        host, port = store.get(KEY).decode().split()
        try:
            connection = connected(host, int(port), secret)
            connection.sendall(GREETING.pack(rank, os.getpid()))
        except OSError as error:
            if time.monotonic() > end:
                raise WorkerError(f"rank 0 cannot be reached at {host}:{port}: {error}") from error
            time.sleep(0.5)
        else:
            return connection


def _local_address(place: Place) -> str:
    """Return rank 0's address in the network of the store."""
    with socket.create_connection((place.host, place.port)) as probe:
        address: str = probe.getsockname()[0]
    return place.host if address.startswith("127.") or address == "::1" else address  # a name that others resolve


def _end_with(nodes: Nodes) -> NoReturn:
    """End this process when another rank ends, even while no step waits for it."""
    poller = select.poll()
    for dialed in nodes.dialed:
        poller.register(dialed.channel.fileno(), select.POLLRDHUP if sys.platform == "linux" else select.POLLHUP)
    poller.poll()
    time.sleep(LAST_WORDS_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
